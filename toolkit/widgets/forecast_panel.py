"""The forecast panel of the Lab: which card, how many ranks, and what a capture would take there. A view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets as w

from toolkit.errors import PrefillLabError
from toolkit.memory.rank_local import MAX_TP
from toolkit.runs.record import RunRecord
from toolkit.views import frames, markup
from toolkit.widgets.binding import bind
from toolkit.widgets.forecast_state import ForecastState
from toolkit.widgets.painter import Painter
from toolkit.widgets.panels import figure_html
from toolkit.widgets.parts import LABEL, html

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

_RANKS = [2**power for power in range(MAX_TP.bit_length())]


class ForecastPanel:
    """Controls of its own, words that follow at once, and a figure that follows when it is drawn."""

    def __init__(self, state: ForecastState) -> None:
        self._state = state
        gpu = w.Dropdown(options=list(state.gpus), description="Forecast for", style=LABEL)
        ranks = w.Dropdown(options=_RANKS, description="tp (ranks)", style=LABEL)
        gpu.add_class("plab-gpu")
        ranks.add_class("plab-tp")
        bind(state, "gpu", gpu)
        bind(state, "tp", ranks)
        self.words = html("forecast")
        self.figure = html("forecast-figure")
        self.shown = w.Checkbox(
            description="show the forecast (no such card is needed)", indent=False, layout=w.Layout(width="99%")
        )
        self.shown.add_class("plab-forecast-show")
        self.foretold = html("foretold")
        self._foretell = w.Button(
            description="Forecast the run shown",
            icon="balance-scale",
            tooltip="The forecast of the toolkit's own engine, bucket by bucket, beside what the run took",
            layout=w.Layout(width="auto"),
        )
        self._foretell.add_class("plab-foretell")
        choice = w.HBox([gpu, ranks], layout=w.Layout(flex_flow="row wrap"))
        self._inside = w.VBox([choice, self.words, self.figure, self._foretell, self.foretold])
        self._inside.layout = w.Layout(display="none", width="99%")
        self._words_painter, self._figure_painter = Painter(self._show_words), Painter(self._draw)
        self._run_painter = Painter(self._compare)
        self._foretell.on_click(lambda _: self._run_painter.ask(now=True))
        self.shown.observe(self._toggle, "value")
        state.follow(self._wake)
        self.box = w.VBox([w.HTML("<h3>Forecast</h3>"), self.shown, self._inside], layout=w.Layout(width="99%"))

    def _toggle(self, change: dict[str, object]) -> None:
        self._inside.layout.display = "flex" if change["new"] else "none"
        self._wake()

    def _wake(self) -> None:
        if self.shown.value:
            self._words_painter.ask(now=True)

    def _show_words(self) -> bool:
        before = self._state.plan
        plan = self._state.update()
        self.words.value = plan_words(plan, self._state.problem)
        if plan is None or plan is not before:
            self._figure_painter.ask(now=True)
        return False

    def _draw(self) -> bool:
        plan = self._state.plan
        if plan is None or plan.forecast is None:
            self.figure.value = ""
            return False
        from toolkit.forecast.field import field_captures
        from toolkit.views.plan_plots import plot_plan_memory

        figure = plot_plan_memory(plan, field_captures())
        self.figure.value = f'<div class="figures">{figure_html(figure, {})}</div>'
        return False

    def _compare(self) -> bool:
        self.foretold.value = '<p class="source">Tracing the model, which takes some seconds the first time.</p>'
        self.foretold.value = run_against_forecast(self._state.lab.record)
        return False


def run_against_forecast(record: RunRecord | None) -> str:
    """A run beside its forecast: what differs, bucket by bucket, as a figure and a table."""
    from toolkit.runs.foretell import foretell
    from toolkit.views.forecast_plots import comparison_words, forecast_against_run, plot_forecast_against_run

    if record is None or record.is_running:
        return '<p class="source">No finished run is shown.</p>'
    try:
        forecast = foretell(record)
    except PrefillLabError as error:
        return f'<div class="problem" role="alert">{markup.safe(error)}</div>'
    table = forecast_against_run(forecast, record)
    figure = figure_html(plot_forecast_against_run(forecast, record), {})
    return (
        f"<p><b>{markup.safe(comparison_words(table))}</b></p>"
        f'<div class="figures">{figure}</div>{markup.table(frames.display_table(table), "Forecast and measurement")}'
    )


def plan_words(plan: Plan | None, problem: str) -> str:
    """A plan in few words: what it takes, whether it fits under each policy, and how wrong such forecasts were."""
    if plan is None:
        return f'<div class="problem" role="alert"><b>Cannot be planned:</b> {markup.safe(problem)}</div>'
    rows = {
        "in short": plan.summary,
        "card": f"{plan.gpu.name}, tp {plan.settings.tp}, rules of SGLang {plan.release.version}",
    }
    if plan.forecast is None:
        rows["prefill graph"] = "none"
    else:
        total, peak = plan.forecast.total, plan.forecast.peak
        rows["prefill graph"] = (
            f"{frames.memory_words(total.mid / 1024)} ({total.low / 1024:.2f} to {total.high / 1024:.2f} GiB) for "
            f"{len(plan.buckets)} buckets to {max(plan.buckets)} tokens, backend {plan.backend.value}"
        )
        rows["needed on the way"] = f"{peak.mid / 1024:.2f} GiB ({peak.low / 1024:.2f} to {peak.high / 1024:.2f} GiB)"
    fraction = "" if plan.mem_fraction is None else f", fraction {plan.mem_fraction:g}"
    rows["free before capture"] = f"{plan.free_before_gib:.2f} GiB{fraction}"
    rows["KV cache"] = f"{plan.ledger.kv_cache_tokens:,} tokens"
    rows |= {f"policy {name}": f"{one.outcome}: {one.reason}" for name, one in plan.policies.items()}
    if plan.forecast is not None and plan.forecast.notes:
        rows["how sure"] = plan.forecast.notes[0]
    cells = "".join(f'<tr><th scope="row">{markup.safe(k)}</th><td>{markup.safe(v)}</td></tr>' for k, v in rows.items())
    return f'<table class="says"><tbody>{cells}</tbody></table>'
