"""How much a capture that failed would have needed, and what would make it fit. Pure arithmetic over its bars.

The first bucket pays for what all share. Later ones cost either about the same each (graphs) or in proportion to
their tokens (what each bucket keeps alive); which of the two, the bars themselves decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs.capture_report import BucketCost, CaptureReport
from toolkit.serverlogs.ledger import RankLedger

_RESERVE_GIB = 0.5


def reserve(free_gib: float) -> float:
    """What should stay free: the smaller of 0.5 GiB and a tenth of what was free."""
    return min(_RESERVE_GIB, 0.1 * free_gib)


@dataclass(frozen=True, slots=True)
class _Step:
    """Neighbouring buckets after the first: their mean size in tokens and mean cost in GiB."""

    tokens: float
    gib: float


def missing_gib(report: CaptureReport, tried_gib: float | None, free_gib: float | None) -> float | None:
    """GiB that were still missing for the rest of the ladder; None when neither bars nor the error tell.

    Args:
        report: the capture that failed.
        tried_gib: what the failed allocation asked for.
        free_gib: what was free then, by the error's own words.
    """
    at_once = tried_gib - free_gib if tried_gib is not None and free_gib is not None else 0.0
    last, cost = report.series[-1] if report.series else None, _later_cost(report)
    needed = 0.0
    if last is not None and last.free_gib is not None and cost is not None and last.bucket is not None:
        rest = [bucket for bucket in _ladder(report) if bucket <= last.bucket]
        needed = sum(map(cost, rest)) - last.free_gib
    missing = max(at_once, needed)
    return missing if missing > 0 else None


def lower_ceiling(report: CaptureReport) -> int | None:
    """The largest bucket that the bars say would have fitted as the first one; half of the largest if they are few."""
    ladder = _ladder(report)
    if not ladder:
        return None
    half = max((bucket for bucket in ladder if bucket <= ladder[-1] // 2), default=None)
    first, cost = report.first_bucket_gib, _later_cost(report)
    free = report.series[0].free_gib if report.series else None
    if first is None or cost is None or free is None:
        return half
    for ceiling in reversed(ladder[:-1]):
        need = first * ceiling / ladder[-1] + sum(cost(bucket) for bucket in ladder if bucket < ceiling)
        if need <= free - reserve(free):
            return ceiling
    return half


def lower_fraction(fraction: object, ledger: RankLedger | None, missing: float | None) -> float | None:
    """mem_fraction_static that leaves `missing` more: the fraction is a share of the memory free before weights."""
    if not isinstance(fraction, float) or ledger is None or not ledger.baseline_gib or missing is None:
        return None
    lowered = fraction - (missing + _RESERVE_GIB) / ledger.baseline_gib
    return math.floor(lowered * 1000 + 1e-6) / 1000 if lowered > 0 else None


def _ladder(report: CaptureReport) -> tuple[int, ...]:
    """Its buckets, smallest first: as printed, else the default ones up to the largest that a bar named."""
    if report.buckets:
        return report.buckets
    names = [point.bucket for point in report.series if point.bucket is not None]
    return tuple(generate_prefill_buckets(max(names, default=0)))


def _later_cost(report: CaptureReport) -> Callable[[int], float] | None:
    """GiB of a bucket of so many tokens, as one of those after the first; None when bars show no such step."""
    measured = list(zip(report.series, report.series[1:], strict=False))
    steps = [_step(one, following) for one, following in measured if one.done and one.added_gib is not None]
    if not steps:
        return None
    half = (len(steps) + 1) // 2
    early, late = _mean(steps[:half]), _mean(steps[half:] or steps)
    # Equal costs, or costs in proportion to tokens: whichever changes less from the early to the late buckets.
    change = _change(early.gib, late.gib)
    if change <= _change(early.gib / early.tokens, late.gib / late.tokens):
        return lambda tokens: max(late.gib, 0.0)
    return lambda tokens: max(late.gib, 0.0) / late.tokens * tokens


def _step(one: BucketCost, following: BucketCost) -> _Step:
    between = ((one.bucket or 1) + (following.bucket or 1)) / 2
    return _Step(max(between, 1.0), (one.added_gib or 0.0) / one.buckets)


def _mean(steps: list[_Step]) -> _Step:
    return _Step(sum(each.tokens for each in steps) / len(steps), sum(each.gib for each in steps) / len(steps))


def _change(before: float, after: float) -> float:
    return abs(math.log(after / before)) if before > 0 and after > 0 else math.inf
