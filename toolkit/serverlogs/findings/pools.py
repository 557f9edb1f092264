"""KV pools: what trimming a ladder does not give back, pools that do not fit, and sizing after the capture."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.events import Value
from toolkit.serverlogs.findings.facts import Facts, gib
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.ledger import RankLedger, tightest

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
    fractions = {facts.argument("mem_fraction_static") for facts in (one, other)} - {None}
    trimmed_ladder = (few.n_buckets or 0) < (many.n_buckets or 0)
    if len(fractions) > 1 or not trimmed_ladder or full.kv_cache_tokens != trimmed.kv_cache_tokens:
        return
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
        _raise_fraction(freed, fractions, trimmed),
    )


def _shape(facts: Facts) -> tuple[CaptureReport, RankLedger] | None:
    captured = [
        each
        for each in facts.captures
        if each.phase == "prefill" and each.role == "target" and each.outcome == "captured" and each.n_buckets
    ]
    ledger = tightest(facts.ledgers)
    if not captured or ledger is None or ledger.kv_cache_tokens is None:
        return None
    return captured[0], ledger


def _raise_fraction(freed: float, fractions: set[Value], ledger: RankLedger) -> str:
    usable = 0.9 * freed
    if ledger.baseline_gib is None:
        return "Raise mem_fraction_static to get it back; by how much is n/a without a `Load weight begin` line."
    step = usable / ledger.baseline_gib
    old = next(iter(fractions), None)
    tokens = ""
    if ledger.kv_cache_gib and ledger.kv_cache_tokens:
        tokens = f", about {usable / ledger.kv_cache_gib * ledger.kv_cache_tokens:,.0f} tokens more"
    to = f"from {old:g} to {old + step:.3f}" if isinstance(old, float) else f"by {step:.3f}"
    return f"Raise mem_fraction_static {to}{tokens} (90 % of what trimming freed)."
