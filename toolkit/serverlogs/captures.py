"""Which capture of which rank a begin, a bar, an end or an error belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from toolkit.serverlogs import events as ev
from toolkit.serverlogs.blame import LONGEST_TRACEBACK, MOST_NEAR, is_rank, of_its_card, whose
from toolkit.serverlogs.caught import goes_on, goes_on_inside, is_fatal, may_be_caught
from toolkit.serverlogs.events_vllm import VllmGraphFinished
from toolkit.serverlogs.startup import (
    MOST_BUCKETS,
    BucketPoint,
    Capture,
    RankLog,
    Startup,
)

_PHASES_OF_BAR = {"prefill": ("prefill",), "compile": ("prefill",), "decode": ("decode", "verify", "extend")}
_MOST_ERRORS = 8
_MOST_BACK = 16  # captures that a rank may have left open before the one that ends


def _begin(startup: Startup, event: ev.CaptureBegin) -> None:
    log = startup.read_free(event.rank, event.line, f"{_name(event)} begin", event.free_gib)
    _add(startup, log, Capture(event.rank, event.role, event.phase, begin=event))


def _sizes(startup: Startup, event: ev.CaptureSizes) -> None:
    capture = _open_of(startup, _PHASES_OF_BAR[event.kind], event.rank)
    if capture is None:
        log = startup.log_of(event.rank)
        capture = Capture(event.rank, "target", event.kind)
        _add(startup, log, capture)
    capture.sizes = capture.sizes or event


def _end(startup: Startup, event: ev.CaptureEnd) -> None:
    log = startup.read_free(event.rank, event.line, f"{_name(event)} end", event.free_gib)
    capture = _to_end(startup, log, event)
    capture.end = event
    goes_on_inside(startup, capture)
    if startup.running.get(event.rank) is capture:
        startup.running.drop(event.rank)


def _to_end(startup: Startup, log: RankLog, event: ev.CaptureEnd) -> Capture:
    """The capture that an end line ends: its rank's own, else one that only bars told of, else a new one."""
    for capture in log.captures[: -_MOST_BACK - 1 : -1]:
        if capture.phase == event.phase and capture.role == event.role and capture.end is None and not capture.skip:
            return capture
    bare = startup.ranks.get(ev.Rank(server=event.rank.server)) if event.rank.named else None
    for capture in bare.captures[: -_MOST_BACK - 1 : -1] if bare else ():
        if capture.begin is None and capture.open and capture.phase == event.phase and bare is not None:
            bare.captures.remove(capture)
            startup.running.drop(capture.rank)
            capture.rank = event.rank
            _add(startup, log, capture)
            return capture
    capture = Capture(event.rank, event.role, event.phase)
    _add(startup, log, capture)
    return capture


def _add(startup: Startup, log: RankLog, capture: Capture) -> None:
    """A rank is in one capture at a time: a new one is the one that it is in now."""
    startup.keep(log.captures, capture)
    startup.phases_seen.add(capture.phase)
    if capture.rank in startup.ranks:
        startup.running.add(capture)


def _bar(startup: Startup, event: ev.BucketBar) -> None:
    phases = _PHASES_OF_BAR.get(event.kind)
    if phases is None:
        return
    capture = _open_of(startup, phases, event.rank) or _counts_on(startup, phases, event)
    if capture is None:
        # The last state of a bar may be printed after the end line.
        if event.done is not None and event.done == event.total and not startup.phases_seen.isdisjoint(phases):
            return
        rank = event.rank if is_rank(startup, event.rank) else startup.lowest or event.rank
        capture = Capture(rank, "target", phases[0])
        _add(startup, startup.log_of(rank), capture)
        startup.keep(startup.drawn, capture)
    capture.last_bar = event
    startup.running.touch(capture)
    points = capture.compile_points if event.kind == "compile" else capture.points
    if capture.errors and event.done is not None and event.done > (capture.done or 0):
        capture.errors.clear()  # it went on, whatever was called fatal
        startup.running.reopen(capture)
    if event.kind != "compile":
        capture.total = event.total if event.total is not None else capture.total
        capture.done = event.done if event.done is not None else capture.done
    _point(startup, points, event)


def _counts_on(startup: Startup, phases: tuple[str, ...], event: ev.BucketBar) -> Capture | None:
    """The capture that a failure seemed to have ended, and whose bar counts on all the same."""
    capture = startup.running.last_drawn(phases) if event.kind != "compile" else None
    if capture is None or capture.done is None or event.done is None or not (capture.oom or capture.failed):
        return None
    if event.done <= capture.done or event.total != capture.total:
        return None
    if is_rank(startup, event.rank) and event.rank != capture.rank:
        return None
    goes_on_inside(startup, capture)
    startup.running.reopen(capture)
    return capture


def _point(startup: Startup, points: list[BucketPoint], event: ev.BucketBar) -> None:
    """A bar shows every bucket when it begins and again when it is counted as done: one point for both."""
    last = points[-1] if points else None
    known = last is not None and (last.bucket == event.bucket if event.bucket is not None else last.done == event.done)
    if last is not None and known:
        if event.done is not None and last.done is not None and event.done > last.done and last.ended_s is None:
            last.ended_s = event.elapsed_s
        return
    if event.bucket is None and event.done is not None and event.done == event.total:
        return  # the finished bar of a kind that names no bucket
    if len(points) >= MOST_BUCKETS:
        startup.not_kept += 1
        return
    points.append(
        BucketPoint(
            event.bucket, event.line, event.free_gib, event.done, event.elapsed_s, remaining_s=event.remaining_s
        )
    )


def _gate(startup: Startup, event: ev.GateLine) -> None:
    startup.keep(startup.gates, event)
    log = startup.read_free(event.rank, event.line, "gate", event.free_gib)
    _skip(startup, log, Capture(event.rank, _whose_check(log), "prefill", skip=event))


def _disable(startup: Startup, event: ev.DisableLine) -> None:
    if event.code not in ("echo", "guard", "flag"):
        startup.keep(startup.disables, event)
        return  # said when the configuration was made, by no rank in particular
    log = startup.log_of(event.rank)
    role = event.role or _whose_check(log)
    startup.keep(startup.disables, event if role == "target" else replace(event, role=role))
    before = log.capture("prefill", role)
    if before is None or before.outcome != "skipped":
        _skip(startup, log, Capture(event.rank, role, "prefill", skip=event))


def _whose_check(log: RankLog) -> str:
    """The role that a check without one is about: the draft worker makes its own once the target has its graphs.

    Old builds captured decode graphs before prefill ones, so that theirs do not tell.
    """
    for each in log.captures:
        of_order = each.phase == "prefill" or (each.begin is not None and each.begin.wording == "new")
        if each.role == "target" and each.skip is None and of_order:
            return "draft"
    return "target"


def _skip(startup: Startup, log: RankLog, capture: Capture) -> None:
    startup.keep(log.captures, capture)
    startup.phases_seen.add(capture.phase)


def _out_of_memory(startup: Startup, event: ev.OutOfMemory) -> None:
    event = replace(event, rank=whose(startup, event, of_its_card(startup, event)))
    startup.keep(startup.ooms, event)
    capture = _interrupted(startup, event.rank)
    if capture is not None and capture.oom is None:
        capture.oom = event
        startup.running.touch(capture)
    may_be_caught(startup, event, capture)


def _failed(startup: Startup, event: ev.CaptureFailed) -> None:
    event = replace(event, rank=whose(startup, event))
    startup.keep(startup.failures, event)
    capture = _interrupted(startup, event.rank, event.phase)
    if capture is not None and capture.failed is None:
        capture.failed = event
        startup.running.touch(capture)
    may_be_caught(startup, event, capture)


# Python's words for Ctrl-C, the second where an event loop was stopped by it.
_BY_HAND = ("KeyboardInterrupt", "CancelledError")


def _error(startup: Startup, event: ev.ErrorLine) -> None:
    """Keep what went wrong. What a person's Ctrl-C brings about is no failure, and of a capture only what ended it."""
    if startup.interrupted is not None:
        return
    if event.kind in _BY_HAND and not _has_failed(startup):
        startup.interrupted = event
        return
    event = replace(event, rank=whose(startup, event))
    startup.keep(startup.errors, event)
    if event.fatal:
        is_fatal(startup, event.line)
    capture = _interrupted(startup, event.rank)
    if capture is not None and len(capture.errors) < _MOST_ERRORS and (event.fatal or _in_traceback(startup, event)):
        capture.errors.append(event)
        startup.running.doubt(capture)
        startup.running.touch(capture)


def _has_failed(startup: Startup) -> bool:
    proven = (error.fatal or _in_traceback(startup, error) for error in startup.errors[-_MOST_ERRORS:])
    return bool(startup.ooms or startup.failures) or any(proven)


def _in_traceback(startup: Startup, event: ev.ErrorLine) -> bool:
    """Whether a traceback that nothing followed leads to this line. An exception's name alone was perhaps caught."""
    first = event.line - LONGEST_TRACEBACK
    fatal = any(first <= error.line <= event.line for error in startup.errors[-MOST_NEAR:] if error.fatal)
    return fatal or any(
        max(first, startup.alive_line) < head < event.line for head in startup.tracebacks[-_MOST_ERRORS:]
    )


def went_wrong(startup: Startup) -> bool:
    """Whether something fatal was said, or an exception that nothing followed, not even somebody's Ctrl-C."""
    last = startup.alive_line if startup.interrupted is None else startup.last_line
    return any(error.fatal or error.line > last for error in startup.errors)


OF_FAILURES = frozenset((ev.ErrorLine, ev.OutOfMemory, ev.CaptureFailed, ev.TracebackHead))
"""What a start says when something went wrong; whatever else it says shows that it goes on."""


def went_on(startup: Startup, event: ev.Event) -> None:
    """A start that says anything else has gone on, and a capture whose rank does: what was raised before was caught."""
    before, startup.alive_line = startup.alive_line, event.line
    if startup.interrupted is not None and type(event) is not ev.BucketBar:  # a bar is drawn once more when it closes
        startup.interrupted = None
    goes_on(startup, event)
    if not startup.errors:
        return
    if event.rank.named:
        own = startup.running.get(event.rank)
        found = [own] if own is not None else []
    else:  # of no rank in particular; whatever was said before the last such line is settled
        found = startup.running.settle() if startup.errors[-1].line > before else []
    for capture in found:
        if capture.errors and not any(error.fatal for error in capture.errors):
            capture.errors.clear()


def _vllm_finished(startup: Startup, event: VllmGraphFinished) -> None:
    startup.keep(startup.log_of(event.rank).vllm.finished, event)
    for capture in startup.drawn:
        if capture.open:
            capture.finished = event
            startup.running.drop(capture.rank)
    startup.drawn.clear()


# --- looking for a capture --------------------------------------------------------------------------------------


def _open_of(startup: Startup, phases: tuple[str, ...], rank: ev.Rank) -> Capture | None:
    """The capture that a line without a phase of its own speaks of: of that rank, or of the lowest that captures."""
    if is_rank(startup, rank):
        own = startup.running.get(rank)
        return own if own is not None and own.open and own.phase in phases else None
    return startup.running.lowest_open(phases)


def _interrupted(startup: Startup, rank: ev.Rank, phase: str | None = None) -> Capture | None:
    """The capture that an error interrupts: of its rank if it names one, else the last that was spoken of.

    A later word of the same failure finds the capture that the first one ended. Once an engine is up, an error
    interrupts no capture of its ranks, whatever the log left open.
    """
    if not is_rank(startup, rank):
        return startup.running.latest(phase)
    return None if startup.running.is_up(rank) else startup.running.get(rank)


def _name(event: ev.CaptureBegin | ev.CaptureEnd) -> str:
    return f"{event.role} {event.phase} capture"


CAPTURE_HANDLERS: dict[type[ev.Event], Callable[[Startup, Any], None]] = {
    ev.CaptureBegin: _begin,
    ev.CaptureSizes: _sizes,
    ev.CaptureEnd: _end,
    ev.BucketBar: _bar,
    ev.GateLine: _gate,
    ev.DisableLine: _disable,
    ev.OutOfMemory: _out_of_memory,
    ev.CaptureFailed: _failed,
    ev.ErrorLine: _error,
    VllmGraphFinished: _vllm_finished,
}
