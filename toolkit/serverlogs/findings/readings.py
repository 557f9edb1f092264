"""What readings of free memory show beside the printed usage: the real peak, other processes, ranks that differ."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.serverlogs.capture_report import NOISE_GIB, unexplained_steps
from toolkit.serverlogs.events import Rank
from toolkit.serverlogs.findings.facts import Facts, between, gib, labels, of_ranks
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.startup import RankLog

_LEAST_PEAK_GIB = 0.05


def peak_above_printed_usage(facts: Facts) -> Iterator[Finding]:
    """Inside the capture less was free than after it: the printed usage is not what has to be free."""
    for report in facts.captures:
        used, peak = report.mem_usage_gib, report.peak_need_gib
        if used is None or used < 0 or peak is None or peak - used < _LEAST_PEAK_GIB or report.min_free_gib is None:
            continue
        lowest = min(
            (each for each in report.series if each.free_gib is not None), key=lambda each: each.free_gib or 0.0
        )
        yield Finding(
            "PEAK_ABOVE_PRINTED_USAGE",
            "info",
            f"The {report.role} {report.phase} capture prints {gib(used)} but needed {gib(peak)}: inside it only "
            f"{gib(report.min_free_gib)} was free, {gib(peak - used)} less than the printed usage says.",
            (lowest.line, *report.lines),
            f"Plan with {gib(peak)} free before the capture, not with the printed usage.",
            None,
            labels([report.rank]),
        )


def negative_usage(facts: Facts) -> Iterator[Finding]:
    """More memory was free after a capture than before: somebody else's, for free memory is the whole device's."""
    found = [
        (each.rank, f"{each.role} {each.phase}", each.mem_usage_gib, each.lines)
        for each in facts.captures
        if each.phase != "all"
    ]
    for log in facts.startup.ranks.values():
        if log.vllm.pool is not None:
            found.append((log.rank.label, "whole graph", log.vllm.pool.actual_gib, (log.vllm.pool.line,)))
    for rank, what, used, lines in found:
        if used is None or used >= 0:
            continue
        yield Finding(
            "NEGATIVE_USAGE",
            "info" if used > -NOISE_GIB else "warning",
            f"The usage of the {what} capture{of_ranks([rank])} is printed as {gib(used)}: free memory is the whole "
            "device's, so something else gave memory back meanwhile.",
            lines,
            "Do not use this figure; measure again with nothing else on the card." if used <= -NOISE_GIB else "",
            None,
            labels([rank]),
        )


def other_process_on_gpu(facts: Facts) -> Iterator[Finding]:
    """Free memory jumps inside a capture by more than a bucket can explain."""
    for report in facts.captures:
        jumps = unexplained_steps(report.series)
        if not jumps:
            continue
        worst, change = max(jumps, key=lambda each: abs(each[1]))
        direction = "fell" if change > 0 else "rose"
        yield Finding(
            "OTHER_PROCESS_ON_GPU",
            "warning",
            f"Inside the {report.role} {report.phase} capture{of_ranks([report.rank])} free memory {direction} by "
            f"{gib(abs(change))} at the bucket of {worst.bucket}, which its size does not explain "
            f"({len(jumps)} such step{'s' if len(jumps) > 1 else ''}): another process uses this card.",
            tuple(step.line for step, _ in jumps),
            "The capture's figures include the other process. Find it with nvidia-smi, measure again without it.",
            None,
            labels([report.rank]),
        )


_SKEW_GIB, _LARGE_SKEW_GIB, _LARGE_SHARE = 0.15, 1.0, 0.1


def rank_skew(facts: Facts) -> Iterator[Finding]:
    """Ranks of one server differ in free memory at the same stage: the smallest one decides."""
    for stage, readings in _stages(facts):
        values = [free for _, free, _ in readings]
        spread = max(values) - min(values) if len(values) > 1 else 0.0
        if spread < _SKEW_GIB:
            continue
        label, least, _ = min(readings, key=lambda each: each[1])
        large = spread >= _LARGE_SKEW_GIB and spread >= _LARGE_SHARE * least
        yield Finding(
            "RANK_SKEW",
            "warning" if large else "info",
            f"Free memory {stage} differs between ranks, {between(values)}: {label} has the least.",
            tuple(line for _, _, line in readings),
            f"Plan with {gib(least)} ({label}); every rank captures the same ladder."
            + (" Look for another process on its card." if large else ""),
            None,
            labels(name for name, _, _ in readings),
        )
        return  # later stages inherit the difference


def _stages(facts: Facts) -> Iterator[tuple[str, list[tuple[str, float, int]]]]:
    """Readings of ranks that should agree (one pipeline stage), by stage, the one that matters most first."""
    logs = facts.startup.sorted_ranks
    for pp in dict.fromkeys((log.rank.server, log.rank.pp) for log in logs):
        of_stage = [log for log in logs if (log.rank.server, log.rank.pp) == pp and _in_parallel(log.rank)]
        for phase in ("prefill", "decode", "verify"):
            yield f"before the {phase} capture", _begins(of_stage, phase)
        yield (
            "after the pools",
            [
                (log.rank.label, end.free_gib, end.line)
                for log in of_stage
                for end in log.pool_ends[:1]
                if end.free_gib is not None
            ],
        )


def _begins(logs: list[RankLog], phase: str) -> list[tuple[str, float, int]]:
    found = []
    for log in logs:
        capture = log.capture(phase)
        said = capture.begin or capture.skip if capture is not None else None
        free = getattr(said, "free_gib", None)
        if said is not None and free is not None:
            found.append((log.rank.label, free, said.line))
    return found


def _in_parallel(rank: Rank) -> bool:
    return rank.named
