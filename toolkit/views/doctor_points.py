"""Where each reading of free memory of a start stands on a figure's axis: by the log's clock, else by its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from toolkit.serverlogs.ledger import tightest
from toolkit.views.frames import NA

if TYPE_CHECKING:
    from toolkit.serverlogs.capture_report import CaptureReport
    from toolkit.serverlogs.diagnosis import Diagnosis
    from toolkit.serverlogs.ledger import RankLedger, Stage

_LEAP_YEAR = "2000-"
"""Stands for the year of a log that prints none, so that the last of February is a day."""


@dataclass(frozen=True, slots=True)
class Point:
    """One reading: `x` on the axis, GiB free, its line, the stage's name; `capture` for a bar inside one."""

    x: float
    free_gib: float
    line: int
    stage: str
    capture: CaptureReport | None = None


@dataclass(frozen=True, slots=True)
class RankPoints:
    """The readings of one rank in the order of the axis."""

    rank: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A capture on the axis, from its first sign to its last."""

    capture: CaptureReport
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One start: ranks with the one of least free memory first, the captures of that one, and what `x` is.

    `clock` is whether `x` is seconds since the first reading; otherwise it counts readings in the order of the log.
    """

    startup: int
    ranks: tuple[RankPoints, ...]
    spans: tuple[Span, ...]
    clock: bool


def timeline_of(diagnosis: Diagnosis, startup: int) -> Timeline | None:
    """The readings of one start, or None when it has none."""
    ledgers = [each for each in diagnosis.ledger if each.startup == startup]
    captures = [each for each in diagnosis.captures if each.startup == startup]
    with_bars = [each.rank for each in captures if any(point.free_gib is not None for point in each.series)]
    tight = tightest([each for each in ledgers if each.stages])
    names = [each.rank for each in (tight, *ledgers) if each is not None and each.stages]
    names = list(dict.fromkeys([*names, *with_bars]))
    if not names:
        return None
    seconds = _seconds(diagnosis, ledgers, captures)
    place = seconds or _order(ledgers, captures)
    stages = {each.rank: each.stages for each in ledgers}
    ranks = tuple(RankPoints(name, _points(name, stages.get(name, ()), captures, place)) for name in names)
    spans = [_span(each, ranks[0].points, place) for each in captures if each.rank == names[0]]
    return Timeline(startup, ranks, tuple(span for span in spans if span is not None), bool(seconds))


# --- the clock --------------------------------------------------------------------------------------------------


def _seconds(
    diagnosis: Diagnosis, ledgers: Sequence[RankLedger], captures: Sequence[CaptureReport]
) -> dict[tuple[int, int], float]:
    """Seconds since the first reading by (line, number of the bar in it; -1 for a line's own reading).

    Empty when a reading has no time, or when all of them are of one second.
    """
    lines = [stage.line for ledger in ledgers for stage in ledger.stages]
    lines += [line for each in captures for line in each.lines if line in diagnosis.counters.times]
    times = {line: time for line in lines if (time := _time(diagnosis.counters.times.get(line))) is not None}
    if not times or len(times) < len(set(lines)) or len(set(times.values())) < 2:
        return {}
    first = min(times.values())
    found = {(line, -1): (time - first) / timedelta(seconds=1) for line, time in times.items()}
    for each in captures:
        known = [found[line, -1] for line in each.lines if (line, -1) in found]
        if each.series and not known:
            return {}  # bars alone have no clock that could be set beside the others'
        for number, point in enumerate(each.series):
            share = (number + 1) / (len(each.series) + 1)
            even = known[0] + share * (known[-1] - known[0])
            by_bar = even if point.started_s is None else known[0] + point.started_s
            found[point.line, number] = min(by_bar, known[-1]) if len(known) > 1 else by_bar
    return found


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    whole = text.replace("T", " ")
    try:
        return datetime.fromisoformat(whole if whole[:4].isdigit() else _LEAP_YEAR + whole)
    except ValueError:
        return None


def _order(ledgers: Sequence[RankLedger], captures: Sequence[CaptureReport]) -> dict[tuple[int, int], float]:
    keys = {(stage.line, -1) for ledger in ledgers for stage in ledger.stages}
    keys |= {(line, -1) for each in captures for line in each.lines}
    keys |= {(point.line, number) for each in captures for number, point in enumerate(each.series)}
    return {key: float(place) for place, key in enumerate(sorted(keys))}


# --- one rank ---------------------------------------------------------------------------------------------------


def _points(
    rank: str, stages: Sequence[Stage], captures: Sequence[CaptureReport], place: dict[tuple[int, int], float]
) -> tuple[Point, ...]:
    found = [((one.line, -1), Point(place[one.line, -1], one.free_gib, one.line, one.stage)) for one in stages]
    for each in captures:
        for number, one in enumerate(each.series if each.rank == rank else ()):
            if one.free_gib is not None:
                point = Point(place[one.line, number], one.free_gib, one.line, f"bucket {one.bucket or NA}", each)
                found.append(((one.line, number), point))
    found.sort(key=lambda pair: (pair[1].x, pair[0]))  # within a second of the clock the log's own order holds
    return tuple(point for _, point in found)


def _span(capture: CaptureReport, points: Sequence[Point], place: dict[tuple[int, int], float]) -> Span | None:
    """None for a decision against a capture, and for one that has no place on the axis."""
    if capture.outcome == "skipped":
        return None
    at = [place[line, -1] for line in capture.lines if (line, -1) in place]
    at += [point.x for point in points if point.capture is capture]
    return Span(capture, min(at), max(at)) if at else None
