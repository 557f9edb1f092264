"""Memory against bucket from the progress bars of a capture, as one figure. Pure: a diagnosis in, a Figure out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.policies import MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB as GATE_GIB
from toolkit.serverlogs.capture_report import BucketCost, CaptureReport
from toolkit.serverlogs.diagnosis import Diagnosis
from toolkit.views import sheet
from toolkit.views.crowd import too_many
from toolkit.views.frames import NA, memory_words
from toolkit.views.log_words import ENDED, GATE_FACTOR, log_provenance, startup_shown
from toolkit.views.plots import GATE_LABEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CUT_FACTOR = 8
"""A bucket this many times dearer than every other is cut, or the others could not be read."""


def plot_log_buckets(diagnosis: Diagnosis, startup: int | None = None) -> Figure:
    """Memory against bucket from a capture's bars: what each took (MiB), and what was free before it (GiB).

    The prefill capture of the target model when bars show one, else the first capture that has any.
    """
    title = "Memory against bucket, from the bars of a capture"
    number = startup_shown(diagnosis, startup)
    subtitle = log_provenance(diagnosis, number)
    report = _with_bars(diagnosis, number)
    if report is None:
        why = f"{NA}: no progress bar of a capture names a bucket and the memory before it. Bars go to standard error."
        return sheet.words_only(title, None, why, subtitle)
    subtitle += f" | {report.rank} {report.role} {report.phase} capture, {ENDED.get(report.outcome, report.outcome)}"
    by_bucket = {one.bucket: one for one in report.series if one.bucket is not None}
    ladder = sorted(by_bucket)
    if why := too_many(ladder):
        return sheet.words_only(title, None, why, subtitle)
    points = [by_bucket[bucket] for bucket in ladder]
    with sheet.sheet_style():
        figure, (top, bottom) = sheet.new_sheet(title, subtitle, 7.4, rows=(3, 2))
        _draw_costs(top, points)
        _draw_free(bottom, report, points)
        failed = report.stopped_at if report.outcome == "oom" else None
        sheet.finish_buckets(figure, (top, bottom), ladder, failed)
        if report.phase != "prefill":
            bottom.set_xlabel("bucket (requests; one step per bucket, not to scale)")
    sheet.describe(figure, f"{title}, {sheet.in_one(subtitle)}. {_buckets_in_words(report, ladder)}")
    return figure


def _with_bars(diagnosis: Diagnosis, startup: int | None) -> CaptureReport | None:
    found = [
        each
        for each in diagnosis.captures
        if each.startup == startup and any(one.bucket is not None and one.free_gib is not None for one in each.series)
    ]
    found.sort(key=lambda each: (each.phase != "prefill", each.role != "target"))
    return found[0] if found else None


def _draw_costs(axes: Axes, points: Sequence[BucketCost]) -> None:
    kinds: tuple[tuple[str, dict[str, Any], bool], ...] = (
        (
            "taken by this bucket (MiB; logs print steps of 10)",
            {"color": sheet.SKY, "edgecolor": sheet.BLUE, "hatch": "///"},
            False,
        ),
        (
            "of several buckets together: bars were skipped (MiB)",
            {"color": sheet.PALE, "edgecolor": sheet.BLACK, "hatch": ".."},
            True,
        ),
    )
    values = sheet.numbers([None if one.added_gib is None else one.added_gib * 1024 for one in points])
    for label, look, several in kinds:
        at = [
            place for place, one in enumerate(points) if (one.buckets > 1) is several and values[place] == values[place]
        ]
        if at:
            axes.bar(at, [values[place] for place in at], label=label, **look)
    for place, value in enumerate(values):
        if value != value and len(points) <= 24:
            axes.text(place, 0, f" {NA}", rotation=90, ha="center", va="bottom", fontsize=sheet.SMALL_PT)
    axes.axhline(0, color=sheet.BLACK, linewidth=1)
    axes.set_ylabel("memory taken\n(MiB)")
    known = sorted(value for value in values if value == value)
    if not known:
        axes.set_yticks([])
        words = f"{NA}: one bar alone does not say what its bucket took"
        axes.text(0.02, 0.5, words, transform=axes.transAxes, va="center", bbox=sheet.paper())
        return
    _limit_costs(axes, values, known)


def _limit_costs(axes: Axes, values: Sequence[float], known: Sequence[float]) -> None:
    """The dearest bucket is named, and cut where no other could be read beside it."""
    dearest, second = known[-1], known[-2] if len(known) > 1 else 0.0
    cut = 0 < second * _CUT_FACTOR < dearest
    limit = 2.5 * second if cut else 1.15 * max(dearest, 1.0)
    axes.set_ylim(1.15 * min(known[0], 0.0), limit)
    if dearest > 0:
        place = list(values).index(dearest)
        x, side = sheet.words_beside(place, len(values))
        words = f"{dearest:,.0f} MiB{' (bar cut)' if cut else ''}"
        axes.text(x, min(dearest, 0.9 * limit), words, ha=side, va="center", fontweight="bold", bbox=sheet.paper())


def _draw_free(axes: Axes, report: CaptureReport, points: Sequence[BucketCost]) -> None:
    free = sheet.numbers([one.free_gib for one in points])
    size = sheet.marker_size(len(points))
    axes.plot(
        range(len(free)), free, color=sheet.GREEN, marker="s", markersize=size, label="free before this bucket (GiB)"
    )
    known = [value for value in free if value == value]
    low = min(known)
    label = f"least free: {low:.2f} GiB, before bucket {points[free.index(low)].bucket}"
    axes.plot(
        [free.index(low)], [low], color=sheet.VERMILLION, marker="v", markersize=11, linestyle="none", label=label
    )
    if report.free_after_gib is not None:
        words = f"free after the capture: {report.free_after_gib:.2f} GiB"
        axes.axhline(report.free_after_gib, color=sheet.BLUE, linestyle=":", linewidth=2.5, label=words)
    if low < GATE_FACTOR * GATE_GIB:
        axes.axhline(GATE_GIB, color=sheet.VERMILLION, linestyle="-.", linewidth=2, label=GATE_LABEL)
        axes.set_ylim(bottom=0)
    axes.set_ylabel("free memory\n(GiB)")
    axes.margins(y=0.15)


def _buckets_in_words(report: CaptureReport, ladder: Sequence[int]) -> str:
    parts = [f"{len(ladder)} of {report.n_buckets or NA} buckets seen, {ladder[0]} to {ladder[-1]}"]
    for name, value in (("first", report.first_bucket_gib), ("later ones, mean", report.later_bucket_gib)):
        parts.append(f"{name} {NA if value is None else f'{value * 1024:.0f} MiB'}")
    parts.append(f"least free {memory_words(report.min_free_gib)}")
    if report.stopped_at is not None:
        parts.append(f"{ENDED.get(report.outcome, report.outcome)} at bucket {report.stopped_at}")
    return "; ".join(parts) + "."
