"""How much a capture that failed would have needed, and what would make it fit. Pure arithmetic over its bars."""

from __future__ import annotations

from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.ledger import RankLedger

_RESERVE_GIB = 0.5


def reserve(free_gib: float) -> float:
    """What should stay free: the smaller of 0.5 GiB and a tenth of what was free."""
    return min(_RESERVE_GIB, 0.1 * free_gib)


def missing_gib(report: CaptureReport, tried_gib: float | None) -> float | None:
    """GiB that the rest of the ladder would still have needed, by the cost of the last buckets; None if bars are few.

    Later buckets cost no more than those before them, so this is an upper bound of what bars can tell.
    """
    last = report.series[-1] if report.series else None
    free = last.free_gib if last is not None and last.free_gib is not None else None
    if free is None:
        return None
    step = _last_step(report)
    if step is None or report.n_buckets is None or report.done is None:
        return max(tried_gib - free, 0.0) if tried_gib is not None else None
    need = max(step, 0.0) * (report.n_buckets - report.done)
    return max(need - free, (tried_gib or 0.0) - free, 0.0)


def lower_ceiling(report: CaptureReport) -> int | None:
    """The largest bucket that the bars say would have fitted as the first one; half of the largest if they are few."""
    names = [point.bucket for point in report.series if point.bucket is not None]
    largest = max([*(report.buckets or ()), *names], default=None)
    if largest is None:
        return None
    ladder = report.buckets or tuple(generate_prefill_buckets(largest))
    fitting = _fitting(report, ladder, largest)
    if fitting is not None:
        return fitting
    return max((bucket for bucket in ladder if bucket <= largest // 2), default=None)


def lower_fraction(fraction: object, ledger: RankLedger | None, missing: float | None) -> float | None:
    """mem_fraction_static that leaves `missing` more: the fraction is a share of the memory free before weights."""
    if not isinstance(fraction, float) or ledger is None or not ledger.baseline_gib or missing is None:
        return None
    lowered = fraction - (missing + _RESERVE_GIB) / ledger.baseline_gib
    return int(lowered * 1000) / 1000 if lowered > 0 else None


def _last_step(report: CaptureReport) -> float | None:
    later = [one for one in report.series if one.added_gib is not None and one.done]
    return (later[-1].added_gib or 0.0) / later[-1].buckets if later else None


def _fitting(report: CaptureReport, ladder: tuple[int, ...], largest: int) -> int | None:
    """By the costs that bars show: the first bucket's grows with its tokens, the others keep theirs."""
    first, step = report.first_bucket_gib, _last_step(report)
    free = report.series[0].free_gib if report.series else None
    if first is None or step is None or free is None:
        return None
    costs = {
        one.bucket: (one.added_gib or 0.0) / one.buckets for one in report.series if one.bucket is not None and one.done
    }

    def cost(bucket: int) -> float:
        known = min((name for name in costs if name >= bucket), default=None)
        return costs[known] if known is not None else step or 0.0

    for ceiling in sorted(ladder, reverse=True):
        need = first * ceiling / largest + sum(cost(bucket) for bucket in ladder if bucket < ceiling)
        if ceiling < largest and need <= free - reserve(free):
            return ceiling
    return None
