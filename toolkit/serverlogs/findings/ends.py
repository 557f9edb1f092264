"""How a log ends where nothing failed: in a compilation, by a person, or before it says how."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.serverlogs.findings.facts import Facts, labels, listed, of_ranks
from toolkit.serverlogs.findings.failed import is_down, stops_in_traceback
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.startup import Capture, Startup

_LONG_COMPILATION = "https://github.com/sgl-project/sglang-omni/issues/1194"


def compiling_not_hung(facts: Facts) -> Iterator[Finding]:
    """A bar at 0 of N, or a compile pass without an end: kernels are being compiled. Also when a first bucket did."""
    captures = facts.startup.captures
    if not _has_failed(facts.startup):
        unfinished = [each for each in captures if each.outcome == "incomplete"]
        for kind in dict.fromkeys((each.role, each.phase) for each in unfinished):
            yield from _still(facts, [each for each in unfinished if (each.role, each.phase) == kind])
    for capture in captures:
        if capture.outcome == "captured":
            yield from _was(capture)


_FROM_FIELD = "On one machine the first bucket took 114.6 s, the whole capture 3:33, while its bar predicted 1:48:53."


def _still(facts: Facts, captures: list[Capture]) -> Iterator[Finding]:
    """Ranks that capture the same; one of them draws the bars."""
    bars = [each.last_bar for each in captures if each.last_bar is not None]
    bar = bars[0] if bars else None
    began = min((each.begin.line for each in captures if each.begin is not None), default=0)
    words = [line for line in facts.startup.compiling if line.line > began]
    compiles = bar is not None and (bar.kind == "compile" or ((bar.done or 0) <= 1 and bar.total))
    if not compiles and not words:
        return
    where = f" at {bar.done or 0} of {bar.total}" if bar is not None and bar.total else ""
    what = "in the compile pass of" if bar is not None and bar.kind == "compile" else "in"
    ranks = [each.rank.label for each in captures]
    yield Finding(
        "COMPILING_NOT_HUNG",
        "info",
        f"The log stops{where} {what} the {captures[0].role} {captures[0].phase} capture{of_ranks(ranks)}: kernels are "
        "compiled for the first bucket, which can take minutes, so this alone does not show a hang.",
        tuple([*([bar.line] if bar else []), *(line.line for line in words)][:20]),
        "Look for nvcc, cicc, ptxas or cc1plus at full CPU before ending it; the bar's prediction means nothing yet. "
        f"{_FROM_FIELD} Keep MAX_JOBS small where host memory is.",
        _LONG_COMPILATION,
        labels(ranks),
    )


_LONG_S, _LARGE_SHARE = 20.0, 0.3


def _was(capture: Capture) -> Iterator[Finding]:
    points = capture.points
    if len(points) < 2 or points[0].done != 0 or capture.end is None or not capture.end.elapsed_s:
        return
    took, start = points[1].started_s, points[0].started_s
    if took is None or start is None or points[1].done != 1:
        return
    first, whole = took - start, capture.end.elapsed_s
    if first < _LONG_S or first < _LARGE_SHARE * whole:
        return
    predicted = max((point.remaining_s for point in points if point.remaining_s is not None), default=None)
    bar = f"; the bar predicted {predicted:.0f} s" if predicted is not None and predicted > whole else ""
    yield Finding(
        "COMPILING_NOT_HUNG",
        "info",
        f"The first bucket of the {capture.role} {capture.phase} capture took {first:.0f} s of {whole:.1f} s, which is "
        f"kernel compilation{bar}.",
        (points[0].line, points[1].line, capture.end.line),
        "Keep the kernel caches between starts, or install precompiled kernels.",
    )


def log_incomplete(facts: Facts) -> Iterator[Finding]:
    """The log has no end of this start, or not its beginning."""
    startup = facts.startup
    if stops_in_traceback(startup):
        message = (
            "The log stops inside a traceback, or names no exception that is known here: what went wrong stands "
            "behind that line, or is missing."
        )
        yield Finding("LOG_INCOMPLETE", "warning", message, (startup.last_line,), "Give the rest of the log as well.")
    if _has_failed(startup):
        return
    if startup.ready or startup.limits or startup.prefills.batches:
        if not startup.ranks and startup.prefills.batches:
            yield _incomplete(
                "The log begins after the start-up: memory and captures are not in it.", startup.first_line
            )
        return
    open_captures = [each for each in startup.captures if each.open]
    ranks = [each.rank.label for each in open_captures]
    begun = ""
    if open_captures:
        what = ", ".join(dict.fromkeys(f"{each.role} {each.phase}" for each in open_captures))
        begun = f": the {what} capture has no end{of_ranks(ranks)}{_of_how_many(startup, ranks)}"
    ended = [startup.interrupted.line] if startup.interrupted is not None else []
    if startup.interrupted is not None:
        message = f"Somebody ended this start by hand ({startup.interrupted.kind}){begun}."
        advice = "Nothing in the log says that it had failed or hung."
    elif facts.followed:
        message = f"This start ends without an error{begun}, and another one follows: it was ended from outside."
        advice = "Look at time-outs and liveness probes, the host's memory and the container's limits."
    else:
        message = f"The log stops before the server is up{begun}."
        advice = "Read the rest of the log before deciding: what is missing here may say more."
    yield Finding(
        "LOG_INCOMPLETE",
        "info",
        message,
        tuple([*(line for each in open_captures for line in each.lines[:1]), *(ended or [startup.last_line])]),
        advice,
        None,
        labels(ranks) if ranks else (),
    )


def _of_how_many(startup: Startup, ranks: list[str]) -> str:
    """Ranks that the log names, and those that it must have but does not name."""
    seen = {rank for rank in startup.ranks if rank.named}
    if len(seen) <= len(set(ranks)):
        return ""
    numbers = {rank.tp for rank in seen if rank.tp is not None and rank.dp is rank.pp is None}
    silent = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
    unseen = f"; {listed(f'TP{number}' for number in silent)} not in the log" if silent else ""
    return f" ({len(set(ranks))} of {len(seen)} ranks{unseen})"


def _incomplete(message: str, line: int) -> Finding:
    return Finding("LOG_INCOMPLETE", "info", message, (line,), "Give the beginning of the log as well.")


def _has_failed(startup: Startup) -> bool:
    """Whether it is known to have failed. A lone exception at the end of a log may have been caught."""
    failed = bool(startup.ooms or startup.failures) or any(error.fatal for error in startup.errors)
    ended = is_down(startup) and startup.interrupted is None
    return failed or ended or any(each.outcome in ("oom", "failed") and not each.survived for each in startup.captures)
