"""Events into starts: which server, which rank, which capture a line belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from toolkit.serverlogs import events as ev
from toolkit.serverlogs import events_vllm as vllm
from toolkit.serverlogs.captures import CAPTURE_HANDLERS, OF_FAILURES, went_on
from toolkit.serverlogs.lines import Counters, Source
from toolkit.serverlogs.parse import parse
from toolkit.serverlogs.startup import (
    MOST_LENGTHS,
    MOST_STARTUPS,
    LengthCount,
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
    """Takes events one by one. Servers of one file are told apart by container or pod, restarts by what repeats."""

    def __init__(self) -> None:
        self.dropped = 0
        self._kept: list[Startup] = []
        self._current: dict[str, Startup] = {}
        self._count = 0

    def add(self, event: ev.Event) -> None:
        """Put one event where it belongs."""
        startup = self._current.get(event.rank.server)
        if startup is None or _begins_anew(startup, event):
            startup = self._open(event)
        startup.last_line = event.line
        if type(event) not in OF_FAILURES:
            went_on(startup, event)
        if startup.engine == "unknown":
            startup.engine = _engine_of(event)
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(startup, event)

    def finished(self) -> list[Startup]:
        """All starts, first line first."""
        return list(self._kept)

    def _open(self, event: ev.Event) -> Startup:
        startup = Startup(event.rank.server, self._count, first_line=event.line)
        self._count += 1
        self._kept.append(startup)
        if len(self._kept) > MOST_STARTUPS:
            del self._kept[MOST_STARTUPS // 2]
            self.dropped += 1
        if len(self._current) < MOST_STARTUPS or event.rank.server in self._current:
            self._current[event.rank.server] = startup
        return startup


# --- where one start ends and the next begins -----------------------------------------------------------------


def _begins_anew(startup: Startup, event: ev.Event) -> bool:
    if isinstance(event, ev.EngineStart):
        return _another_start(startup, event)
    if isinstance(event, ev.InitBegin | ev.InitDistributed):
        return startup.engine == "vllm" or _is_up(startup, event.rank) or _has_failed(startup)
    if isinstance(event, ev.WeightsBegin):
        log = startup.ranks.get(event.rank)
        got_far = log is not None and bool(log.captures or log.pool_ends)
        return startup.engine == "vllm" or _is_up(startup, event.rank) or (got_far and _has_failed(startup))
    if isinstance(event, vllm.VllmModelLoaded):
        log = startup.ranks.get(event.rank)
        finished = log is not None and log.vllm.pool is not None
        return startup.engine == "sglang" or finished or startup.ready is not None or _has_failed(startup)
    return False


def _another_start(startup: Startup, event: ev.EngineStart) -> bool:
    if startup.start is None:
        # Arguments come first; whatever was said before them belongs to the server before.
        return bool(startup.ranks) or startup.ready is not None
    # Data-parallel vLLM engines print their arguments one after the other.
    return event.engine != "vllm" or event.rank == startup.start.rank or startup.ready is not None


def _is_up(startup: Startup, rank: ev.Rank) -> bool:
    """Whether `rank` had started, so that another beginning of it is another start.

    A draft worker begins like its target did, so a second beginning alone proves nothing; and one data-parallel rank
    may be up while another still loads.
    """
    return startup.ready is not None or any(limits.rank == rank for limits in startup.limits)


def _has_failed(startup: Startup) -> bool:
    return bool(startup.failures or startup.ooms or startup.interrupted) or any(error.fatal for error in startup.errors)


_ONLY_SGLANG = (
    *(ev.InitBegin, ev.InitDistributed, ev.MemoryBaseline, ev.WeightsBegin, ev.WeightsEnd, ev.KvPool, ev.MambaPool),
    *(ev.MemoryPoolEnd, ev.Limits, ev.EngineTimings, ev.PrefillLine, ev.PostCaptureSizing),
    *(ev.CaptureBegin, ev.CaptureSizes, ev.CaptureEnd, ev.CaptureFailed, ev.DisableLine, ev.GateLine),
)


def _engine_of(event: ev.Event) -> str:
    if isinstance(event, ev.EngineStart):
        return event.engine
    if type(event).__module__ == vllm.__name__:
        return "vllm"
    of_sglang = isinstance(event, _ONLY_SGLANG)
    if isinstance(event, ev.BucketBar):
        of_sglang = event.bucket is not None or event.free_gib is not None  # vLLM's bars name neither
    return "sglang" if of_sglang else "unknown"


# --- what each event does -------------------------------------------------------------------------------------


def _engine_start(startup: Startup, event: ev.EngineStart) -> None:
    startup.engine = event.engine
    if startup.start is None:
        startup.start = event


def _init_begin(startup: Startup, event: ev.InitBegin) -> None:
    startup.log_of(event.rank)


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


def _timings(startup: Startup, event: ev.EngineTimings) -> None:
    startup.timings = startup.timings or event


def _ready(startup: Startup, event: ev.ServerReady) -> None:
    # Uvicorn says so before an SGLang server has run its warm-up.
    if event.by == "uvicorn" and startup.engine != "vllm":
        return
    startup.ready = startup.ready or event


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
