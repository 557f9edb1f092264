"""Who took which memory in a start, rank by rank: each reading of free memory against the one before it.

What a line itself explains (weights, pools, a capture's usage) is set beside what really went; the rest is a gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.serverlogs.events import KvPool
from toolkit.serverlogs.startup import Capture, FreeReading, RankLog, Startup

_DIGITS = 4  # logs print hundredths; subtraction adds noise far behind them


@dataclass(frozen=True, slots=True)
class Stage:
    """One reading of free memory.

    Attributes:
        stage: for example `weights end`, `pools end`, `target prefill capture begin`.
        line: of the reading.
        free_gib: free memory of the device then.
        taken_gib: less than at the reading before; negative when memory came back; None at the first reading.
        said_gib: how much of that the lines in between account for; None when none of them does.
        gap_gib: what they do not account for: static buffers, workspaces, communication, other processes.
    """

    stage: str
    line: int
    free_gib: float
    taken_gib: float | None
    said_gib: float | None
    gap_gib: float | None


@dataclass(frozen=True, slots=True)
class RankLedger:
    """The memory of one rank, in GiB; None where the log does not say.

    Attributes:
        startup: number of the start, from 0.
        rank: label of the rank.
        server: container or pod, empty when the log has one only.
        baseline_gib: free before weights, of which `mem_fraction_static` is the share that weights and pools may take.
        weights_gib: of target and draft models together, as printed.
        kv_cache_gib: of target and draft pools together.
        kv_cache_tokens: slots of the target's pool.
        state_gib: recurrent state of a hybrid model.
        free_after_weights_gib: after the last model was loaded.
        free_after_pools_gib: after the last pool.
        free_before_capture_gib: when the first capture began.
        pools_to_capture_gib: what went in between without a line of its own.
        prefill_graph_gib: printed usage of prefill captures, target and draft.
        other_graphs_gib: of decode, verify and extend captures.
        free_at_end_gib: the last reading, once every capture has ended.
        stages: every reading in order.
    """

    startup: int
    rank: str
    server: str
    baseline_gib: float | None
    weights_gib: float | None
    kv_cache_gib: float | None
    kv_cache_tokens: int | None
    state_gib: float | None
    free_after_weights_gib: float | None
    free_after_pools_gib: float | None
    free_before_capture_gib: float | None
    pools_to_capture_gib: float | None
    prefill_graph_gib: float | None
    other_graphs_gib: float | None
    free_at_end_gib: float | None
    stages: tuple[Stage, ...]


def rank_ledgers(startup: Startup) -> list[RankLedger]:
    """One ledger per rank that said anything about memory, in the order of ranks."""
    found = [_ledger(startup, log) for log in startup.sorted_ranks]
    return [ledger for ledger in found if ledger.stages or ledger.weights_gib or ledger.kv_cache_gib]


def tightest(ledgers: list[RankLedger] | tuple[RankLedger, ...]) -> RankLedger | None:
    """The rank with the least free memory before its capture (else after its pools): the one to plan with."""

    def free(ledger: RankLedger) -> float:
        for value in (ledger.free_before_capture_gib, ledger.free_after_pools_gib, ledger.free_at_end_gib):
            if value is not None:
                return value
        return float("inf")

    return min(ledgers, key=free, default=None)


def backed_first_gib(startup: Startup, ledger: RankLedger) -> float | None:
    """GiB of the KV pool that were backed when the pools ended, None where the log does not say.

    With post-capture sizing that is none: the pools end with a bound of addresses, and memory follows the captures.
    """
    pools = [pool for log in startup.ranks.values() if log.rank.label == ledger.rank for pool in log.kv_pools]
    first = [pool.size_gib for pool in pools if not (pool.after_capture or pool.upper_bound)]
    return ledger.kv_cache_gib if len(first) == len(pools) else _sum(first) or 0.0


def _ledger(startup: Startup, log: RankLog) -> RankLedger:
    begins = [capture.begin for capture in log.captures if capture.begin is not None and capture.begin.free_gib]
    before = min(begins, key=lambda begin: begin.line, default=None)
    gate = next((capture.skip for capture in log.captures if capture.skip is not None), None)
    free_before = before.free_gib if before else getattr(gate, "free_gib", None)
    pools = log.pool_ends[-1].free_gib if log.pool_ends else None
    return RankLedger(
        startup=startup.index,
        rank=log.rank.label,
        server=startup.server,
        baseline_gib=_baseline(log),
        weights_gib=_weights(log),
        kv_cache_gib=_kv_cache(log),
        kv_cache_tokens=_tokens(startup, log),
        state_gib=_sum([pool.size_gib for pool in log.mamba_pools]),
        free_after_weights_gib=next(
            (one.end.free_gib for one in reversed(log.weights) if one.end and one.end.free_gib is not None), None
        ),
        free_after_pools_gib=pools,
        free_before_capture_gib=free_before,
        pools_to_capture_gib=_less(pools, free_before),
        prefill_graph_gib=_graphs(log, prefill=True),
        other_graphs_gib=_graphs(log, prefill=False),
        free_at_end_gib=log.readings[-1].free_gib if log.readings and _came_to_an_end(log) else None,
        stages=_stages(log),
    )


def _baseline(log: RankLog) -> float | None:
    """Free before weights: B of mem_fraction_static is read just before they are loaded."""
    for one in log.weights[:1]:
        if one.begin is not None and one.begin.free_gib is not None:
            return one.begin.free_gib
    if log.baseline is not None and log.baseline.free_gib is not None:
        return log.baseline.free_gib
    return log.vllm.startup.free_gib if log.vllm.startup else None


def _weights(log: RankLog) -> float | None:
    ends = [one.end.usage_gib for one in log.weights if one.end is not None]
    return _sum([*ends, *(one.gib for one in log.vllm.loaded)])


def _came_to_an_end(log: RankLog) -> bool:
    """Whether every capture that began has ended, so that the last reading is what is left for serving."""
    outcomes = {each.outcome for each in log.captures}
    return "captured" in outcomes and outcomes <= {"captured", "skipped"}


def _kv_cache(log: RankLog) -> float | None:
    if log.vllm.available_kv is not None:
        return log.vllm.available_kv.gib
    return _sum([pool.size_gib for pool in _final_pools(log)])


def _final_pools(log: RankLog) -> list[KvPool]:
    after = [pool for pool in log.kv_pools if pool.after_capture]
    kept = after or [pool for pool in log.kv_pools if not pool.upper_bound]
    return kept


def _tokens(startup: Startup, log: RankLog) -> int | None:
    target = [pool.tokens for pool in log.kv_pools if log.role_of(pool) == "target" and not pool.upper_bound]
    known = [tokens for tokens in target if tokens is not None]
    if known:
        return known[-1]
    of_vllm = [each.tokens for each in startup.vllm_kv_tokens if each.tokens is not None]
    return of_vllm[-1] if of_vllm else None


def _graphs(log: RankLog, prefill: bool) -> float | None:
    used = [each.end.usage_gib for each in log.captures if each.end and (each.phase == "prefill") is prefill]
    if not prefill and not used and log.vllm.pool is not None:
        return log.vllm.pool.actual_gib
    return _sum(used)


def _stages(log: RankLog) -> tuple[Stage, ...]:
    said = _said(log)
    found: list[Stage] = []
    last: FreeReading | None = None
    for reading in sorted(log.readings, key=lambda each: each.line):
        taken = round(last.free_gib - reading.free_gib, _DIGITS) if last is not None else None
        between = [gib for line, gib in said if (last.line if last else 0) < line <= reading.line]
        explained = round(sum(between), _DIGITS) if between and last is not None else None
        gap = round(taken - (explained or 0.0), _DIGITS) if taken is not None else None
        found.append(Stage(reading.what, reading.line, reading.free_gib, taken, explained, gap))
        last = reading
    return tuple(found)


def _said(log: RankLog) -> list[tuple[int, float]]:
    """(line, GiB) of everything that a line accounts for itself."""
    weights = [(one.end.line, one.end.usage_gib) for one in log.weights if one.end is not None]
    pools = [(pool.line, pool.size_gib) for pool in log.kv_pools if not pool.upper_bound]
    states = [(pool.line, pool.size_gib) for pool in log.mamba_pools]
    captures = [(each.end.line, each.end.usage_gib) for each in log.captures if each.end is not None]
    return [(line, gib) for line, gib in (*weights, *pools, *states, *captures) if gib is not None]


def _less(before: float | None, after: float | None) -> float | None:
    return round(before - after, _DIGITS) if before is not None and after is not None else None


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), _DIGITS) if known else None


def first_prefill(startup: Startup) -> Capture | None:
    """The target's prefill capture of the lowest rank that captured one, else of one that tried."""
    found = [each for each in startup.captures if each.phase == "prefill" and each.role == "target" and not each.skip]
    return next((each for each in found if each.outcome == "captured"), found[0] if found else None)
