"""The lower half of the Lab: what was captured, run against run, and what to keep. A view: it decides nothing."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path
from typing import Any

import ipywidgets as w

from toolkit.errors import PrefillLabError
from toolkit.runs.record import RunRecord
from toolkit.views import frames, markup
from toolkit.views.buckets import bucket_words
from toolkit.views.export import EXPORTS
from toolkit.views.files import shown_path
from toolkit.widgets.binding import Quiet
from toolkit.widgets.painter import Painter
from toolkit.widgets.panels import PANELS, panel_html, runs_html, verdict_html
from toolkit.widgets.parts import LABEL, html
from toolkit.widgets.state import LabState

_LARGEST_LINK_BYTES = 4_000_000


class ResultsView:
    """Verdict, one panel at a time, the bucket picked, the runs, and what can be kept."""

    def __init__(self, state: LabState) -> None:
        self._state = state
        self._quiet = Quiet()
        self.verdict = html("verdict")
        self.panel = html("panel")
        self.choice = w.ToggleButtons(options=list(PANELS), description="Show", style={**LABEL, "button_width": "auto"})
        self.choice.add_class("plab-show")
        self.bucket = w.SelectionSlider(
            options=[("n/a", 0)], description="Bucket (tokens)", style=LABEL, layout=_full()
        )
        self.bucket.add_class("plab-bucket")
        self.bucket_words = html("bucket-words")
        self._painter = Painter(self._draw)
        self.choice.observe(lambda _: self._painter.ask(now=True), "value")
        self.bucket.observe(self._bucket_moved, "value")
        state.observe(self._record_changed, ["record", "other"])
        state.observe(self._show_bucket, "num_tokens")
        self._record_changed()
        parts = [self.verdict, self.choice, self.panel, self.bucket, self.bucket_words]
        self.box = w.VBox([*parts, _runs_view(state), _keep_view(state)], layout=_full())

    def _record_changed(self, _: object = None) -> None:
        record = self._state.record
        self.verdict.value = verdict_html(record, self._state.other)
        tokens = sorted(bucket.num_tokens for bucket in record.buckets) if record is not None else []
        with self._quiet.now():
            self.bucket.options = [(str(number), number) for number in tokens] or [("n/a", 0)]
            self.bucket.disabled = not tokens
            if self._state.num_tokens in tokens:
                self.bucket.value = self._state.num_tokens
        self._show_bucket()
        self._painter.ask(now=record is None or not record.is_running)

    def _bucket_moved(self, change: dict[str, Any]) -> None:
        if not self._quiet:
            self._state.change(num_tokens=change["new"] or 0)

    def _show_bucket(self, _: object = None) -> None:
        record, tokens = self._state.record, self._state.num_tokens
        words = bucket_words(record, tokens) if record is not None and record.buckets else ""
        self.bucket_words.value = f'<span role="status">{markup.safe(words)}</span>'

    def _draw(self) -> bool:
        """Draw the panel that is shown; whether there is no hurry for the next: a run with buckets goes on."""
        record = self._state.record
        self.panel.value = panel_html(self.choice.value, record, self._state.other)
        return record is not None and record.is_running and bool(record.buckets)


def _runs_view(state: LabState) -> w.Widget:
    """The table of runs, which of them is shown, and which is laid over it."""
    quiet = Quiet()
    table = html("runs")
    first = w.Dropdown(description="Run shown (A)", style=LABEL, layout=_full())
    second = w.Dropdown(description="Laid over it (B)", style=LABEL, layout=_full())
    again = w.Button(description="Look again", icon="refresh", tooltip="Read the folder of runs again")
    first.add_class("plab-run-a")
    second.add_class("plab-run-b")
    again.on_click(lambda _: state.find_runs())

    def show(_: object = None) -> None:
        options = [("none", "")] + [(_run_name(run), run.id) for run in state.runs]
        known = {value for _, value in options}
        with quiet.now():
            for dropdown, record in ((first, state.record), (second, state.other)):
                if dropdown.options != tuple(options):
                    dropdown.options = options
                dropdown.value = record.id if record is not None and record.id in known else ""

    def show_table(_: object = None) -> None:
        table.value = runs_html(state.runs, shown_path(state.store.folder))

    def picked(change: dict[str, Any]) -> None:
        if not quiet:
            state.show(change["new"] or None, other=change["owner"] is second)

    for dropdown in (first, second):
        dropdown.observe(picked, "value")
    state.observe(show, ["runs", "record", "other"])
    state.observe(show_table, "runs")
    show()
    show_table()
    return w.VBox([w.HTML("<h3>Runs</h3>"), first, second, table, again], layout=_full())


def _keep_view(state: LabState) -> w.Widget:
    """Export of the run shown: a file in the folder of runs, and a link to download it."""
    kind = w.Dropdown(options=list(EXPORTS), description="Export", style=LABEL)
    button = w.Button(description="Export", icon="save", tooltip="Write the run shown to a file")
    link = html("export-link")
    kind.add_class("plab-export-kind")
    button.add_class("plab-export")

    def export(_: w.Button) -> None:
        try:
            link.value = _download(state.export(kind.value))
        except PrefillLabError as error:
            state.message = str(error)
            link.value = f'<span role="alert">{markup.safe(error)}</span>'

    button.on_click(export)
    return w.VBox([w.HTML("<h3>Keep</h3>"), w.HBox([kind, button]), link], layout=_full())


def _download(path: Path) -> str:
    saved = f"saved as {markup.safe(shown_path(path))}"
    if path.stat().st_size > _LARGEST_LINK_BYTES:
        return saved
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    data = base64.b64encode(path.read_bytes()).decode()
    name = markup.safe(path.name)
    return f'<a href="data:{kind};base64,{data}" download="{name}">Download {name}</a>, {saved}'


def _run_name(record: RunRecord) -> str:
    names = (frames.model_name(record), frames.backend_name(record), frames.policy_name(record))
    return f"{record.id}: {', '.join(names)}, {record.outcome}, {len(record.buckets)} buckets"


def _full() -> w.Layout:
    """One for each widget: a layout is closed with the widget that has it."""
    return w.Layout(width="99%")
