"""What prefills did with the graphs: replayed or eager, by length, with the reason that the ladder gives.

Rules of SGLang 0.5.15 to 0.5.23 (executed): tokens beyond the largest bucket run eager; since 0.5.16 also when the
smallest bucket that holds them is more than twice as large. Other reasons (a cached prefix, logprobs, images) leave
no trace in the log.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.ladder import REPLAY_LIMIT_FACTOR, choose_bucket, exceeds_replay_limit
from toolkit.serverlogs.capture_report import capture_report
from toolkit.serverlogs.ledger import first_prefill
from toolkit.serverlogs.startup import Startup

REASONS = {
    "no_graph": "because there is no prefill graph",
    "too_long": "because they are longer than the largest bucket",
    "too_short": "because the smallest bucket that holds them is more than twice as large",
    "other": "although a bucket fits (a cached prefix, images, logprobs, ...)",
    "unknown": "for reasons not known, as the log does not show the buckets",
}
"""Why a prefill ran eager."""


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Prefill batches of one length that did the same.

    Attributes:
        tokens: tokens computed by each batch.
        graph: True replayed, False eager, None not said.
        batches: how many.
        bucket: the bucket a batch of this length is padded to, None when the ladder has none or is not known.
        reason: key of `REASONS` for eager batches, None for others.
        first_line: of the first one.
    """

    tokens: int
    graph: bool | None
    batches: int
    bucket: int | None
    reason: str | None
    first_line: int


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """Prefill batches of one start.

    Attributes:
        startup: number of the start, from 0.
        batches: prefill batches in the log; `before_ready` of them before the server was up (its own warm-up).
        replayed: batches that replayed a graph.
        eager: batches that ran eager.
        hit_rate: replayed of those that say, 0 to 1; None when none says.
        padded_share: padding in the rows that replays computed, 0 to 1; None when the ladder is not known.
        new_tokens: tokens computed.
        cached_tokens: tokens found in the prefix cache.
        eager_by_reason: batches by key of `REASONS`.
        unused_buckets: buckets of the ladder that no replayed batch used; None when the ladder is not known.
        rows: by length.
    """

    startup: int
    batches: int
    before_ready: int
    replayed: int
    eager: int
    hit_rate: float | None
    padded_share: float | None
    new_tokens: int
    cached_tokens: int
    eager_by_reason: dict[str, int]
    unused_buckets: tuple[int, ...] | None
    rows: tuple[LengthRow, ...]


def prefill_ladder(startup: Startup) -> tuple[int, ...] | None:
    """The target's prefill buckets, smallest first, when the log shows them all."""
    capture = first_prefill(startup)
    return capture_report(startup, capture).buckets if capture is not None else None


def replay_stats(startup: Startup) -> ReplayStats | None:
    """What prefills did; None when the log has none."""
    stats = startup.prefills
    if not stats.batches:
        return None
    ladder, capture = prefill_ladder(startup), first_prefill(startup)
    captured = capture is not None and capture.outcome == "captured"
    rows = []
    for (tokens, graph), count in sorted(stats.lengths.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        bucket = choose_bucket(ladder, tokens) if ladder else None
        reason = _reason(tokens, bucket, ladder, captured, startup) if graph is False else None
        rows.append(LengthRow(tokens, graph, count.batches, bucket, reason, count.first_line))
    replayed = [row for row in rows if row.graph is True]
    reasons: dict[str, int] = {}
    for row in rows:
        if row.reason is not None:
            reasons[row.reason] = reasons.get(row.reason, 0) + row.batches
    hits, misses = stats.count(True), stats.count(False)
    used = {row.bucket for row in replayed}
    return ReplayStats(
        startup=startup.index,
        batches=stats.batches,
        before_ready=stats.before_ready,
        replayed=hits,
        eager=misses,
        hit_rate=hits / (hits + misses) if hits + misses else None,
        padded_share=_padding(replayed),
        new_tokens=stats.new_tokens,
        cached_tokens=stats.cached_tokens,
        eager_by_reason=reasons,
        unused_buckets=tuple(bucket for bucket in ladder if bucket not in used) if ladder and hits else None,
        rows=tuple(rows),
    )


def _reason(tokens: int, bucket: int | None, ladder: tuple[int, ...] | None, captured: bool, startup: Startup) -> str:
    if not captured:
        # A log that begins after the captures has not shown that there were none.
        return "no_graph" if any(each.skip for each in startup.captures) or startup.disables else "unknown"
    if not ladder:
        return "unknown"
    if bucket is None:
        return "too_long"
    return "too_short" if exceeds_replay_limit(bucket, tokens, REPLAY_LIMIT_FACTOR) else "other"


def _padding(replayed: list[LengthRow]) -> float | None:
    fitting = [(row.bucket, row.tokens, row.batches) for row in replayed if row.bucket is not None]
    rows = sum(bucket * batches for bucket, _, batches in fitting)
    return sum((bucket - tokens) * batches for bucket, tokens, batches in fitting) / rows if rows else None
