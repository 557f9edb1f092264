"""Events into starts: which server, which rank, which capture a line belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from toolkit.serverlogs import events as ev
from toolkit.serverlogs import events_vllm as vllm
from toolkit.serverlogs.captures import CAPTURE_HANDLERS, OF_FAILURES, went_on
from toolkit.serverlogs.lines import Counters, Source
from toolkit.serverlogs.nodes import join_nodes
from toolkit.serverlogs.parse import parse
from toolkit.serverlogs.prefill_stats import MOST_LENGTHS, LengthCount
from toolkit.serverlogs.restarts import begins_anew, engine_of
from toolkit.serverlogs.startup import (
    MOST_STARTUPS,
    ServerLog,
    Startup,
    Weights,
)


def read_log(source: Source) -> ServerLog:
    """Every start that a log holds.

    Args:
        source: a path, a text, bytes, an open stream or an iterable of lines (see `lines.open_source`).

    Raises:
        InvalidInput: the path cannot be read. What the log holds never raises.
    """
    counters = Counters()
    starts = Starts()
    for event in parse(source, counters):
        starts.add(event)
    return ServerLog(starts.finished(), counters, starts.dropped)


def fold(events: Iterable[ev.Event]) -> list[Startup]:
    """The starts that `events`, in the order of their lines, belong to."""
    starts = Starts()
    for event in events:
        starts.add(event)
    return starts.finished()


class Starts:
    """Takes events one by one. Servers of one file are told apart by container or pod, restarts by what repeats.

    Where several servers share a name (two engines of one Ray cluster), the process that a prefix names tells them
    apart: a rank has one process, and so have the arguments. Each server is then a lane of that name.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._kept: list[Startup] = []
        self._current: dict[Lane, Startup] = {}
        self._lanes: dict[str, int] = {}
        self._lane_of: dict[tuple[str, str], Lane] = {}
        self._count = 0

    def add(self, event: ev.Event) -> None:
        """Put one event where it belongs."""
        rank = event.rank
        lane = self._lane(event) if rank.process or self._lanes else (rank.server, 0)
        startup = self._current.get(lane)
        if startup is None or begins_anew(startup, event):
            startup = self._open(event, lane)
        startup.last_line = event.line
        if type(event) not in OF_FAILURES:
            went_on(startup, event)
        if startup.engine == "unknown":
            startup.engine = engine_of(event)
        if rank.process:
            _own(startup, event)
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(startup, event)

    def finished(self) -> list[Startup]:
        """All starts, first line first. Those of one name that ran beside each other are called by their process.

        What other programs beside the servers said (errors of theirs) is no start. Nodes of one server, of which each
        has a lane of its own until here, are put together.
        """
        self._kept = [startup for startup in self._kept if startup.of_an_engine] or self._kept
        for number, startup in enumerate(self._kept if not self.dropped else ()):
            startup.index = number
        self._kept = join_nodes(self._kept)
        for name, lanes in self._lanes.items():
            of_name = [startup for startup in self._kept if startup.server == name] if lanes else []
            for startup in _beside_each_other(of_name):
                startup.server = f"{name} {startup.process}".strip()
        return list(self._kept)

    def _lane(self, event: ev.Event) -> Lane:
        """The lane of an event: that of its process, else the newest of its server that has no other in its place."""
        server, process = event.rank.server, event.rank.process
        newest = self._lanes.get(server, 0)
        if not process:
            return server, newest
        known = self._lane_of.get((server, process))
        if known is not None and not _of_another(self._current.get(known), event):
            return known
        if not isinstance(event, _OF_ONE_PROCESS):
            return known or (server, newest)
        lane = next(
            (
                (server, number)
                for number in range(newest, max(newest - _MOST_LANES, -1), -1)
                if not _of_another(self._current.get((server, number)), event)
            ),
            (server, newest + 1),
        )
        self._lanes[server] = max(newest, lane[1])
        if len(self._lane_of) < _MOST_PROCESSES:
            self._lane_of[server, process] = lane
        return lane

    def _open(self, event: ev.Event, lane: Lane) -> Startup:
        startup = Startup(event.rank.server, self._count, first_line=event.line)
        self._count += 1
        self._kept.append(startup)
        if len(self._kept) > MOST_STARTUPS:
            del self._kept[MOST_STARTUPS // 2]
            self.dropped += 1
        if len(self._current) < MOST_STARTUPS or lane in self._current:
            self._current[lane] = startup
        return startup


# --- which process a start belongs to ---------------------------------------------------------------------------

Lane = tuple[str, int]
_MOST_LANES, _MOST_PROCESSES = 64, 4_096
# Only one process of a server says these of one rank; its arguments are said by one process.
_OF_ONE_PROCESS = (
    *(ev.EngineStart, ev.InitBegin, ev.InitDistributed, ev.MemoryBaseline, ev.WeightsBegin, ev.WeightsEnd, ev.KvPool),
    *(ev.MemoryPoolEnd, ev.CaptureBegin, ev.CaptureEnd, vllm.VllmModelLoaded, vllm.VllmAvailableKv),
)


def _of_another(startup: Startup | None, event: ev.Event) -> bool:
    """Whether another process than the event's has its place in `startup`."""
    if startup is None or not isinstance(event, _OF_ONE_PROCESS):
        return False
    if isinstance(event, ev.EngineStart):
        return startup.start is not None and startup.start.rank.process not in ("", event.rank.process)
    return startup.processes.get(event.rank, event.rank.process) != event.rank.process


def _own(startup: Startup, event: ev.Event) -> None:
    startup.process = startup.process or event.rank.process
    if isinstance(event, _OF_ONE_PROCESS) and not isinstance(event, ev.EngineStart):
        startup.processes.setdefault(event.rank, event.rank.process)


def _beside_each_other(startups: list[Startup]) -> list[Startup]:
    """Starts of which one began before another had ended: no restarts, but servers of their own."""
    ordered = sorted(startups, key=lambda startup: startup.first_line)
    beside: dict[int, Startup] = {}
    longest: Startup | None = None
    for startup in ordered:
        if longest is not None and startup.first_line < longest.last_line and startup.process != longest.process:
            beside |= {longest.index: longest, startup.index: startup}
        if longest is None or startup.last_line > longest.last_line:
            longest = startup
    processes = {startup.process for startup in beside.values()}
    return [startup for startup in startups if startup.process in processes]


# --- what each event does -------------------------------------------------------------------------------------


def _engine_start(startup: Startup, event: ev.EngineStart) -> None:
    startup.engine = event.engine
    if startup.start is None:
        startup.start = event


def _init_begin(startup: Startup, event: ev.InitBegin) -> None:
    startup.log_of(event.rank).begun += 1


def _init(startup: Startup, event: ev.InitDistributed) -> None:
    log = startup.log_of(event.rank)
    log.init = log.init or event


def _baseline(startup: Startup, event: ev.MemoryBaseline) -> None:
    log = startup.read_free(event.rank, event.line, "baseline", event.free_gib)
    log.baseline = log.baseline or event


def _weights_begin(startup: Startup, event: ev.WeightsBegin) -> None:
    log = startup.read_free(event.rank, event.line, "weights begin", event.free_gib)
    startup.keep(log.weights, Weights("draft" if log.weights else "target", begin=event))


def _weights_end(startup: Startup, event: ev.WeightsEnd) -> None:
    log = startup.read_free(event.rank, event.line, "weights end", event.free_gib)
    if log.weights and log.weights[-1].end is None:
        log.weights[-1].end = event
    else:
        startup.keep(log.weights, Weights("draft" if log.weights else "target", end=event))


def _kv_pool(startup: Startup, event: ev.KvPool) -> None:
    startup.keep(startup.read_free(event.rank, event.line, "KV pool", event.free_gib).kv_pools, event)


def _mamba_pool(startup: Startup, event: ev.MambaPool) -> None:
    startup.keep(startup.log_of(event.rank).mamba_pools, event)


def _pool_end(startup: Startup, event: ev.MemoryPoolEnd) -> None:
    startup.keep(startup.read_free(event.rank, event.line, "pools end", event.free_gib).pool_ends, event)


def _limits(startup: Startup, event: ev.Limits) -> None:
    if event.free_gib is not None:  # the line is the scheduler's: no reason to make a rank
        startup.read_free(event.rank, event.line, "limits", event.free_gib)
    startup.keep(startup.limits, event)
    startup.running.came_up(event.rank)


def _timings(startup: Startup, event: ev.EngineTimings) -> None:
    startup.timings = startup.timings or event


def _ready(startup: Startup, event: ev.ServerReady) -> None:
    # Uvicorn says so before an SGLang server has run its warm-up.
    if event.by == "uvicorn" and startup.engine != "vllm":
        return
    startup.ready = startup.ready or event
    startup.running.came_up()


def _prefill(startup: Startup, event: ev.PrefillLine) -> None:
    stats, cached = startup.prefills, event.cached_token or 0
    stats.batches += 1
    if startup.ready is None:
        stats.before_ready += 1
    stats.new_tokens += event.new_token
    stats.cached_tokens += cached
    stats.by_graph[event.graph] = stats.by_graph.get(event.graph, 0) + 1
    stats.first_line.setdefault(event.graph, event.line)
    key = (event.new_token, event.graph)
    known = stats.lengths.get(key)
    if known is not None:
        known.batches += 1
        known.cached_tokens += cached
    elif len(stats.lengths) < MOST_LENGTHS:
        stats.lengths[key] = LengthCount(1, event.line, cached)
    else:
        stats.not_kept += 1


def _listed(name: str) -> Callable[[Startup, Any], None]:
    def keep(startup: Startup, event: ev.Event) -> None:
        startup.keep(getattr(startup, name), event)

    return keep


def _traceback(startup: Startup, event: ev.TracebackHead) -> None:
    startup.keep(startup.tracebacks, event.line)


def _vllm(name: str) -> Callable[[Startup, Any], None]:
    def keep(startup: Startup, event: ev.Event) -> None:
        memory = startup.log_of(event.rank).vllm
        kept = getattr(memory, name)
        if isinstance(kept, list):
            startup.keep(kept, event)
        elif kept is None:
            setattr(memory, name, event)

    return keep


def _vllm_tokens(startup: Startup, event: vllm.VllmKvTokens) -> None:
    startup.keep(startup.vllm_kv_tokens, event)


_HANDLERS: dict[type[ev.Event], Callable[[Startup, Any], None]] = {
    ev.EngineStart: _engine_start,
    ev.InitBegin: _init_begin,
    ev.InitDistributed: _init,
    ev.MemoryBaseline: _baseline,
    ev.WeightsBegin: _weights_begin,
    ev.WeightsEnd: _weights_end,
    ev.KvPool: _kv_pool,
    ev.MambaPool: _mamba_pool,
    ev.MemoryPoolEnd: _pool_end,
    ev.Limits: _limits,
    ev.EngineTimings: _timings,
    ev.ServerReady: _ready,
    ev.PrefillLine: _prefill,
    ev.PostCaptureSizing: _listed("post_capture"),
    ev.Compiling: _listed("compiling"),
    ev.Notice: _listed("notices"),
    ev.TracebackHead: _traceback,
    vllm.VllmModelLoaded: _vllm("loaded"),
    vllm.VllmGraphProfile: _vllm("profile"),
    vllm.VllmGraphEstimate: _vllm("estimate"),
    vllm.VllmAvailableKv: _vllm("available_kv"),
    vllm.VllmPool: _vllm("pool"),
    vllm.VllmStartupMemory: _vllm("startup"),
    vllm.VllmKvTokens: _vllm_tokens,
    **CAPTURE_HANDLERS,
}
