"""Records in, Matplotlib figures out. Pure: no pyplot, no global state, so nothing leaks or shows twice.

Every figure says in its subtitle what it was measured on, and tells its series apart by hatch, marker or line
style as well as by colour, so that it survives a projector, a printer and colour blindness. `figure_png`
renders one, and `alt_text` is what it shows, in words.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.policies import MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB as GATE_GIB
from toolkit.runs.record import BucketFigures, RunRecord
from toolkit.views import sheet
from toolkit.views.crowd import too_many
from toolkit.views.frames import (
    NA,
    backend_name,
    capture_position,
    device_name,
    ladder_name,
    ledger_table,
    memory_words,
    model_name,
    policy_name,
    provenance,
    seconds_words,
)
from toolkit.views.sheet import alt_text, figure_png
from toolkit.views.speed_plot import plot_speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "GATE_LABEL",
    "alt_text",
    "draw_owners",
    "figure_png",
    "plot_capture_time",
    "plot_compare",
    "plot_ledger",
    "plot_memory",
    "plot_speed",
]

GATE_LABEL = f"old gate {GATE_GIB:.2f} GiB (SGLang 0.5.16-0.5.17)"
_GATE_FACTOR = 4
"""With less than the gate divided by this free, the gate's line is left out and the legend says so."""
MAX_COMPARED = 24
"""More runs than this do not fit one legible figure; the rest is counted in the subtitle."""
_CUT_FACTOR = 8
"""A first bucket this many times taller than every other is cut, or the others could not be read."""


def plot_memory(record: RunRecord) -> Figure:
    """Memory against bucket: MiB added by each and in total; below it GiB left free, with the old gate."""
    title = "Memory against bucket size"
    ladder = sheet.bucket_ladder(record)
    why = too_many(ladder)
    if why or not ladder:
        return sheet.words_only(title, record, why)
    with sheet.sheet_style():
        figure, (top, bottom) = sheet.new_sheet(title, provenance(record), 7.4, rows=(3, 2))
        _draw_added(top, record, ladder)
        _draw_free(bottom, record, ladder)
        sheet.finish_buckets(figure, (top, bottom), ladder, record.oom_bucket)
    sheet.describe(figure, f"{title}, {provenance(record)}. {_memory_in_words(record)}")
    return figure


def plot_capture_time(record: RunRecord) -> Figure:
    """Seconds per bucket, warm-up and capture stacked; the bucket captured first is named."""
    title = "Capture time against bucket size"
    ladder = sheet.bucket_ladder(record)
    why = too_many(ladder)
    if why or not ladder:
        return sheet.words_only(title, record, why)
    with sheet.sheet_style():
        figure, (axes,) = sheet.new_sheet(title, provenance(record), 5.6)
        tops = _draw_seconds(axes, _by_tokens(record, ladder))
        _name_first(axes, record, ladder, tops)
        axes.set_ylabel("time per bucket (s)")
        sheet.finish_buckets(figure, (axes,), ladder, record.oom_bucket)
    whole = seconds_words(record.capture_time_s)
    sheet.describe(figure, f"{title}, {provenance(record)}. Whole capture: {whole} for {len(record.buckets)} buckets.")
    return figure


def plot_compare(records: Sequence[RunRecord]) -> Figure:
    """Runs side by side, one row each: GiB free before and after with the old gate, and buckets captured."""
    title = "Policies compared"
    if not records:
        return sheet.words_only(title, None, "There is no run to compare.")
    shown = records[:MAX_COMPARED]
    left_out = len(records) - len(shown)
    subtitle = _shared_provenance(records) + (f" | {left_out} more runs not shown" if left_out else "")
    with sheet.sheet_style():
        # Row names push the axes, and with them the subtitle, to the right: it gets shorter lines.
        height = 2.7 + 0.8 * len(shown)
        figure, (left, right) = sheet.new_sheet(title, subtitle, height, columns=(3, 2), subtitle_characters=80)
        _draw_before_after(left, shown)
        _draw_captured(right, shown)
        left.set_yticks(range(len(shown)), _row_names(shown))
        right.set_yticks([])
        for axes in (left, right):
            axes.set_ylim(len(shown) - 0.4, -0.6)
        figure.legend(loc="outside lower center", ncols=2)
    rows = "; ".join(f"{policy_name(run)}: {run.outcome}, {len(run.buckets)} buckets" for run in shown)
    sheet.describe(figure, f"{title}, {subtitle}. {rows}.")
    return figure


def plot_ledger(record: RunRecord) -> Figure:
    """Who owns which GiB of the device, as one stacked bar; each owner is named with its figure below it."""
    title = "Who owns which GiB"
    owners: list[tuple[str, float, float]] = [
        (str(row[0]), float(row[1]), float(row[2])) for row in ledger_table(record).itertuples(index=False, name=None)
    ]
    if not any(owned == owned for _, owned, _ in owners):
        return sheet.words_only(title, record, "The ledger of this run is not known (n/a).")
    with sheet.sheet_style():
        figure, (axes,) = sheet.new_sheet(title, provenance(record), 4.2)
        draw_owners(axes, owners)
        figure.legend(loc="outside lower center", ncols=2, handlelength=2.6, handleheight=1.4)
    listed = "; ".join(f"{owner} {memory_words(owned)}" for owner, owned, _ in owners)
    sheet.describe(figure, f"{title}, {provenance(record)}. {listed}.")
    return figure


# --- what each figure draws -------------------------------------------------------------------------------


def _by_tokens(record: RunRecord, ladder: Sequence[int]) -> list[BucketFigures | None]:
    captured = {bucket.num_tokens: bucket for bucket in record.buckets}
    return [captured.get(tokens) for tokens in ladder]


def _draw_added(axes: Axes, record: RunRecord, ladder: Sequence[int]) -> None:
    buckets = _by_tokens(record, ladder)
    added = sheet.numbers([bucket.added_mib if bucket else None for bucket in buckets])
    total = sheet.numbers([bucket.cumulative_mib if bucket else None for bucket in buckets])
    at = range(len(ladder))
    axes.bar(at, added, color=sheet.SKY, edgecolor=sheet.BLUE, hatch="///", label="added by this bucket (MiB)")
    axes.plot(
        at,
        total,
        color=sheet.BLACK,
        marker="o",
        markersize=sheet.marker_size(len(ladder)),
        linestyle="--",
        label="cumulative, in order of capture (MiB)",
    )
    axes.set_ylabel("prefill graph\nmemory (MiB)")
    known = [value for value in (*added, *total) if value == value]
    # Memory can seem to shrink where other processes free theirs. With nothing to show, still an axis from 0.
    axes.set_ylim(1.08 * min([0.0, *known]), 1.08 * sheet.highest(known) or 1.0)
    for position, (bucket, value) in enumerate(zip(buckets, added, strict=True)):
        if bucket is not None and value != value:
            axes.text(position, 0, f" {NA}", rotation=90, ha="center", va="bottom", fontsize=sheet.SMALL_PT)


def _draw_free(axes: Axes, record: RunRecord, ladder: Sequence[int]) -> None:
    free = sheet.numbers([bucket.free_after_gib if bucket else None for bucket in _by_tokens(record, ladder)])
    before = sheet.numbers([record.free_before_gib])[0]  # a line at NaN is not drawn, and its label says n/a
    # Far below the gate the line would flatten everything else into the axis.
    above = 0 < sheet.highest([before, *free]) * _GATE_FACTOR < GATE_GIB
    gate = float("nan") if above else GATE_GIB
    label = f"{GATE_LABEL}{', above this axis' if above else ''}"
    axes.axhline(gate, color=sheet.VERMILLION, linestyle="-.", linewidth=2, label=label)
    label = f"free before the capture ({memory_words(record.free_before_gib)})"
    axes.axhline(before, color=sheet.BLUE, linestyle=":", linewidth=2.5, label=label)
    known = any(value == value for value in free)
    axes.plot(
        range(len(ladder)),
        free,
        color=sheet.GREEN,
        marker="s",
        markersize=sheet.marker_size(len(ladder)),
        linestyle="-",
        label="free after this bucket (GiB)" if known else f"free after each bucket: {NA}",
    )
    axes.set_ylabel("free memory\n(GiB)")
    axes.margins(y=0.15)


def _draw_seconds(axes: Axes, buckets: Sequence[BucketFigures | None]) -> list[float]:
    """Stacked bars; the height of each stack comes back."""
    # A bucket without times that an axis can hold has no bar, like one that was not captured.
    buckets = [bucket if bucket and sheet.drawable(*_times(bucket)) else None for bucket in buckets]
    warm_up = [bucket.warmup_s if bucket else 0.0 for bucket in buckets]
    capture = [bucket.capture_s if bucket else 0.0 for bucket in buckets]
    rest = [max(0.0, b.elapsed_s - b.warmup_s - b.capture_s) if b else 0.0 for b in buckets]
    parts = (
        ("warm-up (eager, before the capture)", sheet.YELLOW, "..", warm_up),
        ("capture", sheet.SKY, "///", capture),
        ("rest of the step", sheet.PALE, "", rest),
    )
    floor = [0.0] * len(buckets)
    for label, colour, hatch, values in parts:
        if values is rest and max(rest) < 0.005:
            continue  # too thin to see: a legend entry for it would only be searched for
        axes.bar(
            range(len(buckets)),
            values,
            bottom=floor,
            color=colour,
            edgecolor=sheet.BLACK,
            hatch=hatch,
            label=label,
        )
        floor = [low + value for low, value in zip(floor, values, strict=True)]
    return floor


def _times(bucket: BucketFigures) -> tuple[float, float, float]:
    return bucket.warmup_s, bucket.capture_s, bucket.elapsed_s


def _name_first(axes: Axes, record: RunRecord, ladder: Sequence[int], tops: Sequence[float]) -> None:
    """Annotate the bucket captured first. Where it dwarfs the others its bar is cut, and the words say so."""
    first = next((tokens for tokens, place in capture_position(record).items() if place == 1), None)
    highest = max(tops)
    if first is None or highest <= 0:
        return
    position = ladder.index(first)
    others = max((top for at, top in enumerate(tops) if at != position), default=0.0)
    cut = 0 < others * _CUT_FACTOR < tops[position]
    limit = 2 * others if cut else 1.25 * highest
    axes.set_ylim(0, limit)
    x, side = sheet.words_beside(position, len(ladder))
    axes.annotate(
        f"captured first: {first} tokens, {tops[position]:.2f} s" + (" (bar cut)" if cut else ""),
        xy=(position, min(tops[position], 0.85 * limit)),
        xytext=(x, 0.94 * limit),
        ha=side,
        va="center",
        fontweight="bold",
        bbox=sheet.paper(),
        arrowprops={"arrowstyle": "->", "color": sheet.BLACK},
    )


def _draw_before_after(axes: Axes, records: Sequence[RunRecord]) -> None:
    before, after = [run.free_before_gib for run in records], [run.free_after_gib for run in records]
    series = (
        (-0.2, before, sheet.SKY, "", "free before the capture (GiB)"),
        (0.2, after, sheet.ORANGE, "///", "free after it (GiB)"),
    )
    axes.axvline(GATE_GIB, color=sheet.VERMILLION, linestyle="-.", linewidth=2, label=GATE_LABEL)
    for offset, values, colour, hatch, label in series:
        rows = [row + offset for row in range(len(records))]
        widths = sheet.numbers(values)
        axes.barh(rows, widths, 0.36, color=colour, edgecolor=sheet.BLACK, hatch=hatch, label=label)
        for row, width, value in zip(rows, widths, values, strict=True):
            sheet.beside(axes, width if width == width else 0.0, row, memory_words(value))
    axes.set_xlim(0, 1.35 * max(GATE_GIB, sheet.highest(sheet.numbers([*before, *after]))))
    axes.set_xlabel("free memory (GiB)")


def _draw_captured(axes: Axes, records: Sequence[RunRecord]) -> None:
    from matplotlib.ticker import MaxNLocator

    counts = [len(run.buckets) for run in records]
    axes.barh(
        range(len(records)),
        counts,
        0.5,
        color=sheet.GREEN,
        edgecolor=sheet.BLACK,
        hatch="..",
        label="buckets captured",
    )
    for row, run in enumerate(records):
        sheet.beside(axes, counts[row], row, f"{counts[row]} ({run.outcome})")
    axes.set_xlim(0, 2.1 * max(*counts, 1))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set_xlabel("buckets captured")


def draw_owners(axes: Axes, owners: Sequence[tuple[str, float, float]]) -> None:
    """One stacked bar on `axes` of (owner, GiB, percent of the total); an owner of nothing or less has no width."""
    colours = (sheet.PALE, sheet.SKY, sheet.ORANGE, sheet.PURPLE, sheet.VERMILLION, sheet.YELLOW, sheet.GREEN)
    hatches = ("", "//", "\\\\", "xx", "..", "--", "++")
    start = 0.0
    widths = [max(owned, 0.0) if sheet.drawable(owned) else 0.0 for _, owned, _ in owners]
    total = sum(widths)
    for number, ((owner, owned, share), width) in enumerate(zip(owners, widths, strict=True)):
        plain = owner == "free"
        axes.barh(
            0,
            width,
            0.6,
            left=start,
            color="white" if plain else colours[number % len(colours)],
            edgecolor=sheet.BLACK,
            hatch="" if plain else hatches[number % len(hatches)],
            label=f"{owner}: {memory_words(owned)}" + (f" ({share:.1f} %)" if share == share else ""),
        )
        if width > 0.14 * total:
            axes.text(start + width / 2, 0, owner, ha="center", va="center", bbox=sheet.paper())
        start += width
    axes.set_xlim(0, start or 1)
    axes.set_xlabel("memory (GiB)")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


# --- words ------------------------------------------------------------------------------------------------


def _memory_in_words(record: RunRecord) -> str:
    before, after = memory_words(record.free_before_gib), memory_words(record.free_after_gib)
    words = f"{len(record.buckets)} buckets; free {before} before, {after} after"
    added = {bucket.num_tokens: bucket.added_mib for bucket in record.buckets if bucket.added_mib is not None}
    if added:
        heaviest = max(added, key=lambda tokens: added[tokens])
        words += f"; bucket {heaviest} added the most, {added[heaviest]:.2f} MiB"
    if record.oom_bucket is not None:
        words += f"; out of memory at bucket {record.oom_bucket}"
    return words + "."


def _shared_provenance(records: Sequence[RunRecord]) -> str:
    """What several runs have in common; what differs is named row by row."""
    parts = (("measured on", device_name), ("model", model_name), ("backend", backend_name))
    found = [(name, {read(run) for run in records}) for name, read in parts]
    words = [f"{name} {min(values) if len(values) == 1 else '(see each row)'}" for name, values in found]
    return " | ".join((*words, "policy (see each row)"))


def _row_names(records: Sequence[RunRecord]) -> list[str]:
    """The policy of each run, and below it whatever else tells the runs apart."""
    lines = [[policy_name(run)] for run in records]
    for read in (model_name, backend_name, device_name, ladder_name):
        values = [read(run) for run in records]
        if len(set(values)) > 1:
            for row, value in zip(lines, values, strict=True):
                row.append(value)
    return ["\n".join(textwrap.fill(line, 24, max_lines=2, placeholder="...") for line in row) for row in lines]
