"""KV pools: what trimming a ladder does not give back, pools that do not fit, and sizing after the capture."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.events import Value
from toolkit.serverlogs.findings.facts import Facts, gib
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.ledger import RankLedger, tightest
from toolkit.serverlogs.replay import without_graph

_LEAST_FREED_GIB = 0.1


def kv_unchanged_by_trimming(facts: Facts) -> Iterator[Finding]:
    """Two starts of one log: fewer buckets, the same fraction, the same KV tokens, more free memory."""
    if facts.previous is not None:
        yield from kv_unchanged(facts.previous, facts, "the start before and this one")


def kv_unchanged(one: Facts, other: Facts, where: str) -> Iterator[Finding]:
    """The same for any two starts, in either order."""
    pair = [_shape(facts) for facts in (one, other)]
    if pair[0] is None or pair[1] is None:
        return
    larger, smaller = sorted((pair[0], pair[1]), key=lambda found: -(found[0].n_buckets or 0))
    (many, full), (few, trimmed) = larger, smaller
    fractions = [facts.argument("mem_fraction_static") for facts in (one, other)]
    if None in fractions or fractions[0] != fractions[1]:
        return  # nothing shows that the fraction was fixed
    if (few.n_buckets or 0) >= (many.n_buckets or 0) or full.kv_cache_tokens != trimmed.kv_cache_tokens:
        return
    pinned = one.argument("max_total_tokens") is not None or other.argument("max_total_tokens") is not None
    if (
        pinned
        or not _alike(full.weights_gib, trimmed.weights_gib)
        or not _alike(full.baseline_gib, trimmed.baseline_gib)
    ):
        return  # another model or another card, or a pool that was given in tokens
    if full.free_at_end_gib is None or trimmed.free_at_end_gib is None:
        return
    freed = trimmed.free_at_end_gib - full.free_at_end_gib
    if freed < _LEAST_FREED_GIB:
        return
    yield Finding(
        "KV_UNCHANGED_BY_TRIMMING",
        "info",
        f"Between {where} the ladder went from {many.n_buckets} to {few.n_buckets} buckets and {gib(freed)} more stay "
        f"free, but the KV cache has {trimmed.kv_cache_tokens:,} tokens in both: it is sized before the graphs.",
        tuple(sorted({*many.lines[:1], *few.lines[:1]})),
        _raise_fraction(freed, fractions[0], trimmed),
    )


def _alike(first: float | None, second: float | None) -> bool:
    return first is None or second is None or abs(first - second) <= 0.02 * max(first, second)


def _shape(facts: Facts) -> tuple[CaptureReport, RankLedger] | None:
    captured = [
        each
        for each in facts.captures
        if each.phase == "prefill" and each.role == "target" and each.outcome == "captured" and each.n_buckets
    ]
    ledger = tightest(facts.ledgers)
    if any(each.shared for each in facts.captures):
        return None  # what stays free is then not what trimming freed
    if not captured or ledger is None or ledger.kv_cache_tokens is None:
        return None
    return captured[0], ledger


def _raise_fraction(freed: float, old: Value, ledger: RankLedger) -> str:
    usable = 0.9 * freed
    if ledger.baseline_gib is None:
        return "Raise mem_fraction_static to get it back; by how much is n/a without a `Load weight begin` line."
    step = usable / ledger.baseline_gib
    tokens = ""
    if ledger.kv_cache_gib and ledger.kv_cache_tokens:
        tokens = f", about {usable / ledger.kv_cache_gib * ledger.kv_cache_tokens:,.0f} tokens more"
    to = f"from {old:g} to {old + step:.3f}" if isinstance(old, float) else f"by {step:.3f}"
    return f"Raise mem_fraction_static {to}{tokens} (90 % of what trimming freed)."


def post_capture_kv_sizing_off(facts: Facts) -> Iterator[Finding]:
    """Sizing the KV cache after the capture was asked for and did not happen; servers fall back without a word."""
    startup = facts.startup
    asked = [notice for notice in startup.notices if notice.code == "post_capture_asked"]
    pools = [pool for log in startup.ranks.values() for pool in log.kv_pools]
    active = [line for line in startup.post_capture if line.tokens is not None]
    if not asked or active or not pools or any(pool.upper_bound or pool.after_capture for pool in pools):
        return
    if not startup.limits:
        return  # it may still come
    reasons = list(_why_off(facts))
    yield Finding(
        "POST_CAPTURE_KV_SIZING_OFF",
        "warning",
        "Sizing the KV cache after the capture was asked for, but the cache was sized before it"
        + (f": {', '.join(reasons)}." if reasons else "; the log does not show which condition failed."),
        (asked[0].line, pools[0].line),
        "It needs 0.5.16 or later, CUDA, no MLA, no memory saver, both graphs on, and from 0.5.17 a largest bucket of "
        "at least the chunk.",
    )


def _why_off(facts: Facts) -> Iterator[str]:
    prefill = [each for each in facts.captures if each.phase == "prefill" and each.role == "target"]
    largest = max((bucket for each in prefill for bucket in each.buckets or ()), default=None)
    if facts.version == "0.5.15":
        yield "0.5.15 does not have it"
    if facts.mla:
        yield "the model has MLA attention"
    if facts.argument("enable_memory_saver") is True:
        yield "the memory saver is on"
    if without_graph(facts.startup):
        yield "the prefill graph is off"
    if facts.argument("disable_cuda_graph") is True or facts.argument("disable_decode_cuda_graph") is True:
        yield "the decode graph is off"
    if largest is not None and facts.chunk is not None and largest < facts.chunk:
        yield f"the chunk ({facts.chunk}) is larger than the largest bucket ({largest})"
