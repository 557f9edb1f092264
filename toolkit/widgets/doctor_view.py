"""The Log Doctor's widgets: paste or upload, findings with their lines, tables, figures. A view: it decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from toolkit.catalogue import model_ids
from toolkit.errors import PrefillLabError
from toolkit.serverlogs.findings.finding import Finding
from toolkit.views import markup
from toolkit.widgets import doctor_panels as panels
from toolkit.widgets.binding import bind, close_all, follow_subshell
from toolkit.widgets.doctor_state import REFUSED, DoctorState
from toolkit.widgets.painter import Painter
from toolkit.widgets.parts import LABEL, html, named

if TYPE_CHECKING:
    from toolkit.widgets.forecast_state import ForecastState
    from toolkit.widgets.state import LabState


class DoctorView:
    """Words follow when the log is read, figures when they are drawn: both on threads of their own."""

    def __init__(self, state: DoctorState, lab: LabState | None = None, forecast: ForecastState | None = None) -> None:
        self._state, self._lab, self._forecast = state, lab, forecast
        self._explainer, self._artist = Painter(self._explain), Painter(self._draw)
        self.status, self.summary = html("doctor-status"), html("doctor-summary")
        self.tables, self.figures, self.taken = html("doctor-tables"), html("doctor-figures"), html("doctor-taken")
        self.findings = named(w.VBox([], layout=_full()), "doctor-findings")
        self._excerpts: list[w.HTML] = []
        words = "Use these settings in the Lab" if lab is not None else "Show these settings for a Lab"
        self.take = _button(words, "arrow-right", "doctor-take", self._take, "What the log shows of its settings")
        self.take.layout.align_self = "flex-start"
        self._results = w.VBox(
            [self.summary, self.findings, self.take, self.taken, self.figures, self.tables], layout=_full()
        )
        self.box = w.VBox([*self._inputs(), self.status, self._results], layout=_full())
        state.observe(self._show_status, ["message", "busy"])
        state.observe(self._show, "diagnosis")
        state.observe(self._show_excerpt, ["finding", "line"])
        state.observe(self._show_taken, "taken")
        self._show_status()
        self._show()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything asked for is read and drawn."""
        for painter in (self._explainer, self._artist):
            painter.wait(timeout)

    # --- what is given ----------------------------------------------------------------------------------------

    def _inputs(self) -> list[w.Widget]:
        state = self._state
        paste = named(
            w.Textarea(
                description="Log",
                placeholder="paste a server's log here",
                continuous_update=False,  # or a log of megabytes would be sent with every key
                rows=7,
                style=LABEL,
                layout=w.Layout(width="98%"),
            ),
            "paste",
        )
        bind(state, "text", paste)
        upload = named(
            w.FileUpload(
                accept="", multiple=False, description="Upload a log (to 9 MB)", layout=w.Layout(width="auto")
            ),
            "upload",
        )
        upload.observe(self._uploaded, "value")
        explain = _button("Explain", "stethoscope", "explain", self.ask, "Say what the log shows", "primary")
        clear = _button("Clear log", "eraser", "doctor-clear", self._clear, "Forget the log")
        model = w.Combobox(
            options=model_ids(), description="Model", placeholder="what the log names", style=LABEL, **_once()
        )
        cards = [("none: no forecast", ""), *((gpu, gpu) for gpu in state.gpus)]
        gpu = w.Dropdown(options=cards, description="Card", style=LABEL)
        version = w.Text(description="SGLang release", placeholder="by its wording", style=LABEL, **_once())
        for name, widget in (("model", model), ("gpu", gpu), ("version", version)):
            bind(state, name, widget)
            named(widget, f"doctor-{name}")
        act = w.HBox([explain, upload, clear], layout=_wrapping())
        beside = w.HBox([model, gpu, version], layout=_wrapping())
        return [w.HTML(panels.STYLE + panels.HINT, layout=_full()), paste, beside, act]

    def ask(self) -> None:
        """Explain the log given last, soon."""
        self._explainer.ask(now=True)

    def _uploaded(self, change: dict[str, Any]) -> None:
        for file in change["new"]:
            self._state.load(bytes(file["content"]), name=str(file["name"]))
            change["owner"].value = ()  # so that the same file can be given again, and its bytes are not kept twice
            self.ask()

    def _clear(self) -> None:
        self._state.clear()

    def _explain(self) -> bool:
        self._state.explain()
        return False

    # --- what is shown ----------------------------------------------------------------------------------------

    def _show_status(self, _: object = None) -> None:
        words = self._state.message
        refused = ' class="problem"' if words.startswith(REFUSED) else ""
        self.status.value = f'<div role="status"{refused}>{markup.safe(words)}</div>' if words else ""

    def _show(self, _: object = None) -> None:
        diagnosis = self._state.diagnosis
        self._results.layout.display = "none" if diagnosis is None else "flex"
        self.summary.value = panels.summary_html(diagnosis)
        self._show_findings(diagnosis.findings if diagnosis is not None else ())
        self.tables.value, self.figures.value = panels.tables_html(diagnosis), ""
        if diagnosis is not None:
            self.figures.value = '<p class="source">Drawing.</p>'
            self._artist.ask(now=True)

    def _draw(self) -> bool:
        drawn = None
        while drawn is not self._state.diagnosis:  # another log may be explained while one is drawn
            drawn = self._state.diagnosis
            self.figures.value = panels.figures_html(drawn)
        return False

    def _show_findings(self, findings: tuple[Finding, ...]) -> None:
        before = self.findings.children
        self._excerpts = [html("excerpt") for _ in findings[: panels.MOST_FINDINGS]]
        rows = [self._row(number, one) for number, one in enumerate(findings[: panels.MOST_FINDINGS])]
        left = len(findings) - len(rows)
        words = f"{left} more findings are not shown." if left else "" if findings else "No findings."
        rows.append(w.HTML(f'<p class="source">{words}</p>' if words else ""))
        for row in rows:
            follow_subshell(row)
        self.findings.children = rows
        for row in before:
            close_all(row)

    def _row(self, number: int, finding: Finding) -> w.Widget:
        shown = finding.lines[: panels.MOST_LINES]
        buttons = [self._line_button(number, line) for line in shown]
        left = len(finding.lines) - len(shown)
        more = [w.HTML(f"and {left} more lines")] if left > 0 else []
        parts = [w.HTML(panels.finding_html(finding), layout=_full()), w.HBox([*buttons, *more], layout=_wrapping())]
        return w.VBox([*parts, self._excerpts[number]], layout=_full())

    def _line_button(self, number: int, line: int) -> w.Widget:
        show = _button(
            f"line {line}", "search", "line", lambda: self._state.look(number, line), f"Show line {line} of the log"
        )
        show.layout.width = "auto"
        return show

    def _show_excerpt(self, _: object = None) -> None:
        for number, room in enumerate(self._excerpts):
            meant = number == self._state.finding and self._state.line
            room.value = panels.excerpt_html(self._state.excerpt) if meant else ""

    def _take(self) -> None:
        try:
            self._state.take(self._lab, self._forecast)
        except PrefillLabError as error:
            self._state.message = f"{REFUSED}: {error}"

    def _show_taken(self, _: object = None) -> None:
        self.taken.value = panels.taken_html(self._state.taken, self._lab is not None)


def folded(inside: w.Widget) -> w.Widget:
    """The Log Doctor below a Lab: shown when somebody asks for it."""
    shown = w.Checkbox(description="show the Log Doctor (paste or upload a server's log)", indent=False, layout=_full())
    named(shown, "doctor-show")
    inside.layout.display = "none"

    def toggle(change: dict[str, Any]) -> None:
        inside.layout.display = "flex" if change["new"] else "none"

    shown.observe(toggle, "value")
    return w.VBox([w.HTML("<h3>Server logs explained</h3>"), shown, inside], layout=_full())


def _button(words: str, icon: str, name: str, act: Callable[[], object], tooltip: str, style: str = "") -> w.Widget:
    button = w.Button(description=words, icon=icon, tooltip=tooltip, button_style=style, layout=w.Layout(width="auto"))
    button.on_click(lambda _: act())
    return named(button, name)


def _once() -> dict[str, Any]:
    """A field whose text is taken when it is left."""
    return {"continuous_update": False, "layout": w.Layout(width="330px")}


def _full() -> w.Layout:
    """One for each widget: a layout is closed with the widget that has it."""
    return w.Layout(width="99%")


def _wrapping() -> w.Layout:
    return w.Layout(flex_flow="row wrap", align_items="center", width="99%")
