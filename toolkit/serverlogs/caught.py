"""Failures that a server outlives: what it says afterwards tells that they were caught, and of which rank they were."""

from __future__ import annotations

from toolkit.serverlogs import events as ev
from toolkit.serverlogs import events_vllm as vllm
from toolkit.serverlogs.blame import LONGEST_TRACEBACK, is_rank
from toolkit.serverlogs.startup import Capture, Caught, Startup

# What only a rank says that has got on with its start, or serves. A dying one may still draw a bar, warn or compile.
_GOES_ON = frozenset(
    (
        *(ev.WeightsEnd, ev.KvPool, ev.MambaPool, ev.MemoryPoolEnd, ev.PostCaptureSizing, ev.Limits, ev.PrefillLine),
        *(ev.CaptureBegin, ev.CaptureEnd, vllm.VllmGraphProfile, vllm.VllmGraphEstimate, vllm.VllmGraphFinished),
        *(vllm.VllmAvailableKv, vllm.VllmPool, vllm.VllmStartupMemory, vllm.VllmKvTokens),
    )
)


def may_be_caught(startup: Startup, event: ev.OutOfMemory | ev.CaptureFailed, capture: Capture | None) -> None:
    """Wait for what the rank says next, unless the word before it was that the scheduler has failed."""
    fatal = startup.fatal_line is not None and event.line - startup.fatal_line <= LONGEST_TRACEBACK
    if not fatal:
        startup.keep(startup.pending.setdefault(event.rank, []), Caught(event, capture))


def is_fatal(startup: Startup, line: int) -> None:
    """A server that says it has failed caught nothing of what is open."""
    startup.fatal_line = line
    startup.pending.clear()


def goes_on(startup: Startup, event: ev.Event) -> None:
    """What was open of the rank that says `event` was caught; of every rank, where the whole server is ready."""
    if not startup.pending:
        return
    if isinstance(event, ev.ServerReady):
        if event.by != "uvicorn" or startup.engine == "vllm":
            for rank in list(startup.pending):
                _settle(startup, rank)
    elif type(event) in _GOES_ON:
        if is_rank(startup, event.rank):
            _settle(startup, event.rank)
        if not _has_several(startup) or isinstance(event, ev.PrefillLine):
            for rank in [rank for rank in startup.pending if not rank.named]:
                _settle(startup, rank)


def goes_on_inside(startup: Startup, capture: Capture) -> None:
    """`capture` itself goes on or has ended: its failures were caught, or were another's of several ranks."""
    for event in (capture.oom, capture.failed):
        if event is None or capture.survived:
            continue
        unknown = not event.rank.named and _has_several(startup)
        if not (unknown and _is_of_another(startup, event, capture)):
            _catch(startup, [Caught(event, capture)])
    capture.oom = capture.failed = None
    capture.survived = False


def _has_several(startup: Startup) -> bool:
    return len(startup.ranks) > 1


def _is_of_another(startup: Startup, event: ev.OutOfMemory | ev.CaptureFailed, capture: Capture) -> bool:
    other = startup.running.latest(capture.phase, but=capture.rank)
    if other is None or other.oom is not None or other.failed is not None:
        return False
    if isinstance(event, ev.OutOfMemory):
        other.oom = event
    else:
        other.failed = event
    for each in startup.pending.get(event.rank, ()):
        each.capture = other if each.event is event else each.capture
    return True


def _settle(startup: Startup, rank: ev.Rank) -> None:
    _catch(startup, startup.pending.pop(rank, []))


def _catch(startup: Startup, found: list[Caught]) -> None:
    for each in found:
        startup.keep(startup.caught, each)
        if each.capture is not None:
            each.capture.survived = True
    events = {id(each.event) for each in found}
    startup.ooms = [oom for oom in startup.ooms if id(oom) not in events]
    startup.failures = [failed for failed in startup.failures if id(failed) not in events]
