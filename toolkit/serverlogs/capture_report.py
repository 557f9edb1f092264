"""A capture as figures: what it took, the least that was free inside, what its buckets cost.

Bars say the free memory BEFORE each bucket, so the cost of a bucket is the next reading less its own. A bar that a
logger thinned out skips buckets: what lies between two readings is then the cost of several.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.serverlogs.events_vllm import VllmGraphFinished
from toolkit.serverlogs.startup import BucketPoint, Capture, RankLog, Startup


@dataclass(frozen=True, slots=True)
class BucketCost:
    """One bucket as its bar showed it.

    Attributes:
        bucket: tokens, or requests for decode graphs; None where the bar names none.
        line: of the bar.
        free_gib: free before it was captured.
        added_gib: what it and the `buckets` - 1 after it took until the next reading; None for the last one.
        buckets: how many buckets `added_gib` and `seconds` are the cost of.
        done: buckets captured before it.
        started_s: seconds since the bar began.
        seconds: until the next reading.
    """

    bucket: int | None
    line: int
    free_gib: float | None
    added_gib: float | None
    buckets: int
    done: int | None
    started_s: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """One capture of one rank, or the decision against it; sizes in GiB, None where the log does not say.

    Attributes:
        startup: number of its start, from 0.
        rank: label of the rank.
        phase: `prefill`, `decode`, `verify`, `extend`, or `all` (vLLM says one figure for all its graphs).
        role: `target` or `draft`.
        outcome: `captured`, `skipped`, `oom`, `failed`, `incomplete`, or `estimate` (vLLM's trial before sizing KV).
        backend: as printed.
        n_buckets: of the printed list, else what the bar counts to.
        buckets: smallest first; None unless the log shows them all.
        free_before_gib: of the begin line, or of the gate that skipped it.
        mem_usage_gib: as printed: free before less free after, so it may be negative.
        min_free_gib: the least of the bars and the end line; None without bars.
        peak_need_gib: free before less the least free inside; see `peak_need`.
        first_bucket_gib: cost of the first, largest bucket, from bars.
        later_bucket_gib: mean cost of the buckets after it, from bars.
        elapsed_s: as printed.
        free_after_gib: of the end line.
        stopped_at: the bucket in work when it ran out of memory or failed, or when the log ends; None after the last.
        done: buckets done by the last bar.
        compile_s: seconds of the compile pass that some builds print before the capture, by its last bar.
        series: one entry per bucket that bars showed.
        lines: of its begin, end and failures.
    """

    startup: int
    rank: str
    phase: str
    role: str
    outcome: str
    backend: str | None = None
    n_buckets: int | None = None
    buckets: tuple[int, ...] | None = None
    free_before_gib: float | None = None
    mem_usage_gib: float | None = None
    min_free_gib: float | None = None
    peak_need_gib: float | None = None
    first_bucket_gib: float | None = None
    later_bucket_gib: float | None = None
    elapsed_s: float | None = None
    free_after_gib: float | None = None
    stopped_at: int | None = None
    done: int | None = None
    compile_s: float | None = None
    series: tuple[BucketCost, ...] = ()
    lines: tuple[int, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether its figures show another process on the card: nothing may be concluded from them."""
        return _gave_back(self.mem_usage_gib) or bool(unexplained_steps(self.series))


NOISE_GIB = 0.05
# Public traces: a card used alone rises by 0.02 and never falls by more than its first bucket took;
# shared cards rise by 0.5 and fall by 1.2 to 13 GiB.
_LEAST_RISE_GIB, _LEAST_STEP_GIB = 0.3, 0.5


def capture_reports(startup: Startup) -> list[CaptureReport]:
    """Every capture of a start, rank by rank, in the order of their lines."""
    found = [capture_report(startup, capture) for log in startup.sorted_ranks for capture in log.captures]
    if any(log.vllm.finished for log in startup.ranks.values()):
        found = [report for report in found if report.outcome != "captured"] + _vllm(startup)
    return found


def capture_report(startup: Startup, capture: Capture) -> CaptureReport:
    """The figures of one capture."""
    series = bucket_costs(capture.points)
    end = capture.end
    readings = [point.free_gib for point in series if point.free_gib is not None]
    before = capture.free_before_gib if capture.begin else getattr(capture.skip, "free_gib", None)
    # Without bars nothing is known of the inside: the end line tells what came back, too.
    lowest = min([*readings, *([end.free_gib] if readings and end and end.free_gib is not None else [])], default=None)
    alone = end is None or not _gave_back(end.usage_gib)
    count = capture.bucket_count if end is not None else None
    ladder = capture.ladder or _ladder_of_bars(capture)
    compiled = capture.compile_points[-1] if capture.compile_points else None
    return CaptureReport(
        startup=startup.index,
        rank=capture.rank.label,
        phase=capture.phase,
        role=capture.role,
        outcome=capture.outcome,
        backend=capture.backend,
        n_buckets=None if capture.outcome == "skipped" else capture.bucket_count,
        buckets=tuple(sorted(set(ladder))) if ladder is not None else None,
        free_before_gib=before,
        mem_usage_gib=end.usage_gib if end else None,
        min_free_gib=lowest,
        peak_need_gib=peak_need(series, before, lowest, count) if alone else None,
        first_bucket_gib=first_cost(series),
        later_bucket_gib=later_cost(series),
        elapsed_s=end.elapsed_s if end else None,
        free_after_gib=capture.free_after_gib,
        stopped_at=_stopped_at(capture),
        done=capture.done,
        compile_s=(compiled.ended_s or compiled.started_s or None) if compiled is not None else None,
        series=series,
        lines=capture.lines or tuple(point.line for point in series[:1]),
    )


def peak_need(
    series: tuple[BucketCost, ...], before: float | None, lowest: float | None, count: int | None
) -> float | None:
    """GiB that a capture needs at its worst moment: free before less the least free inside; None where bars hide it.

    The first bucket takes the most and the later ones add to it, so bars must show the memory right before and right
    after the first bucket, and go on into the last quarter of the buckets: a reading in between then lies between its
    neighbours. Fewer bars give a lower bound only, and a reading that includes another process nothing at all (see
    `unexplained_steps`).

    Args:
        series: one entry per bucket that bars showed.
        before: free before the capture.
        lowest: the least free memory inside.
        count: buckets in all; None where the capture did not end, whose bars tell what it needed up to there.
    """
    if before is None or lowest is None or first_cost(series) is None or unexplained_steps(series):
        return None
    last = max(one.done or 0 for one in series if one.free_gib is not None)
    if count is not None and count - last > max(count // 4, 1):
        return None
    return round(before - lowest, 4)


def _gave_back(usage_gib: float | None) -> bool:
    """Whether more was free after a capture than before: somebody else's, for a capture gives nothing back."""
    return usage_gib is not None and usage_gib <= -NOISE_GIB


def unexplained_steps(series: tuple[BucketCost, ...]) -> list[tuple[BucketCost, float]]:
    """Steps after the first bucket that free memory or take much more than any before them, with their GiB.

    Capture goes from the largest bucket down and later ones reuse its memory, so a later bucket costs no more than
    those before it, and gives nothing back.
    """
    found: list[tuple[BucketCost, float]] = []
    most: float | None = None
    for step in series:
        if step.added_gib is None or step.done is None:
            continue
        each = step.added_gib / step.buckets
        if step.done == 0:
            most = max(each, 0.0)
            continue
        allowed = most * step.buckets if most is not None else None
        came_back = step.added_gib <= -_LEAST_RISE_GIB
        if came_back or (allowed is not None and step.added_gib - allowed >= _LEAST_STEP_GIB):
            found.append((step, step.added_gib))
        else:
            most = max(each, 0.0)
    return found


def bucket_costs(points: list[BucketPoint]) -> tuple[BucketCost, ...]:
    """What each reading of the bars cost until the next one."""
    found = []
    for index, point in enumerate(points):
        following = points[index + 1] if index + 1 < len(points) else None
        added = seconds = None
        if following is not None and point.free_gib is not None and following.free_gib is not None:
            added = round(point.free_gib - following.free_gib, 4)
        if following is not None and point.started_s is not None and following.started_s is not None:
            seconds = following.started_s - point.started_s
        if seconds is None and point.ended_s is not None and point.started_s is not None:
            seconds = point.ended_s - point.started_s
        span = 1
        if following is not None and point.done is not None and following.done is not None:
            span = max(following.done - point.done, 1)
        found.append(
            BucketCost(point.bucket, point.line, point.free_gib, added, span, point.done, point.started_s, seconds)
        )
    return tuple(found)


def first_cost(series: tuple[BucketCost, ...]) -> float | None:
    """GiB of the first bucket: only when bars show the memory right before and right after it."""
    first = series[0] if series else None
    return first.added_gib if first is not None and first.done == 0 and first.buckets == 1 else None


def later_cost(series: tuple[BucketCost, ...]) -> float | None:
    """Mean GiB of the buckets after the first."""
    later = [one for one in series if one.added_gib is not None and one.done]
    count = sum(one.buckets for one in later)
    return round(sum(one.added_gib or 0.0 for one in later) / count, 5) if count else None


def _ladder_of_bars(capture: Capture) -> tuple[int, ...] | None:
    named = [point.bucket for point in capture.points if point.bucket is not None]
    complete = capture.total is not None and len(set(named)) == capture.total
    return tuple(named) if complete else None


def _stopped_at(capture: Capture) -> int | None:
    if capture.outcome not in ("oom", "failed", "incomplete"):
        return None
    bar = capture.last_bar
    return bar.bucket if bar is not None and (bar.total is None or bar.done != bar.total) else None


def _vllm(startup: Startup) -> list[CaptureReport]:
    """One entry per `Graph capturing finished`: what came before KV was sized is the estimate pass."""
    found = []
    for log in startup.sorted_ranks:
        profile = log.vllm.profile
        counts = [count for count in (profile.piecewise, profile.full) if count is not None] if profile else []
        for event in log.vllm.finished:
            estimate = is_estimate_pass(startup, log, event)
            # The trial captures a few graphs only: as many as its own bars count to.
            drawn = [each.total for each in startup.captures if each.finished is event and each.total is not None]
            found.append(
                CaptureReport(
                    startup=startup.index,
                    rank=log.rank.label,
                    phase="all",
                    role="target",
                    outcome="estimate" if estimate else "captured",
                    n_buckets=sum(drawn if estimate else counts) or None,
                    mem_usage_gib=event.gib,
                    elapsed_s=event.seconds,
                    lines=(event.line,),
                )
            )
    return found


def is_estimate_pass(startup: Startup, log: RankLog, event: VllmGraphFinished) -> bool:
    """Whether vLLM's graphs that finished with `event` were the trial that only estimates their memory.

    It comes before the worker's KV cache is sized; the real capture comes after.
    """
    own = log.vllm.available_kv
    if own is not None:
        return event.line < own.line
    if len(log.vllm.finished) > 1:
        return event is log.vllm.finished[0]
    sized = [each.vllm.available_kv.line for each in startup.ranks.values() if each.vllm.available_kv is not None]
    sized += [tokens.line for tokens in startup.vllm_kv_tokens]
    return bool(sized) and event.line < min(sized)
