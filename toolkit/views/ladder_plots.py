"""A ladder design in, a Matplotlib figure out, in the style of `toolkit.views.plots`. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from toolkit.ladder_coverage import Coverage
from toolkit.ladder_design import LadderDesign
from toolkit.views import sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_BINS = 56
_OUTCOMES = (
    ("replays", sheet.SKY, "///"),
    ("eager: bucket over the replay limit", sheet.ORANGE, "xx"),
    ("eager: over the largest bucket", sheet.VERMILLION, ".."),
)
_RUG = 0.07
"""Share of a panel's height below 0 in which buckets are marked."""


def ladder_provenance(made: LadderDesign) -> str:
    """Where a design's figures come from, for the subtitle of its figure."""
    return f"traffic: {made.traffic} | rules of SGLang {made.sglang_version} | cost: {made.cost.source}"


def plot_ladder(made: LadderDesign) -> Figure:
    """The traffic by size, once with the default ladder and once with the proposal: what replays, what runs eager.

    Bars are shares of prefills in steps of equal ratio; marks below them are the buckets, long where used.
    """
    title = "Which prefills replay, by size"
    sizes = np.array(sorted(made.histogram), dtype=np.float64)
    ladders = (*made.default.ladder, *made.proposal.ladder)
    first, last = min(sizes[0], *ladders, 1e9), max(sizes[-1], *ladders, 2)
    step = (1.1 * last / first) ** (1 / _BINS)
    edges = first * step ** (np.arange(_BINS + 1) - 0.5)  # the smallest size in the middle of its bar
    with sheet.sheet_style():
        figure, panels = sheet.new_sheet(title, ladder_provenance(made), 7.6, rows=(1, 1))
        for axes, name, one in zip(panels, ("default ladder", "proposal"), (made.default, made.proposal), strict=True):
            _draw(axes, made, one, sizes, edges, axes is panels[0])
            axes.set_ylabel(f"{name}\n(% of prefills)")
        _finish(panels[-1], first, last)
        figure.legend(loc="outside lower center", ncols=2, handlelength=2.6, handleheight=1.2)
    words = "; ".join(f"{name}: {_words(one)}" for name, one in made.coverages.items())
    sheet.describe(figure, f"{title}. {ladder_provenance(made)}. {words}.")
    return figure


def _draw(
    axes: Axes,
    made: LadderDesign,
    one: Coverage,
    sizes: NDArray[np.float64],
    edges: NDArray[np.float64],
    labels: bool,
) -> None:
    """One panel; `labels` where its parts go into the legend."""
    shares = np.array([made.histogram[int(size)] for size in sizes]) * 100 / one.prefills
    outcome = _outcomes(made, one, sizes)
    bottom = np.zeros(_BINS)
    for number, (label, colour, hatch) in enumerate(_OUTCOMES):
        here = outcome == number
        height, _ = np.histogram(sizes[here], bins=edges, weights=shares[here])
        axes.bar(
            edges[:-1],
            height,
            width=np.diff(edges),
            bottom=bottom,
            align="edge",
            color=colour,
            edgecolor=sheet.BLACK,
            linewidth=0.4,
            hatch=hatch,
            label=label if labels else "",
        )
        bottom += height
    top = 1.32 * max(float(bottom.max()), 1.0)
    axes.set_ylim(-_RUG * top, top)
    axes.axhline(0, color=sheet.GREY, linewidth=0.8)
    used = {use.bucket for use in one.uses if use.prefills}
    for wanted, low, look, label in (
        (used, -_RUG, "-", "bucket in use"),
        (set(one.ladder) - used, -_RUG / 2, ":", "bucket that nothing replays in"),
    ):
        where = sorted(wanted)
        axes.vlines(where, low * top, 0, color=sheet.BLACK, linestyle=look, label=label if labels else "")
    axes.text(0.99, 0.97, _words(one), transform=axes.transAxes, ha="right", va="top", bbox=sheet.paper())
    axes.grid(axis="y", color="#D0D0D0", linewidth=0.6)
    axes.set_axisbelow(True)


def _outcomes(made: LadderDesign, one: Coverage, sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """The number of each size's outcome in `_OUTCOMES`."""
    buckets = np.array(one.ladder, dtype=np.float64)
    place = np.searchsorted(buckets, sizes)
    chosen = np.append(buckets, np.inf)[place]
    limited = chosen > sizes * (made.replay_limit or np.inf)
    return np.where(place == len(buckets), 2, np.where(limited, 1, 0)).astype(np.int64)


def _finish(axes: Axes, first: float, last: float) -> None:
    axes.set_xscale("log")
    ticks = [1 << power for power in range(40) if first <= 1 << power <= last * 1.1]
    axes.set_xticks(ticks[:: 1 + len(ticks) // 18], [str(tick) for tick in ticks[:: 1 + len(ticks) // 18]])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tokens of a prefill (logarithmic)")


def _words(one: Coverage) -> str:
    return (
        f"{len(one.ladder)} buckets, {one.buckets_used} used: eager {one.eager_share:.2%}, "
        f"padding {one.padded_share:.2%}, {one.mean_cost:.4g} {one.unit} a prefill"
    )
