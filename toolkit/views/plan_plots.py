"""Plans in, Matplotlib figures out, in the style of `toolkit.views.plots`. Pure: no pyplot, nothing measured.

Every subtitle says that the figures are a forecast and whose; measurements that others made are drawn as points, each
with its source in the legend.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.forecast.plan import Plan
from toolkit.forecast.plan_ledger import owners
from toolkit.forecast.terms import BucketForecast, Range
from toolkit.policies import MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB as GATE_GIB
from toolkit.views import sheet
from toolkit.views.crowd import too_many
from toolkit.views.frames import memory_words
from toolkit.views.plots import GATE_LABEL, draw_owners

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GATE_FACTOR = 4
"""With less than the gate divided by this in view, its line is left out and the legend says so."""
_LABEL_CHARACTERS = 46
_MARKERS = "DsP^vX*"
MAX_POINTS = len(_MARKERS)
"""More measurements than this do not fit one legible legend."""


def plan_provenance(plan: Plan) -> str:
    """Where a plan's figures come from, for the subtitle of every figure."""
    return (
        f"forecast (engine {plan.settings.engine}), nothing was captured | model {plan.model.id} | "
        f"tp {plan.settings.tp} | {plan.gpu.name} | backend {plan.backend.value} | "
        f"rules of SGLang {plan.release.version}"
    )


def plot_plan_ledger(plan: Plan) -> Figure:
    """Who would own which GiB on each rank, as one stacked bar; each owner is named with its figure below it."""
    title = "Who would own which GiB"
    named = [("free" if line.key == "free_after" else line.name, line.gib) for line in owners(plan.lines)]
    total = plan.lines[0].gib
    with sheet.sheet_style():
        figure, (axes,) = sheet.new_sheet(title, plan_provenance(plan), 4.4)
        draw_owners(axes, [(name, gib, 100 * gib / total) for name, gib in named])
        axes.axvline(total, color=sheet.BLACK, linewidth=2, label=f"total: {memory_words(total)}")
        figure.legend(loc="outside lower center", ncols=2, handlelength=2.6, handleheight=1.4)
    listed = "; ".join(f"{name} {memory_words(gib)}" for name, gib in named)
    sheet.describe(figure, f"{title}, {plan_provenance(plan)}. {listed}.")
    return figure


def plot_plan_memory(plan: Plan, field: pd.DataFrame | None = None) -> Figure:
    """Memory against bucket: added, cumulative with its range, peak; below it what would be free, with the old gate.

    Args:
        plan: what to draw.
        field: captures that others measured, as `data/field/captures.csv` has them (`id`, `catalogue_id`, `gpu`,
            `backend`, `n_buckets`, `mem_usage_gib`, `source_url`); those of the same model and backend become points.
    """
    title = "Forecast of memory against bucket size"
    subtitle = plan_provenance(plan)
    if plan.forecast is None:
        why = "No prefill graph is captured: " + next((one.reason for one in plan.policies.values()), "disabled")
        return sheet.words_only(title, None, why, subtitle)
    buckets = sorted(plan.forecast.buckets, key=lambda one: one.num_tokens)
    ladder = [one.num_tokens for one in buckets]
    if why := too_many(ladder):
        return sheet.words_only(title, None, why, subtitle)
    with sheet.sheet_style():
        figure, (top, bottom) = sheet.new_sheet(title, subtitle, 8.4, rows=(3, 2))
        _draw_added(top, buckets)
        _draw_total(top, plan.forecast.total)
        points = _field_points(plan, field)
        _draw_points(top, points)
        _draw_free(bottom, plan, buckets)
        sheet.finish_buckets(figure, (top, bottom), ladder, _oom_bucket(plan))
    sheet.describe(figure, f"{title}, {subtitle}. {_in_words(plan, points)}")
    return figure


# --- what each panel draws --------------------------------------------------------------------------------


def _draw_added(axes: Axes, buckets: Sequence[BucketForecast]) -> None:
    at = list(range(len(buckets)))
    added = sheet.numbers([one.added.mid for one in buckets])
    gone = [one.cumulative for one in buckets]
    size = sheet.marker_size(len(buckets))
    axes.bar(at, added, color=sheet.SKY, edgecolor=sheet.BLUE, hatch="///", label="added by this bucket (MiB)")
    low, high = sheet.numbers([one.low for one in gone]), sheet.numbers([one.high for one in gone])
    axes.fill_between(at, low, high, color=sheet.PALE, alpha=0.6, label="range of cumulative")
    middle = sheet.numbers([one.mid for one in gone])
    label = "cumulative, largest bucket first (MiB)"
    axes.plot(at, middle, color=sheet.BLACK, marker="o", markersize=size, linestyle="--", label=label)
    peak = sheet.numbers([one.peak.mid for one in buckets])
    axes.plot(at, peak, color=sheet.ORANGE, linestyle="-", linewidth=6, zorder=1.5, label="peak so far (MiB)")
    axes.set_ylabel("prefill graph\nmemory (MiB)")
    axes.set_ylim(0, 1.1 * max(sheet.highest(high), sheet.highest(peak), 1.0))


def _draw_total(axes: Axes, total: Range) -> None:
    """What stays when the ladder is done: a server gives the cache of its warm-up back."""
    words = f"stays after the capture: {memory_words(total.mid / 1024)}"
    axes.axhspan(total.low, total.high, color=sheet.GREEN, linewidth=0, alpha=0.2)
    axes.axhline(total.mid, color=sheet.GREEN, linestyle=":", linewidth=2.5, label=words)


def _draw_points(axes: Axes, points: Sequence[tuple[str, float]]) -> None:
    for number, (label, gib) in enumerate(points):
        axes.plot(
            [number * 0.9],
            [gib * 1024],
            color=sheet.VERMILLION,
            markeredgecolor=sheet.BLACK,
            marker=_MARKERS[number],
            markersize=10,
            linestyle="none",
            zorder=5,
            label=textwrap.fill(label, _LABEL_CHARACTERS),
        )
    if points:
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.1 * 1024 * max(gib for _, gib in points)))


def _draw_free(axes: Axes, plan: Plan, buckets: Sequence[BucketForecast]) -> None:
    before = plan.free_before_gib
    at = list(range(len(buckets)))
    free = [before - one.cumulative.mid / 1024 for one in buckets]
    low = [before - one.cumulative.high / 1024 for one in buckets]
    high = [before - one.cumulative.low / 1024 for one in buckets]
    above = 0 < sheet.highest([before, *free]) * _GATE_FACTOR < GATE_GIB
    label = f"{GATE_LABEL}{', above this axis' if above else ''}"
    gate = float("nan") if above else GATE_GIB
    axes.axhline(gate, color=sheet.VERMILLION, linestyle="-.", linewidth=2, label=label)
    words = f"free before the capture ({memory_words(before)})"
    axes.axhline(before, color=sheet.BLUE, linestyle=":", linewidth=2.5, label=words)
    axes.fill_between(at, low, high, color=sheet.PALE, alpha=0.6)
    size = sheet.marker_size(len(buckets))
    axes.plot(at, free, color=sheet.GREEN, marker="s", markersize=size, label="free after this bucket (GiB)")
    if min(low) < 0:
        axes.axhline(0, color=sheet.BLACK, linewidth=2, label="nothing left: out of memory below")
    axes.set_ylabel("free memory\n(GiB)")
    axes.margins(y=0.15)


# --- words ------------------------------------------------------------------------------------------------


def _field_points(plan: Plan, field: pd.DataFrame | None) -> list[tuple[str, float]]:
    """(what was measured where, GiB), of captures of the same model and backend; at most `MAX_POINTS`."""
    if field is None:
        return []
    same = (field["catalogue_id"] == plan.model.id) & (field["backend"] == plan.backend.value)
    rows = field[same & field["mem_usage_gib"].notna()]
    points = []
    for row in rows.head(MAX_POINTS).to_dict("records"):
        ladder = f"{int(row['n_buckets'])} buckets" if row.get("n_buckets") == row.get("n_buckets") else "ladder n/a"
        gib = float(row["mem_usage_gib"])
        points.append((f"measured: {gib:.2f} GiB, {row['gpu']}, {row['backend']}, {ladder} ({row['id']})", gib))
    return points


def _oom_bucket(plan: Plan) -> int | None:
    return next((one.oom_bucket for one in plan.policies.values() if one.oom_bucket is not None), None)


def _in_words(plan: Plan, points: Sequence[tuple[str, float]]) -> str:
    assert plan.forecast is not None
    total, peak = plan.forecast.total, plan.forecast.peak
    words = (
        f"{len(plan.buckets)} buckets; {memory_words(plan.free_before_gib)} free before; "
        f"stays {total.mid / 1024:.2f} GiB ({total.low / 1024:.2f} to {total.high / 1024:.2f}), "
        f"peak {peak.mid / 1024:.2f} GiB"
    )
    failed = _oom_bucket(plan)
    ends = f"; out of memory at bucket {failed}" if failed is not None else ""
    return "; ".join((words + ends, *(label for label, _ in points))) + "."
