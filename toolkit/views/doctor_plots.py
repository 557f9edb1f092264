"""Diagnoses in, Matplotlib figures out: free memory through a start-up, and memory against bucket.

In the style of `toolkit.views.plots`. Every figure says that it is field data, from which log and of which release.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from toolkit.policies import MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB as GATE_GIB
from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.diagnosis import Diagnosis
from toolkit.views import sheet
from toolkit.views.doctor_buckets import plot_log_buckets
from toolkit.views.doctor_points import Point, RankPoints, Span, Timeline, timeline_of
from toolkit.views.frames import NA, memory_words
from toolkit.views.log_words import ENDED, GATE_FACTOR, log_provenance, startup_shown
from toolkit.views.plots import GATE_LABEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_log_buckets", "plot_timeline"]

MAX_RANKS, MAX_STAGES = 6, 17
"""More ranks than this are not told apart, and more stages have no room; the rest is counted in words."""
_ZOOM = 2.5
"""From this ratio of all free memory to that around captures on, captures get a panel of their own."""
_MARKERS = "oDs^vP"
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
_PHASES = {
    "prefill": (sheet.SKY, "///"),
    "decode": (sheet.ORANGE, ".."),
    "verify": (sheet.GREEN, "\\\\"),
    "extend": (sheet.PURPLE, "--"),
}


def plot_timeline(diagnosis: Diagnosis, startup: int | None = None) -> Figure:
    """Free memory (GiB) through a start-up, rank by rank: captures shaded, stages numbered and named beside.

    Args:
        diagnosis: what to draw.
        startup: number of the start, from 0; None takes the one `toolkit.serverlogs.focus.start_to_show` picks.
    """
    title = "Free memory through the start-up"
    number = startup_shown(diagnosis, startup)
    subtitle = log_provenance(diagnosis, number)
    line = timeline_of(diagnosis, number) if number is not None else None
    if line is None:
        return sheet.words_only(title, None, f"{NA}: this log has no reading of free memory.", subtitle)
    shown = line.ranks[:MAX_RANKS]
    left_out = len(line.ranks) - len(shown)
    subtitle += f" | {left_out} more rank{'s' if left_out > 1 else ''} not drawn" if left_out else ""
    low, high = _around_captures(line)
    rows = (2, 3) if high * _ZOOM < max(point.free_gib for each in shown for point in each.points) else (1,)
    with sheet.sheet_style():
        figure, axes = sheet.new_sheet(title, subtitle, 7.8 if len(rows) > 1 else 6.6, rows=rows, columns=(7, 4))
        panels, words = axes[::2], axes[1]
        for panel in panels:
            _draw_captures(panel, line, labels=panel is panels[-1])
            _draw_ranks(panel, shown, labels=panel is panels[-1])
            _draw_gate(panel, line, labels=panel is panels[-1])
            panel.set_ylabel("free memory (GiB)")
            panel.grid(axis="y", color="#D0D0D0", linewidth=0.6)
            panel.set_axisbelow(True)
        _limit(panels, line, low, high)
        _name_stages(panels, words, line)
        for empty in axes[1::2]:
            empty.set_axis_off()
        panels[-1].set_xlabel(_axis_words(line))
        figure.legend(loc="outside lower center", ncols=1, handlelength=3, handleheight=1.2)
    sheet.describe(figure, f"{title}, {sheet.in_one(subtitle)}. {_timeline_in_words(line)}")
    return figure


# --- free memory through the start-up ---------------------------------------------------------------------------


def _around_captures(line: Timeline) -> tuple[float, float]:
    """The least and the most that was free from the first capture on; without captures, of everything."""
    start = min((span.first for span in line.spans), default=float("-inf"))
    inside = [point.free_gib for each in line.ranks for point in each.points if point.x >= start]
    everything = [point.free_gib for each in line.ranks for point in each.points]
    return min(inside or everything), max(inside or everything)


def _draw_ranks(axes: Axes, ranks: Sequence[RankPoints], *, labels: bool) -> None:
    for number, each in enumerate(ranks):
        least = ", least free" if number == 0 and len(ranks) > 1 else ""
        axes.plot(
            [point.x for point in each.points],
            sheet.numbers([point.free_gib for point in each.points]),
            color=sheet.BLUE if number == 0 else sheet.GREY,
            marker=_MARKERS[number],
            markersize=4.5 if len(each.points) > 24 else 6,
            linestyle=_LINES[number],
            linewidth=2 if number == 0 else 1.3,
            zorder=4 if number == 0 else 3,
            label=f"free memory, {each.rank}{least}" if labels else None,
        )


def _draw_captures(axes: Axes, line: Timeline, *, labels: bool) -> None:
    room = 0.006 * max(_width(line), 1.0)
    lowest = [point for span in line.spans if (point := _lowest(line, span)) is not None]
    for span in line.spans:
        ended = ENDED.get(span.capture.outcome)
        colour, hatch = _PHASES.get(span.capture.phase, (sheet.PALE, "//"))
        if span.capture.outcome in ("oom", "failed"):
            colour, hatch = sheet.VERMILLION, "xx"
        label = f"{span.capture.role} {span.capture.phase} capture: {ended or 'captured'}{_figures(span.capture)}"
        first, last = span.first, max(span.last, span.first + room)
        axes.axvspan(first, last, fc=colour, alpha=0.12, zorder=0)
        axes.axvspan(first, last, fc="none", ec=colour, hatch=hatch, zorder=0.5, label=label if labels else None)
    if lowest:
        axes.plot(
            [point.x for point in lowest],
            [point.free_gib for point in lowest],
            color=sheet.VERMILLION,
            markeredgecolor=sheet.BLACK,
            marker="v",
            markersize=11,
            linestyle="none",
            zorder=6,
            label="least free inside a capture" if labels else None,
        )


def _lowest(line: Timeline, span: Span) -> Point | None:
    inside = [point for point in line.ranks[0].points if point.capture is span.capture]
    return min(inside, key=lambda point: point.free_gib, default=None)


def _figures(capture: CaptureReport) -> str:
    parts = []
    if capture.stopped_at is not None:
        parts.append(f"at bucket {capture.stopped_at}")
    if capture.n_buckets is not None:
        parts.append(f"{capture.n_buckets} buckets")
    if capture.mem_usage_gib is not None:
        parts.append(f"{memory_words(capture.mem_usage_gib)} printed")
    if capture.peak_need_gib is not None:
        parts.append(f"{memory_words(capture.peak_need_gib)} needed inside")
    return "".join(f", {part}" for part in parts)


def _draw_gate(axes: Axes, line: Timeline, *, labels: bool) -> None:
    if min(point.free_gib for each in line.ranks for point in each.points) < GATE_FACTOR * GATE_GIB:
        label = GATE_LABEL if labels else None
        axes.axhline(GATE_GIB, color=sheet.VERMILLION, linestyle="-.", linewidth=2, label=label)


def _limit(panels: Sequence[Axes], line: Timeline, low: float, high: float) -> None:
    """Room on both sides; the whole start from 0, and captures with what is around them, on the last panel."""
    width = max(_width(line), 1.0)
    first = min(point.x for each in line.ranks for point in each.points)
    panels[0].set_xlim(first - 0.04 * width, first + 1.05 * width)
    if not line.clock:
        panels[0].set_xticks([])
    highest = max(point.free_gib for each in line.ranks for point in each.points)
    panels[0].set_ylim(0, 1.15 * max(highest, 0.5))
    if len(panels) == 1:
        low, high = min(point.free_gib for each in line.ranks for point in each.points), highest
    bottom, top = (0.0, max(high, GATE_GIB)) if low < GATE_FACTOR * GATE_GIB else (low, high)
    room = max(0.18 * (top - bottom), 0.02 * top, 0.05)
    panels[-1].set_ylim(max(bottom - room, 0.0), top + room)


def _width(line: Timeline) -> float:
    xs = [point.x for each in line.ranks for point in each.points]
    return max(xs) - min(xs)


def _name_stages(panels: Sequence[Axes], words: Axes, line: Timeline) -> None:
    """Numbers at the stages of the first rank, and a list of their names and figures in a column of its own."""
    stages = [point for point in line.ranks[0].points if point.capture is None][:MAX_STAGES]
    for numbers, point in _together(stages, panels, line):
        for axes in panels if len(panels) == 1 else [_panel_of(panels, point)]:
            axes.annotate(
                numbers,
                (point.x, point.free_gib),
                (0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=sheet.SMALL_PT,
                fontweight="bold",
                zorder=7,
                bbox={**sheet.paper(), "pad": 0.4, "alpha": 0.8},
            )
    rows = list(_rows(stages, line))
    step = 0.062 if len(panels) == 1 else 0.13
    for at, (mark, name, free, when) in enumerate([("", line.ranks[0].rank, "free (GiB)", when_heading(line)), *rows]):
        weight = "bold" if at == 0 else "normal"
        for x, text, side in ((0.0, mark, "left"), (0.07, name, "left"), (0.82, free, "right"), (1.0, when, "right")):
            text_drawn = words.text(
                x, 1 - step * at, text, transform=words.transAxes, ha=side, va="top", fontsize=9.5, fontweight=weight
            )
            text_drawn.set_in_layout(False)


def when_heading(line: Timeline) -> str:
    """What stands beside a stage: seconds since the first reading, or its line."""
    return "s" if line.clock else "line"


def _rows(stages: Sequence[Point], line: Timeline) -> Iterator[tuple[str, str, str, str]]:
    inside = {id(span.capture): _lowest(line, span) for span in line.spans}
    by_begin = {
        f"{span.capture.role} {span.capture.phase} capture begin": inside[id(span.capture)] for span in line.spans
    }
    for number, point in enumerate(stages, 1):
        yield str(number), _short(point.stage), f"{point.free_gib:.2f}", _when(point, line)
        low = by_begin.pop(point.stage, None)
        if low is not None:
            yield "\u25bc", f"  least inside, {low.stage}", f"{low.free_gib:.2f}", _when(low, line)
    for low in by_begin.values():
        if low is not None:
            yield "\u25bc", f"least inside, {low.stage}", f"{low.free_gib:.2f}", _when(low, line)
    more = len([point for point in line.ranks[0].points if point.capture is None]) - len(stages)
    if more > 0:
        yield "", f"... {more} more in the table", "", ""


def _when(point: Point, line: Timeline) -> str:
    return f"{point.x:.0f}" if line.clock else str(point.line)


def _short(stage: str) -> str:
    return stage.removeprefix("target ").replace(" capture", "")


def _panel_of(panels: Sequence[Axes], point: Point) -> Axes:
    bottom, top = panels[-1].get_ylim()
    return panels[-1] if bottom <= point.free_gib <= top else panels[0]


def _together(stages: Sequence[Point], panels: Sequence[Axes], line: Timeline) -> Iterator[tuple[str, Point]]:
    """Numbers of stages that lie on each other are one: `3-5` at the first of them."""
    groups: list[list[tuple[int, Point]]] = []
    for number, point in enumerate(stages, 1):
        last = groups[-1][-1][1] if groups else None
        if last is not None and _panel_of(panels, last) is _panel_of(panels, point):
            bottom, top = _panel_of(panels, point).get_ylim()
            near = abs(point.x - last.x) < 0.03 * max(_width(line), 1.0)
            if near and abs(point.free_gib - last.free_gib) < 0.08 * (top - bottom):
                groups[-1].append((number, point))
                continue
        groups.append([(number, point)])
    for group in groups:
        ends = group[0][0], group[-1][0]
        yield (str(ends[0]) if len(group) == 1 else f"{ends[0]}-{ends[1]}"), group[0][1]


def _axis_words(line: Timeline) -> str:
    if line.clock:
        return "seconds since the first reading (the log's clock; bars by their own)"
    return "readings in the order of the log (not to scale: it has no times)"


def _timeline_in_words(line: Timeline) -> str:
    parts = [
        f"{_short(point.stage)} {memory_words(point.free_gib)}"
        for point in line.ranks[0].points
        if point.capture is None
    ]
    inside = [
        f"least inside the {span.capture.role} {span.capture.phase} capture {memory_words(low.free_gib)}"
        for span in line.spans
        if (low := _lowest(line, span)) is not None
    ]
    ends = [
        f"the {span.capture.role} {span.capture.phase} capture {ENDED[span.capture.outcome]}{_figures(span.capture)}"
        for span in line.spans
        if span.capture.outcome in ENDED
    ]
    return f"{line.ranks[0].rank}: {'; '.join((*parts, *inside, *ends))}."
