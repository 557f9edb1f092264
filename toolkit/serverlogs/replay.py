"""What prefills did with the graphs: replayed or eager, by length, with the reason that the ladder gives.

Rules of SGLang 0.5.15 to 0.5.23 (executed): tokens beyond the largest bucket run eager; since 0.5.16 also when the
smallest bucket that holds them is more than twice as large. Other reasons (a cached prefix, logprobs, images) leave
no trace in the log.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.ladder import choose_bucket, exceeds_replay_limit
from toolkit.serverlogs.capture_report import capture_report
from toolkit.serverlogs.chosen import resolved_off
from toolkit.serverlogs.ledger import first_prefill
from toolkit.serverlogs.prefill_stats import MOST_LENGTHS
from toolkit.serverlogs.startup import Capture, Startup
from toolkit.serverlogs.versions import replay_limit_factor

REASONS = {
    "no_graph": "because there is no prefill graph",
    "too_long": "because they are longer than the largest bucket",
    "too_short": "because the smallest bucket that holds them is more than twice as large",
    "empty": "as they compute no token",
    "other": "although a bucket fits (a cached prefix, images, logprobs, ...)",
    "unknown": "for reasons not known, as the log does not show the buckets",
    "not_kept": f"of lengths that are not looked at, as there are over {MOST_LENGTHS:,} different ones",
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
        padded_share: padding in the rows that replays computed, 0 to 1; None when the ladder is not known, or not all
            lengths were kept.
        new_tokens: tokens computed.
        cached_tokens: tokens found in the prefix cache.
        eager_by_reason: batches by key of `REASONS`.
        unused_buckets: buckets of the ladder that no replayed batch used; None for the same reasons.
        rows: by length; of a log with more than `prefill_stats.MOST_LENGTHS` different ones, those that came first.
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


def without_graph(startup: Startup) -> bool:
    """Whether the log shows that the target has no prefill graph: a line or the arguments say so, or it is silent."""
    if first_prefill(startup) is not None:
        return False
    skipped = any(each.role == "target" and each.skip is not None for each in startup.captures)
    disabled = any(line.role != "draft" for line in startup.disables)
    return skipped or disabled or resolved_off(startup) or silently_without_graph(startup)


def silently_without_graph(startup: Startup) -> bool:
    """Whether the whole stretch in which a target captures is in the log, and no prefill capture nor word about one.

    A log that begins late does not show what came before: the begin line of a decode capture (new builds make it
    after the prefill one) or the end of the pools shows that nothing is missing.
    """
    disabled = any(line.role != "draft" for line in startup.disables)
    told = disabled or any(each.phase == "prefill" and each.role == "target" for each in startup.captures)
    if told or not startup.limits or startup.prefills.count(True):
        return False
    decodes = decode_captures(startup)
    if decodes:
        return all(each.begin is not None for each in decodes)
    began = any(each.phase in ("decode", "verify") for each in startup.captures)
    return not began and any(log.pool_ends for log in startup.ranks.values())


def decode_captures(startup: Startup) -> list[Capture]:
    """The captures of decode graphs that came to their end."""
    return [each for each in startup.captures if each.phase in ("decode", "verify") and each.end is not None]


def replay_stats(startup: Startup, version: str | None = None) -> ReplayStats | None:
    """What prefills did; None when the log has none. `version` is the release that wrote it, when known."""
    stats = startup.prefills
    if not stats.batches:
        return None
    ladder, no_graph = prefill_ladder(startup), without_graph(startup)
    factor = replay_limit_factor(startup, version)
    rows = []
    for (tokens, graph), count in sorted(stats.lengths.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        bucket = choose_bucket(ladder, tokens) if ladder else None
        reason = None
        if graph is False:
            reason = "no_graph" if no_graph else _reason(tokens, bucket, ladder, factor)
        rows.append(LengthRow(tokens, graph, count.batches, bucket, reason, count.first_line))
    replayed = [row for row in rows if row.graph is True]
    reasons: dict[str, int] = {}
    for row in rows:
        if row.reason is not None:
            reasons[row.reason] = reasons.get(row.reason, 0) + row.batches
    hits, misses = stats.count(True), stats.count(False)
    if misses > sum(reasons.values()):
        beyond = "no_graph" if no_graph else "not_kept"
        reasons[beyond] = reasons.get(beyond, 0) + misses - sum(reasons.values())
    whole = ladder is not None and not stats.not_kept
    used = {row.bucket for row in replayed}
    return ReplayStats(
        startup=startup.index,
        batches=stats.batches,
        before_ready=stats.before_ready,
        replayed=hits,
        eager=misses,
        hit_rate=hits / (hits + misses) if hits + misses else None,
        padded_share=_padding(replayed) if whole else None,
        new_tokens=stats.new_tokens,
        cached_tokens=stats.cached_tokens,
        eager_by_reason=reasons,
        unused_buckets=tuple(bucket for bucket in ladder or () if bucket not in used) if whole and hits else None,
        rows=tuple(rows),
    )


def _reason(tokens: int, bucket: int | None, ladder: tuple[int, ...] | None, factor: int | None) -> str:
    if tokens < 1:
        return "empty"
    if not ladder:
        return "unknown"
    if bucket is None:
        return "too_long"
    return "too_short" if exceeds_replay_limit(bucket, tokens, factor) else "other"


def _padding(replayed: list[LengthRow]) -> float | None:
    fitting = [(row.bucket, row.tokens, row.batches) for row in replayed if row.bucket is not None]
    rows = sum(bucket * batches for bucket, _, batches in fitting)
    return sum((bucket - tokens) * batches for bucket, tokens, batches in fitting) / rows if rows else None
