"""The figure of policies compared by execution: buckets, free memory, KV tokens and prefill time of each run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.views import sheet
from toolkit.views.comparison import PolicyComparison
from toolkit.views.frames import NA, backend_name, display_value, memory_words, model_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_ROWS = 12


@dataclass(frozen=True, slots=True)
class _Panel:
    """One figure of every run, as bars: column, title, colour, hatch, and the words beside a bar."""

    column: str
    title: str
    colour: str
    hatch: str
    words: Callable[[float], str]


_PANELS = (
    _Panel("buckets", "buckets\nwith a graph", sheet.SKY, "///", lambda value: f"{value:.0f}"),
    _Panel("free_after_gib", "free after\n(GiB)", sheet.GREEN, "..", memory_words),
    _Panel("kv_tokens", "KV pool\n(tokens)", sheet.YELLOW, "\\\\\\", lambda value: f"{value:,.0f}"),
    _Panel("prefill_ms", "mean prefill\nof the mix (ms)", sheet.ORANGE, "xx", lambda value: f"{value:.1f}"),
)


def plot_policies(comparison: PolicyComparison) -> Figure:
    """Runs under several policies side by side; what a run does not have is marked n/a."""
    title = "Policies compared by execution"
    frame = comparison.frame.head(_MAX_ROWS)
    hidden = len(comparison.records) - len(frame)
    models, backends = (dict.fromkeys(map(name, comparison.records)) for name in (model_name, backend_name))
    who = f"{comparison.provenance} | model {', '.join(models)} | backend {', '.join(backends)}"
    subtitle = who + (f" | {hidden} more runs not shown" if hidden else "")
    with sheet.sheet_style():
        figure, panels = sheet.new_sheet(title, subtitle, 9.0, rows=(1, 1, 1, 1))
        for axes, panel in zip(panels, _PANELS, strict=True):
            _draw(axes, panel, list(frame[panel.column].astype("float64")), list(frame["eager_percent"]))
        shown = zip(comparison.names, frame["outcome"], strict=False)
        names = [name.replace(", ", "\n") + f"\n{outcome}" for name, outcome in shown]
        panels[-1].set_xticks(range(len(frame)), names)
    rows = "; ".join(map(_in_words, comparison.names, frame.to_dict("records")))
    sheet.describe(figure, f"{title}, {subtitle}. {rows}.")
    return figure


def _draw(axes: Axes, panel: _Panel, values: Sequence[float], eager: Sequence[float]) -> None:
    shown = [value if value == value else 0.0 for value in values]
    axes.bar(range(len(shown)), shown, width=0.5, color=panel.colour, edgecolor=sheet.BLACK, hatch=panel.hatch)
    for row, value in enumerate(values):
        words = panel.words(value) if value == value else NA
        if panel.column == "prefill_ms" and value == value:
            words += f"\n{eager[row]:.0f} % eager"
        axes.text(row, shown[row], words, va="bottom", ha="center", fontsize=sheet.SMALL_PT)
    # Words stand on the bars: they need room there.
    axes.set_ylim(0, 1.45 * sheet.highest(shown) or 1.0)
    axes.set_ylabel(panel.title)
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.locator_params(axis="y", nbins=4)


def _in_words(name: str, row: Mapping[Hashable, Any]) -> str:
    figures = ", ".join(
        f"{panel.title.replace(chr(10), ' ')} {display_value(panel.column, row[panel.column])}" for panel in _PANELS
    )
    return f"{name}: {row['outcome']}, {figures}"
