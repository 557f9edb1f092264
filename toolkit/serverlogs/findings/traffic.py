"""What prefills made of the ladder: eager ones and why, and buckets nobody used."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.ladder import ceiling_for
from toolkit.serverlogs.findings.facts import Facts, gib
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.ledger import first_prefill
from toolkit.serverlogs.replay import REASONS, LengthRow, ReplayStats
from toolkit.settings import MAX_BUCKET_TOKENS

_ENOUGH_TO_JUDGE, _ENOUGH_FOR_UNUSED = 20, 200
_LARGE_SHARE, _UNUSED_SHARE = 0.1, 0.1
_SOURCES = {
    "too_short": "https://github.com/sgl-project/sglang/pull/31487",
    "too_long": "https://github.com/sgl-project/sglang-omni/pull/1398",
}
_FROM_TRAFFIC = "https://github.com/sgl-project/sglang-omni/pull/1900"


def ladder_unused(facts: Facts) -> Iterator[Finding]:
    """Buckets that no prefill used, once enough prefills were seen."""
    stats = facts.replay
    if stats is None or not stats.unused_buckets or stats.replayed + stats.eager < _ENOUGH_FOR_UNUSED:
        return
    used = sorted({row.bucket for row in stats.rows if row.graph and row.bucket is not None})
    count = len(used) + len(stats.unused_buckets)
    if len(stats.unused_buckets) < _UNUSED_SHARE * count or not used:
        return
    capture = first_prefill(facts.startup)
    flags = facts.flags
    cost = _cost(facts, len(stats.unused_buckets))
    yield Finding(
        "LADDER_UNUSED",
        "info",
        f"{len(stats.unused_buckets)} of {count} buckets were not used by {stats.replayed:,} replayed prefills; the "
        f"largest used is {used[-1]} tokens{cost}.",
        tuple(capture.lines[:1] if capture else ()) + tuple(row.first_line for row in stats.rows[:1]),
        f"A shorter list ({flags['buckets']}) starts faster; a lower ceiling ({flags['prefill']} {used[-1]}) gives "
        "memory back, if longer prefills do not come.",
        _FROM_TRAFFIC,
    )


def _cost(facts: Facts, buckets: int) -> str:
    report = next((each for each in facts.captures if each.phase == "prefill" and each.role == "target"), None)
    if report is None or report.later_bucket_gib is None or report.later_bucket_gib <= 0:
        return ""
    return f"; the others took about {gib(report.later_bucket_gib * buckets)}"


def eager_prefills(facts: Facts) -> Iterator[Finding]:
    """Prefills that ran eager, with the reason that the ladder gives."""
    stats = facts.replay
    if stats is None or not stats.eager:
        return
    told = stats.replayed + stats.eager
    share = stats.eager / told
    only_known = set(stats.eager_by_reason) <= {"no_graph", "empty"}
    serious = share >= _LARGE_SHARE and told >= _ENOUGH_TO_JUDGE and not only_known
    parts = [f"{count:,} {REASONS[reason]}" for reason, count in _by_count(stats)]
    rows = [row for row in stats.rows if row.graph is False]
    yield Finding(
        "EAGER_PREFILLS",
        "warning" if serious else "info",
        f"{stats.eager:,} of {told:,} prefills ({100 * share:.1f} %) ran eager: {'; '.join(parts)}.",
        tuple(sorted(row.first_line for row in rows)[:20]),
        _advice(facts, stats, rows),
        _SOURCES.get(_by_count(stats)[0][0]),
    )


def _by_count(stats: ReplayStats) -> list[tuple[str, int]]:
    return sorted(stats.eager_by_reason.items(), key=lambda each: (-each[1], each[0]))


def _advice(facts: Facts, stats: ReplayStats, rows: list[LengthRow]) -> str:
    reason, flags = _by_count(stats)[0][0], facts.flags
    lengths = [row.tokens for row in rows if row.reason == reason]
    if reason == "too_long":
        return _raise_ceiling(facts, max(lengths))
    if reason == "too_short":
        start = f"add buckets from {min(lengths)} tokens on ({flags['buckets']})"
        return f"Harmless if rare. If not, {start}: each costs little memory."
    return _shown_buckets(facts) if reason == "unknown" else _ADVICE[reason]


_ADVICE = {
    "other": "Look at cached prefixes, images, logprobs and hidden states: they can keep a prefill out of the graphs.",
    "no_graph": "See the finding that says why there is no prefill graph.",
    "empty": "Nothing: a batch without a token has nothing to replay.",
    "not_kept": "Give a part of the log, with fewer lengths.",
}


def _raise_ceiling(facts: Facts, longest: int) -> str:
    """The ceiling is a bucket only where it lies on the ladder, so the next step is what holds the longest prefill."""
    if longest > MAX_BUCKET_TOKENS:
        return f"No ladder reaches {longest:,} tokens: set a chunk."
    chunk = f"; the chunk is {facts.chunk}" if facts.chunk is not None else ""
    flag, ceiling = facts.flags["prefill"], ceiling_for(longest)
    return (
        f"Raise the ceiling ({flag}) to at least {ceiling} tokens, the first step of the ladder that holds {longest} "
        f"tokens{chunk}; a plan says if it fits."
    )


def _shown_buckets(facts: Facts) -> str:
    if first_prefill(facts.startup) is not None:
        return "Give the lines of the prefill capture whole: they list the buckets."
    return "Give the log from the start of the server: its capture lines show the buckets."
