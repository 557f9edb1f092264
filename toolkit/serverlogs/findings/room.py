"""How much a capture that failed would have needed, and what would make it fit. Pure arithmetic over its bars.

The first bucket pays for what all share. Later ones cost either about the same each (graphs) or in proportion to
their tokens (what each bucket keeps alive); which of the two, the bars themselves decide.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs.capture_report import BucketCost, CaptureReport
from toolkit.serverlogs.ledger import RankLedger
from toolkit.settings import MAX_BUCKET_TOKENS

_RESERVE_GIB = 0.5
_LEAST_KV_SHARE = 0.01
MIN_BUCKET_TOKENS = 4
"""The smallest bucket of a server's own ladder."""


def reserve(free_gib: float) -> float:
    """What should stay free: the smaller of 0.5 GiB and a tenth of what was free."""
    return min(_RESERVE_GIB, 0.1 * free_gib)


@dataclass(frozen=True, slots=True)
class ForecastRoom:
    """What a forecast says about the target's prefill capture of one start, in GiB, on its free memory.

    Attributes:
        startup: number of the start, from 0.
        free_gib: what was free before the capture, as measured.
        peak_gib: what the capture needs at its worst moment, the middle of the range.
        low_gib: the least that it should need then.
        high_gib: the most that it should need then.
        later_gib: what the captured graphs and the decode graphs after them need together.
        fits: the longest ladder that fits with the reserve, smallest first; empty when none does.
        fits_gib: the middle of what `fits` needs at its worst moment.
        whole: whether `fits` is the whole ladder, so that the forecast sees no reason to fail.
    """

    startup: int
    free_gib: float
    peak_gib: float
    low_gib: float
    high_gib: float
    later_gib: float
    fits: tuple[int, ...]
    fits_gib: float | None
    whole: bool

    @property
    def missing_gib(self) -> float:
        """More than was free, without a reserve: of the middle, else of the upper end; 0 where even that was free."""
        middle = max(self.peak_gib, self.later_gib) - self.free_gib
        return middle if middle > 0 else max(self.high_gib - self.free_gib, 0.0)


@dataclass(frozen=True, slots=True)
class Missing:
    """GiB that were missing, the sentence that says what they follow from, and whether that is the whole ladder."""

    gib: float
    basis: str
    whole: bool


@dataclass(frozen=True, slots=True)
class _Steps:
    """Neighbouring buckets after the first: how many, their tokens and their GiB, together; the buckets around them."""

    count: int
    tokens: float
    gib: float
    largest: int | None
    until: int | None


@dataclass(frozen=True, slots=True)
class _Law:
    """What a later bucket costs: the same for each, or in proportion to its tokens.

    Buckets that bars passed cost what they took; those that were left cost as the `late` ones did.
    """

    steps: tuple[_Steps, ...]
    ends: tuple[int, ...]
    late: _Steps
    by_tokens: bool

    def cost(self, tokens: int) -> float:
        """GiB of a bucket of so many tokens."""
        at = bisect_left(self.ends, tokens)
        passed = at < len(self.steps) and (self.steps[at].until or 0) < tokens
        like = self.steps[at] if passed else self.late
        return max(like.gib, 0.0) * (tokens / like.tokens if self.by_tokens else 1 / like.count)

    @property
    def words(self) -> str:
        """What the bars showed, in words."""
        many = f"{self.late.count} buckets" if self.late.count > 1 else "bucket"
        took = 1024 * self.late.gib
        each = f"{1024 * took / self.late.tokens:.0f} MiB per 1,024 tokens"
        if not self.by_tokens:
            each = f"{took / self.late.count:.0f} MiB" + (" each" if self.late.count > 1 else "")
        return f"by the bars the {many} between {self.late.largest} and {self.late.until} took {each}"


def missing(report: CaptureReport, tried_gib: float | None, free_gib: float | None) -> Missing | None:
    """What was still missing for the rest of the ladder; None when neither bars nor the error tell.

    Bars that include another process tell nothing.

    Args:
        report: the capture that failed.
        tried_gib: what the failed allocation asked for.
        free_gib: what was free then, by the error's own words.
    """
    at_once = tried_gib - free_gib if tried_gib is not None and free_gib is not None else 0.0
    rest = _rest(report)
    if rest is not None and rest.missing_gib > max(at_once, 0.0):
        return Missing(rest.missing_gib, rest.words, True)
    return Missing(at_once, "that is the one allocation that failed", False) if at_once > 0 else None


def fits_by_bars(report: CaptureReport) -> str | None:
    """The sentence that says that by its bars the whole ladder fits, so that they do not show what was lacking.

    None where they are too few, or ask for more than was free.
    """
    rest = _rest(report)
    if rest is None or rest.missing_gib > 0:
        return None
    return (
        f"{rest.words}, so by them the whole ladder fits; they do not show what took the rest: an allocation "
        "inside a bucket, or another process"
    )


@dataclass(frozen=True, slots=True)
class _Rest:
    """The buckets that were not captured: GiB that they lack by the bars (0 or less where they fit), and in words."""

    missing_gib: float
    words: str


def _rest(report: CaptureReport) -> _Rest | None:
    last, law = report.series[-1] if report.series else None, _law(report)
    if law is None or last is None or last.free_gib is None or last.bucket is None:
        return None
    if report.done is not None and report.done == report.n_buckets:
        return _Rest(-last.free_gib, f"the bars show all {report.done} buckets done")
    rest = [bucket for bucket in _ladder(report) if bucket <= last.bucket]
    left = f"{sum(rest):,} tokens in {len(rest)}" if law.by_tokens else f"{len(rest)}"
    words = f"{law.words}, {left} were left, and {last.free_gib:.2f} GiB was free"
    return _Rest(sum(map(law.cost, rest)) - last.free_gib, words)


def ceiling_by_bars(report: CaptureReport) -> int | None:
    """The largest bucket that the bars say would have fitted as the first one.

    None when they are too few, and when by them the whole ladder fits: then they tell nothing against any ceiling.
    """
    if fits_by_bars(report) is not None:
        return None
    ladder = _ladder(report)
    first, law = report.first_bucket_gib, _law(report)
    free = report.series[0].free_gib if report.series else None
    if not ladder or first is None or law is None or free is None:
        return None
    below = [0.0, *accumulate(map(law.cost, ladder))]  # of all buckets under the one at that place
    for at in reversed(range(len(ladder) - 1)):
        if first * ladder[at] / ladder[-1] + below[at] <= free - reserve(free):
            return ladder[at]
    return None


def sound_ceiling(report: CaptureReport, ceiling: int | None, chunk: int | None) -> int | None:
    """The largest bucket up to `ceiling` that may be advised: below the failed ladder's own, not above the chunk."""
    if ceiling is None:
        return None
    prefill = report.phase == "prefill"
    least, most = (MIN_BUCKET_TOKENS if prefill else 1), (min(ceiling, chunk) if chunk and prefill else ceiling)
    return max((bucket for bucket in _ladder(report)[:-1] if least <= bucket <= most), default=None)


def half_ceiling(report: CaptureReport) -> int | None:
    """The largest bucket of at most half the largest: what to try where nothing tells what would fit."""
    ladder = _ladder(report)
    return max((bucket for bucket in ladder if bucket <= ladder[-1] // 2), default=None) if ladder else None


def lower_fraction(fraction: object, ledger: RankLedger | None, missing: float | None) -> float | None:
    """mem_fraction_static that leaves `missing` more: the fraction is a share of the memory free before weights.

    None where figures are lacking, and where no fraction does: the weights take their share, and a KV pool needs some.
    """
    if not is_fraction(fraction) or not isinstance(fraction, float) or missing is None or missing <= 0:
        return None
    baseline = ledger.baseline_gib if ledger is not None else None
    if ledger is None or baseline is None or baseline <= 0:
        return None
    lowered = math.floor((fraction - (missing + _RESERVE_GIB) / baseline) * 1000 + 1e-6) / 1000
    weights = max(ledger.weights_gib or 0.0, baseline - (ledger.free_after_weights_gib or baseline)) / baseline
    return lowered if weights + _LEAST_KV_SHARE <= lowered < fraction else None


def is_fraction(value: object) -> bool:
    """Whether it can be a mem_fraction_static."""
    return isinstance(value, float) and 0 < value < 1


def _ladder(report: CaptureReport) -> tuple[int, ...]:
    """Its buckets, smallest first: as printed, else the default ones up to the largest that a bar named."""
    if report.buckets:
        return tuple(bucket for bucket in report.buckets if 0 < bucket <= MAX_BUCKET_TOKENS)
    names = [point.bucket for point in report.series if point.bucket is not None]
    return tuple(generate_prefill_buckets(max((name for name in names if name <= MAX_BUCKET_TOKENS), default=0)))


def _law(report: CaptureReport) -> _Law | None:
    """What the buckets after the first cost; None when bars show no such step, or one of another process."""
    if report.shared:
        return None
    measured = list(zip(report.series, report.series[1:], strict=False))
    ladder = _ladder(report)
    sums = (0, *accumulate(ladder))
    known = [(one, following) for one, following in measured if one.done and one.added_gib is not None]
    steps = [_step(ladder, sums, one, following) for one, following in known]
    if not steps:
        return None
    half = (len(steps) + 1) // 2
    early, late = _together(steps[:half]), _together(steps[half:] or steps)
    # Equal costs, or costs in proportion to tokens: whichever changes less from the early to the late buckets.
    change = _change(early.gib / early.count, late.gib / late.count)
    by_tokens = change > _change(early.gib / early.tokens, late.gib / late.tokens)
    steps.sort(key=lambda each: each.largest or 0)
    return _Law(tuple(steps), tuple(each.largest or 0 for each in steps), late, by_tokens)


def _step(ladder: tuple[int, ...], sums: tuple[int, ...], one: BucketCost, following: BucketCost) -> _Steps:
    """From one reading to the next: the buckets of the ladder in between, where the bars' count is theirs."""
    first, end = one.bucket or 1, following.bucket or 1
    low, high = bisect_right(ladder, end), bisect_right(ladder, first)
    tokens = float(sums[high] - sums[low]) if high - low == one.buckets else one.buckets * (first + end) / 2
    return _Steps(one.buckets, max(tokens, 1.0), one.added_gib or 0.0, one.bucket, following.bucket)


def _together(steps: list[_Steps]) -> _Steps:
    count, tokens, gib = (sum(getattr(each, name) for each in steps) for name in ("count", "tokens", "gib"))
    return _Steps(count, tokens, gib, steps[0].largest, steps[-1].until)


def _change(before: float, after: float) -> float:
    return abs(math.log(after / before)) if before > 0 and after > 0 else math.inf
