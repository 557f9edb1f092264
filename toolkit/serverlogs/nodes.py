"""One server on several machines: each of its nodes prints the arguments and speaks for its own ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.serverlogs.events import EngineStart, Rank
from toolkit.serverlogs.prefill_stats import PrefillStats
from toolkit.serverlogs.startup import Startup

# What the nodes of one server have in common. Each prints its own `node_rank` and what it worked out for its devices.
_SAME = ("model_path", "tp_size", "pp_size", "dp_size", "nnodes", "dist_init_addr")
_SIZES = ("tp_size", "pp_size", "dp_size")
_LISTS = (
    *("disables", "gates", "ooms", "failures", "errors", "compiling", "notices", "post_capture", "limits"),
    *("vllm_kv_tokens", "drawn"),
)


def join_nodes(startups: list[Startup]) -> list[Startup]:
    """The starts of `startups` (in the order they began), those of the nodes of one server put together.

    Nodes have ranks of their own: starts with a rank in common are two replicas. A server of several nodes is called
    as the first of them that spoke.
    """
    kept: list[Startup] = []
    nodes: dict[int, set[Rank]] = {}
    whose: dict[int, set[tuple[str, str]]] = {}
    for number, startup in enumerate(startups):
        ranks, process = _numbers(startup), _process(startup)
        found = [
            each
            for each in kept
            if process not in whose[each.index] and _is_a_node(each, startup, nodes[each.index], ranks)
        ]
        # Side by side in the file, else as where the files of the nodes stand one behind another.
        beside = [each for each in found if startup.first_line < each.last_line]
        first = next(iter(beside or found), None)
        if first is None:
            startup.index -= number - len(kept)
            kept.append(startup)
            nodes[startup.index], whose[startup.index] = ranks, {process}
        else:
            _put_together(first, startup)
            nodes[first.index] |= ranks
            whose[first.index].add(process)
    return kept


def same_server(first: EngineStart, other: EngineStart) -> bool:
    """Whether two processes with these arguments may be nodes of one server."""
    return all(first.values.get(name) == other.values.get(name) for name in _SAME)


def of_several_nodes(start: EngineStart) -> bool:
    """Whether these are the arguments of a server of several nodes."""
    return _whole(start.values, "nnodes") > 1


def _numbers(startup: Startup) -> set[Rank]:
    return {Rank(rank.dp, rank.pp, rank.tp, rank.ep) for rank in startup.ranks}


def _process(startup: Startup) -> tuple[str, str]:
    rank = startup.start.rank if startup.start is not None else Rank()
    return rank.server, rank.process


def _is_a_node(first: Startup, other: Startup, known: set[Rank], ranks: set[Rank]) -> bool:
    """Whether `other` is one more node of the server `first`: the arguments leave room for it, and so do the ranks."""
    if first.start is None or other.start is None or first.start.engine != "sglang":
        return False
    values = first.start.values
    if not same_server(first.start, other.start):
        return False
    if not known or not ranks or known & ranks or Rank() in known | ranks:
        return False
    room = 1
    for name in _SIZES:
        room *= _whole(values, name)
    several = of_several_nodes(first.start) or ("nnodes" not in values and other.first_line < first.last_line)
    return several and len(known) + len(ranks) <= room


def _whole(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 1


def _put_together(first: Startup, other: Startup) -> None:
    """Add what `other` says to `first`."""
    first.ranks.update(other.ranks)
    first.processes.update(other.processes)
    for name in _LISTS:
        getattr(first, name).extend(getattr(other, name))
    for name in _LISTS[:-1]:
        getattr(first, name).sort(key=lambda event: event.line)
    first.caught = sorted(first.caught + other.caught, key=lambda each: each.event.line)
    first.tracebacks = sorted(first.tracebacks + other.tracebacks)
    first.phases_seen |= other.phases_seen
    _add_prefills(first.prefills, other.prefills, other.ready is not None)
    first.ready = first.ready or other.ready
    first.timings = first.timings or other.timings
    first.interrupted = first.interrupted or other.interrupted
    first.not_kept += other.not_kept
    first.alive_line = max(first.alive_line, other.alive_line)
    first.last_line = max(first.last_line, other.last_line)


def _add_prefills(stats: PrefillStats, other: PrefillStats, told_ready: bool) -> None:
    stats.batches += other.batches
    if told_ready:  # only the first node says when the server is up
        stats.before_ready += other.before_ready
    stats.new_tokens += other.new_tokens
    stats.cached_tokens += other.cached_tokens
    stats.not_kept += other.not_kept
    for graph, count in other.by_graph.items():
        stats.by_graph[graph] = stats.by_graph.get(graph, 0) + count
        stats.first_line[graph] = min(stats.first_line.get(graph, other.first_line[graph]), other.first_line[graph])
    for key, length in other.lengths.items():
        known = stats.lengths.setdefault(key, length)
        if known is not length:
            known.batches += length.batches
            known.cached_tokens += length.cached_tokens
            known.first_line = min(known.first_line, length.first_line)
