"""Which capture of which rank a begin, a bar, an end or an error belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from toolkit.serverlogs import events as ev
from toolkit.serverlogs.events_vllm import VllmGraphFinished
from toolkit.serverlogs.startup import (
    MOST_BUCKETS,
    BucketPoint,
    Capture,
    RankLog,
    Startup,
    lowest_rank,
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
    if startup.running.get(event.rank) is capture:
        del startup.running[event.rank]


def _to_end(startup: Startup, log: RankLog, event: ev.CaptureEnd) -> Capture:
    """The capture that an end line ends: its rank's own, else one that only bars told of, else a new one."""
    for capture in log.captures[: -_MOST_BACK - 1 : -1]:
        if capture.phase == event.phase and capture.role == event.role and capture.end is None and not capture.skip:
            return capture
    bare = startup.ranks.get(ev.Rank(server=event.rank.server)) if event.rank.named else None
    for capture in bare.captures[: -_MOST_BACK - 1 : -1] if bare else ():
        if capture.begin is None and capture.open and capture.phase == event.phase and bare is not None:
            bare.captures.remove(capture)
            startup.running.pop(capture.rank, None)
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
        startup.running[capture.rank] = capture


def _bar(startup: Startup, event: ev.BucketBar) -> None:
    phases = _PHASES_OF_BAR.get(event.kind)
    if phases is None:
        return
    capture = _open_of(startup, phases, event.rank)
    if capture is None:
        # The last state of a bar may be printed after the end line.
        if event.done is not None and event.done == event.total and not startup.phases_seen.isdisjoint(phases):
            return
        rank = event.rank if _is_rank(startup, event.rank) else lowest_rank(list(startup.ranks) or [event.rank])
        capture = Capture(rank, "target", phases[0])
        _add(startup, startup.log_of(rank), capture)
        startup.keep(startup.drawn, capture)
    capture.last_bar = event
    points = capture.compile_points if event.kind == "compile" else capture.points
    if capture.errors and event.done is not None and event.done > (capture.done or 0):
        capture.errors.clear()  # it went on
    if event.kind != "compile":
        capture.total = event.total if event.total is not None else capture.total
        capture.done = event.done if event.done is not None else capture.done
    _point(startup, points, event)


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
    event = _of_its_rank(startup, event)
    startup.keep(startup.ooms, event)
    capture = _running(startup, event.rank)
    if capture is not None and capture.oom is None:
        capture.oom = event


_LONGEST_TRACEBACK = 400


def _of_its_rank(startup: Startup, event: ev.OutOfMemory) -> ev.OutOfMemory:
    """An exception's last line has no prefix: it is of the rank that the head of its traceback names."""
    head = next((error for error in reversed(startup.errors) if error.kind == "SchedulerException"), None)
    if event.rank.named or head is None or not 0 <= event.line - head.line <= _LONGEST_TRACEBACK:
        return event
    own = startup.running.get(head.rank) if _is_rank(startup, head.rank) else None
    return replace(event, rank=head.rank) if own is not None and own.oom is None else event


def _failed(startup: Startup, event: ev.CaptureFailed) -> None:
    startup.keep(startup.failures, event)
    capture = _running(startup, event.rank, event.phase)
    if capture is not None and capture.failed is None:
        capture.failed = event


def _error(startup: Startup, event: ev.ErrorLine) -> None:
    startup.keep(startup.errors, event)
    capture = _running(startup, event.rank)
    if capture is not None and len(capture.errors) < _MOST_ERRORS:
        capture.errors.append(event)


def _vllm_finished(startup: Startup, event: VllmGraphFinished) -> None:
    startup.keep(startup.log_of(event.rank).vllm.finished, event)
    for capture in startup.drawn:
        if capture.open:
            capture.finished = event
    startup.drawn.clear()


# --- looking for a capture --------------------------------------------------------------------------------------


def _open_of(startup: Startup, phases: tuple[str, ...], rank: ev.Rank) -> Capture | None:
    """The capture that a line without a phase of its own speaks of: of that rank, or of the lowest that captures."""
    if _is_rank(startup, rank):
        own = startup.running.get(rank)
        return own if own is not None and own.open and own.phase in phases else None
    found = [capture for capture in startup.running.values() if capture.phase in phases and capture.open]
    if len(found) < 2:
        return found[0] if found else None
    return startup.running[lowest_rank([capture.rank for capture in found])]


def _running(startup: Startup, rank: ev.Rank, phase: str | None = None) -> Capture | None:
    """The capture that an error interrupts: of its rank if it names one, else the last that began.

    A later word of the same failure finds the capture that the first one ended. Once the server is up, an error
    interrupts no capture, whatever the log left open.
    """
    if startup.ready or startup.limits:
        return None
    if _is_rank(startup, rank):
        return startup.running.get(rank)
    found = [each for each in startup.running.values() if each.finished is None]
    return max([each for each in found if each.phase == phase] or found, key=_how_recent, default=None)


def _how_recent(capture: Capture) -> tuple[bool, int]:
    """Ranks capture in step and one of them draws bars: where it got to says what all were doing."""
    bar = capture.last_bar
    return bar is not None, max((*capture.lines, bar.line if bar else 0))


def _is_rank(startup: Startup, rank: ev.Rank) -> bool:
    """Whether a line's prefix names a rank of this start. An actor's process id on a bar need not be one."""
    return rank.named and (rank in startup.ranks or not rank.worker)


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
