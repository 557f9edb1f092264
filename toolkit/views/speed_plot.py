"""The figure of what replaying buys and what it wastes: replay against eager, and padding, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.runs.record import RunRecord, SpeedPoint
from toolkit.views import sheet
from toolkit.views.crowd import too_many
from toolkit.views.frames import NA, median_ratio, padding_percent, provenance, replay_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_speed(record: RunRecord) -> Figure:
    """Replay against eager: median ms of one full bucket, their ratio, and how much of a bucket is padding."""
    title = "Replay against eager"
    points = sorted(record.speed, key=lambda point: point.num_tokens)
    if not points:
        return sheet.words_only(title, record, "Replay was not timed against eager in this run.")
    ladder = [point.num_tokens for point in points]
    if why := too_many(ladder):
        return sheet.words_only(title, record, why)
    with sheet.sheet_style():
        figure, panels = sheet.new_sheet(title, provenance(record), 8.6, rows=(3, 2, 2))
        _draw_speed(panels[0], points)
        _draw_ratio(panels[1], points)
        _draw_padding(panels[2], record, ladder)
        sheet.finish_buckets(figure, panels, ladder)
    middle = median_ratio(record)
    found = NA if middle is None else f"{middle:.2f}"
    sheet.describe(
        figure,
        f"{title}, {provenance(record)}. Median of replay / eager over {len(points)} buckets: {found}.",
    )
    return figure


def _draw_speed(axes: Axes, points: Sequence[SpeedPoint]) -> None:
    eager = sheet.numbers([point.eager_ms for point in points])
    replay = sheet.numbers([point.replay_ms for point in points])
    at, size = range(len(points)), sheet.marker_size(len(points))
    axes.plot(at, eager, color=sheet.BLUE, marker="o", markersize=size, linestyle="-", label="eager")
    axes.plot(at, replay, color=sheet.ORANGE, marker="s", markersize=size, linestyle="--", label="replay")
    axes.set_ylabel("prefill body,\nfull bucket (ms)")
    axes.set_ylim(0, 1.1 * sheet.highest([*eager, *replay]) or 1.0)


def _draw_ratio(axes: Axes, points: Sequence[SpeedPoint]) -> None:
    axes.axhline(1, color=sheet.BLACK, linestyle=":", linewidth=2, label="equal (1.0)")
    axes.plot(
        range(len(points)),
        sheet.numbers([replay_ratio(point) for point in points]),
        color=sheet.GREEN,
        marker="D",
        markersize=sheet.marker_size(len(points)),
        linestyle="-.",
        label="replay / eager (below 1: replay is faster)",
    )
    axes.set_ylabel("replay / eager\n(ratio)")
    axes.margins(y=0.2)


def _draw_padding(axes: Axes, record: RunRecord, ladder: Sequence[int]) -> None:
    shares = padding_percent(record)
    series = (
        ("most, the smallest request replayed in it", 1, sheet.PURPLE, "v", ":"),
        ("mean over the requests replayed in it", 0, sheet.VERMILLION, "P", "-"),
    )
    for label, which, colour, marker, line in series:
        axes.plot(
            range(len(ladder)),
            sheet.numbers([shares[tokens][which] if tokens in shares else None for tokens in ladder]),
            color=colour,
            marker=marker,
            markersize=sheet.marker_size(len(ladder)),
            linestyle=line,
            label=f"padding: {label}",
        )
    axes.set_ylabel("padding\n(% of rows)")
    axes.set_ylim(0, 55)  # a bucket more than twice a request is not replayed, so half of it is the most
