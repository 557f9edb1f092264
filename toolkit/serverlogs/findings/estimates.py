"""vLLM estimates its graphs' memory before it sizes the KV cache: what the estimate was worth."""

from __future__ import annotations

import math
from collections.abc import Iterator

from toolkit.serverlogs.capture_report import NOISE_GIB, is_estimate_pass
from toolkit.serverlogs.findings.facts import Facts, gib, labels, of_ranks
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.startup import Startup

_LEAST_GIB, _LEAST_SHARE = 0.05, 0.1
_SHORT_GIB, _ABSURD_GIB = 0.3, 50.0
_UNDER = "https://github.com/vllm-project/vllm/issues/57475"
_ABSURD = "https://github.com/vllm-project/vllm/issues/53013"


def estimate_pass_not_real(facts: Facts) -> Iterator[Finding]:
    """`Graph capturing finished` before the KV cache is sized is the trial, not the capture."""
    events = [(log, event) for log in facts.startup.sorted_ranks for event in log.vllm.finished]
    trials = [(log.rank.label, event) for log, event in events if is_estimate_pass(facts.startup, log, event)]
    if not trials:
        return
    passes = [event for _, event in trials]
    took = [event.gib for event in passes if event.gib is not None]
    real = [event.gib for _, event in events if event not in passes and event.gib is not None]
    figures = f", {gib(took[0])}" if took else ""
    after = f"; the real capture took {gib(real[0])}" if real else "; the real capture is not in this log"
    yield Finding(
        "ESTIMATE_PASS_NOT_REAL",
        "info",
        f"The first `Graph capturing finished`{of_ranks(rank for rank, _ in trials)}{figures}, is the pass that "
        f"estimates graph memory before the KV cache is sized{after}.",
        tuple(event.line for _, event in trials),
        "Do not add the two up, and compare engines by the second.",
        None,
        labels(rank for rank, _ in trials),
    )


def estimate_miss(facts: Facts) -> Iterator[Finding]:
    """The estimate and what the graphs really took differ; too little leads to failures, too much costs KV cache."""
    found: dict[tuple[float, float | None], list[tuple[str, int]]] = {}
    for log in facts.startup.sorted_ranks:
        pool, estimate = log.vllm.pool, log.vllm.estimate
        estimated = pool.estimated_gib if pool is not None else None
        said = pool if pool is not None and estimated is not None else estimate
        estimated = estimated if estimated is not None else estimate.gib if estimate is not None else None
        if estimated is not None and said is not None:
            figures = estimated, pool.actual_gib if pool is not None else None
            found.setdefault(figures, []).append((log.rank.label, said.line))
    for (estimated, actual), where in found.items():
        yield from _miss(facts, estimated, actual, where)


def lower_utilization(startup: Startup, lacking_gib: float | None, total_gib: float | None = None) -> str:
    """`Lower gpu_memory_utilization` and by how much, as far as the log tells: it is a share of the card's memory.

    Args:
        startup: of the log.
        lacking_gib: what has to stay free besides; None when that is not known.
        total_gib: the card's memory, where an error said it.
    """
    told = [log.vllm.startup for log in startup.sorted_ranks if log.vllm.startup is not None]
    total = total_gib or next((each.total_gib for each in told if each.total_gib), None)
    used = next((each.utilization for each in told if each.utilization), None)
    words = "Lower gpu_memory_utilization"
    if lacking_gib is None or lacking_gib <= 0:
        return words
    if total is None:
        return f"{words} so that {gib(lacking_gib)} more stay free"
    step = lacking_gib / total
    if used is None:
        return f"{words} by {step:.3f} or more ({gib(lacking_gib)} of {gib(total)})"
    lowered = math.floor((used - step) * 1000 + 1e-6) / 1000
    return f"{words} from {used:g} to {lowered:.3f}" if lowered > 0 else words


def _miss(facts: Facts, estimated: float, actual: float | None, where: list[tuple[str, int]]) -> Iterator[Finding]:
    ranks, lines = [label for label, _ in where], tuple(line for _, line in where)
    if estimated >= _ABSURD_GIB:
        yield Finding(
            "ESTIMATE_MISS",
            "warning",
            f"Graph memory was estimated as {gib(estimated)}{of_ranks(ranks)}, which no set of graphs takes.",
            lines,
            "Turn the estimate off, or the KV cache gets nothing.",
            _ABSURD,
            labels(ranks),
        )
        return
    if actual is None:
        return
    if actual <= -NOISE_GIB:
        yield Finding(
            "ESTIMATE_MISS",
            "info",
            f"The estimate kept {gib(estimated)} from the KV cache{of_ranks(ranks)}; by how much it missed is n/a, for "
            f"{gib(actual)} is not what the graphs alone took.",
            lines,
            "Measure again with nothing else on the card.",
            None,
            labels(ranks),
        )
        return
    if abs(actual - estimated) < max(_LEAST_GIB, _LEAST_SHARE * abs(actual)):
        return
    short = actual - estimated
    said = f"{gib(short)} too little was set aside" if short > 0 else f"the KV cache lost {gib(-short)} to it"
    yield Finding(
        "ESTIMATE_MISS",
        "warning" if short >= _SHORT_GIB else "info",
        f"Graphs took {gib(actual)}{of_ranks(ranks)}, the estimate was {gib(estimated)}: {said}.",
        lines,
        f"{lower_utilization(facts.startup, short)}: the next start may fail." if short > 0 else "",
        _UNDER if short > 0 else None,
        labels(ranks),
    )
