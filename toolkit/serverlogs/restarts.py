"""Where one start of a server ends and the next begins."""

from __future__ import annotations

from toolkit.serverlogs import events as ev
from toolkit.serverlogs import events_vllm as vllm
from toolkit.serverlogs.nodes import of_several_nodes, same_server
from toolkit.serverlogs.startup import RankLog, Startup

_BEGINNINGS = {ev.EngineStart, ev.InitBegin, ev.InitDistributed, ev.WeightsBegin, vllm.VllmModelLoaded}


def begins_anew(startup: Startup, event: ev.Event) -> bool:
    """Whether `event` is of the start after `startup`: something begins again that had got far, or had ended."""
    if type(event) not in _BEGINNINGS:  # nearly all lines of a serving day
        return False
    if isinstance(event, ev.EngineStart):
        return _another_start(startup, event)
    if isinstance(event, ev.InitBegin | ev.InitDistributed):
        return startup.engine == "vllm" or _is_over(startup, event.rank) or _stopped_midway(startup, event.rank)
    if isinstance(event, ev.WeightsBegin):
        log = startup.ranks.get(event.rank)
        got_far = log is not None and bool(log.captures or log.pool_ends)
        over = _is_up(startup, event.rank) or (got_far and has_failed(startup))
        return startup.engine == "vllm" or over or _stopped_midway(startup, event.rank)
    if isinstance(event, vllm.VllmModelLoaded):
        log = startup.ranks.get(event.rank)
        got_far = log is not None and log.vllm.got_far
        ended = startup.ready is not None or has_failed(startup)
        return startup.engine == "sglang" or got_far or (ended and not _joins(startup, event.rank))
    return False


def _another_start(startup: Startup, event: ev.EngineStart) -> bool:
    if startup.start is None:
        # Arguments come first; whatever was said before them belongs to the server before.
        return bool(startup.ranks) or startup.ready is not None
    if of_several_nodes(event) and same_server(startup.start, event) and not (startup.ranks or startup.errors):
        return False  # the nodes of one server, behind prefixes that name none
    # Data-parallel vLLM engines print their arguments one after the other.
    return event.engine != "vllm" or event.rank == startup.start.rank or startup.ready is not None


def _is_over(startup: Startup, rank: ev.Rank) -> bool:
    return _is_up(startup, rank) or (has_failed(startup) and not _joins(startup, rank))


def _is_up(startup: Startup, rank: ev.Rank) -> bool:
    """Whether `rank` had started, so that another beginning of it is another start.

    A draft worker begins like its target did, so a second beginning alone proves nothing; and one data-parallel rank
    may be up while another still loads.
    """
    up = startup.ready is not None or any(limits.rank == rank for limits in startup.limits)
    return up and not _joins(startup, rank)


def _joins(startup: Startup, rank: ev.Rank) -> bool:
    """Whether `rank` is one more of the same server, as where the files of its ranks stand one behind another.

    It is named as those before it are, and was first seen when they had ended.
    """
    if not any(_kinds(rank)) or not any(_kinds(known) == _kinds(rank) for known in startup.ranks if known != rank):
        return False
    log = startup.ranks.get(rank)
    first = _first_line(log) if log is not None else None
    return first is None or first > _end_line(startup)


def _first_line(log: RankLog) -> int | None:
    first = (log.weights[0].begin, log.weights[0].end) if log.weights else ()
    said = (log.init, log.baseline, *first, *log.kv_pools[:1], *log.pool_ends[:1], *log.readings[:1])
    lines = [record.line for record in said if record is not None]
    return min((*lines, *(line for capture in log.captures[:1] for line in capture.lines)), default=None)


def _end_line(startup: Startup) -> int:
    """The first line by which it was up, or had failed."""
    fatal = [error for error in startup.errors if error.fatal]
    failed = (*startup.failures[:1], *startup.ooms[:1], *fatal[:1], startup.interrupted)
    ends = (startup.ready, *startup.limits[:1], *failed)
    return min((end.line for end in ends if end is not None), default=0)


def _kinds(rank: ev.Rank) -> tuple[bool, ...]:
    return tuple(number is not None for number in (rank.dp, rank.pp, rank.tp, rank.ep))


def _stopped_midway(startup: Startup, rank: ev.Rank) -> bool:
    """Whether `rank` was in the middle of loading or of a capture: what begins then again was killed before.

    A draft worker begins when its target's weights are loaded, and when a capture is over or not begun. A server whose
    arguments the log has would say them again; without, a line may be missing, or a rank may not be named.
    """
    log = startup.ranks.get(rank)
    if log is None or startup.start is not None or len(log.weights) < log.begun:
        return False
    weights = log.weights[-1] if log.weights else None
    if weights is not None and weights.begin is not None and weights.end is None:
        return not any(end.line > weights.begin.line for end in log.pool_ends)  # the line of the end is left out
    capture = startup.running.get(rank)
    if capture is None or not capture.open:
        return False
    # A capture that only bars tell of has no end line either.
    return capture.begin is not None or capture.total is None or capture.done != capture.total


def has_failed(startup: Startup) -> bool:
    """Whether something ended it: memory, a capture, a fatal error, a person. What it outlived did not."""
    fatal = [error for error in startup.errors if error.fatal]
    last = max((said[-1].line for said in (startup.failures, startup.ooms, fatal) if said), default=0)
    return startup.interrupted is not None or (last > 0 and not _went_on_after(startup, last))


def _went_on_after(startup: Startup, line: int) -> bool:
    """Whether it was up after that, or each of its ranks read its memory again: one alone may outlive another."""
    up = (*startup.limits[-1:], startup.ready)
    if any(said is not None and said.line > line for said in up):
        return True
    logs = startup.ranks.values()
    return bool(logs) and all(log.readings and log.readings[-1].line > line for log in logs)


_ONLY_SGLANG = (
    *(ev.InitBegin, ev.InitDistributed, ev.MemoryBaseline, ev.WeightsBegin, ev.WeightsEnd, ev.KvPool, ev.MambaPool),
    *(ev.MemoryPoolEnd, ev.Limits, ev.EngineTimings, ev.PrefillLine, ev.PostCaptureSizing),
    *(ev.CaptureBegin, ev.CaptureSizes, ev.CaptureEnd, ev.CaptureFailed, ev.DisableLine, ev.GateLine),
)


def engine_of(event: ev.Event) -> str:
    """`sglang` or `vllm` where the words are one engine's, else `unknown`."""
    if isinstance(event, ev.EngineStart):
        return event.engine
    if type(event).__module__ == vllm.__name__:
        return "vllm"
    of_sglang = isinstance(event, _ONLY_SGLANG)
    if isinstance(event, ev.BucketBar):
        of_sglang = event.bucket is not None or event.free_gib is not None  # vLLM's bars name neither
    return "sglang" if of_sglang else "unknown"
