"""How a start ended when memory was not the reason: failures of another kind, compilation, a log that stops."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.serverlogs.events import ErrorLine
from toolkit.serverlogs.findings.facts import Facts, gib, labels, listed, of_ranks, quoted
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.startup import Capture, Startup

_ALMOST_NONE_GIB = 0.1
# What the words of a failure mean, the most particular first, and what to do.
_KINDS: tuple[tuple[re.Pattern[str], str, str, str | None], ...] = (
    (
        re.compile(r"memory[_ ]?saver", re.IGNORECASE),
        "the memory saver cannot be combined with breakable prefill graphs",
        "Leave out --enable-memory-saver, or turn the prefill graph off.",
        None,
    ),
    (
        re.compile(r"INTERNAL ASSERT|CachingAllocator|captures_underway|private pool", re.IGNORECASE),
        "an assertion in PyTorch's allocator",
        "A lower fraction does not help. Turn the prefill graph off for this model, or use another release.",
        "https://github.com/sgl-project/sglang/issues/35437",
    ),
    (
        re.compile(
            r"compil|nvcc|ninja|ptxas|nvrtc|triton|inductor|dynamo|\bJIT\b|cpp_extension|CalledProcessError|cutlass",
            re.IGNORECASE,
        ),
        "the model or its kernels could not be compiled",
        "A lower fraction does not help. Install the matching compiler or precompiled kernels, or turn the "
        "prefill graph off.",
        None,
    ),
    (
        re.compile(r"CUBLAS|illegal memory access|device-side assert|index out of (?:range|bounds)", re.IGNORECASE),
        "a kernel failed, as it does when a bucket is longer than the context",
        "Keep the largest bucket within the context length, or turn the prefill graph off.",
        "https://github.com/ai-dynamo/dynamo/pull/8609",
    ),
    (
        re.compile(r"numel|number of elements|expanded size|shape|size mismatch|must match", re.IGNORECASE),
        "an assertion about element counts",
        "A lower fraction does not help. Turn the prefill graph off for this model, or use another release.",
        None,
    ),
)
_OTHER = "a failure that does not speak of memory", "A lower fraction does not help; the message says what does.", None
_LONG_COMPILATION = "https://github.com/sgl-project/sglang-omni/issues/1194"


def not_a_memory_failure(facts: Facts) -> Iterator[Finding]:
    """A capture failed, and not for want of memory, whatever the server's hint says."""
    failed = [each for each in facts.startup.captures if each.outcome == "failed" and _says_why(each)]
    failed = [each for each in failed if not any(error.kind == "NotEnoughMemory" for error in each.errors)]
    for role, phase in dict.fromkeys((each.role, each.phase) for each in failed):
        group = [each for each in failed if (each.role, each.phase) == (role, phase)]
        words = " | ".join(_words(each) for each in group)
        kind, advice, source = _kind(words, facts)
        ranks = [each.rank.label for each in group]
        yield Finding(
            "NOT_A_MEMORY_FAILURE",
            "error",
            f"Capturing the {role} {phase} graph failed{of_ranks(ranks)}, and not for want of memory: {kind} "
            f"({quoted(words.partition(' | ')[0])}).{_but_little_was_free(group)}",
            tuple(line for each in group for line in _failure_lines(each)),
            advice,
            source,
            labels(ranks),
        )


# Words of an end that name no cause; the cause stands before or after them.
_ENDS = ("SchedulerException", "ChildDied", "EngineFailed")
# What a line may have been about to say when the log was cut inside it.
_COMPLETE = (
    "Traceback (most recent call last):",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "Not enough memory. Please try to increase",
)


def _says_why(capture: Capture) -> bool:
    causes = [error for error in capture.errors if error.kind not in _ENDS and not _is_cut(error.message)]
    return capture.failed is not None or bool(causes)


def _is_cut(message: str) -> bool:
    """Whether a message ends where another one, of another meaning, may have gone on."""
    said = message.rstrip()
    _, colon, rest = said.partition(": ")
    return said.endswith((":", "exception")) or (bool(colon) and any(words.startswith(rest) for words in _COMPLETE))


def _stops_in_traceback(startup: Startup) -> bool:
    """The last thing said is that a traceback follows: why the server failed is in what is missing."""
    last = max((error for error in startup.errors), key=lambda error: error.line, default=None)
    if last is None or not _is_cut(last.message):
        return False
    return all(each.line <= last.line for each in (*startup.ooms, *startup.failures))


def _words(capture: Capture) -> str:
    parts = [capture.failed.message] if capture.failed else []
    causes = [error.message for error in capture.errors if error.kind not in _ENDS]
    return " | ".join([*parts, *causes])


def _failure_lines(capture: Capture) -> tuple[int, ...]:
    parts = [capture.failed.line] if capture.failed else []
    return (*parts, *(error.line for error in capture.errors))


def _kind(words: str, facts: Facts) -> tuple[str, str, str | None]:
    matching = [(kind, advice, source) for pattern, kind, advice, source in _KINDS if pattern.search(words)]
    kind, advice, source = matching[0] if matching else _OTHER
    if "context" not in kind:
        return kind, advice, source
    context = facts.argument("context_length")
    largest = max(
        (bucket for each in facts.captures for bucket in each.buckets or () if each.phase == "prefill"), default=0
    )
    if isinstance(context, int) and 0 < context < largest:
        kind = f"a kernel failed, and the largest bucket ({largest}) is longer than the context ({context})"
    return kind, advice, source


def _but_little_was_free(group: list[Capture]) -> str:
    free = [each.points[-1].free_gib for each in group if each.points and each.points[-1].free_gib is not None]
    least = min((value for value in free if value is not None), default=None)
    if least is None or least >= _ALMOST_NONE_GIB:
        return ""
    return f" Only {gib(least)} was free, so memory cannot be ruled out."


def server_failed(facts: Facts) -> Iterator[Finding]:
    """The server ended with an error that no other finding explains."""
    startup = facts.startup
    fatal = [error for error in startup.errors if error.fatal]
    failed = [each for each in startup.captures if each.outcome == "failed"]
    explained = startup.ooms or any(_says_why(each) for each in failed) or _stops_in_traceback(startup)
    if not fatal or explained or any(error.kind == "NotEnoughMemory" for error in fatal):
        return
    cause = _cause(startup, fatal[0])
    when = f"while the {failed[0].role} {failed[0].phase} graph was captured" if failed else "outside of any capture"
    yield Finding(
        "SERVER_FAILED",
        "error",
        f"The server ended {when}: {quoted(cause.message)}.",
        tuple(dict.fromkeys((cause.line, *(error.line for error in fatal)))),
        "Read the traceback above that line; if there is none, look at the host's memory and the container's limits.",
    )


def _cause(startup: Startup, fatal: ErrorLine) -> ErrorLine:
    """The exception's own last line says more than the word of an end."""
    near = [error for error in startup.errors if not error.fatal and abs(error.line - fatal.line) < 400]
    return near[-1] if near else fatal


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
    if _stops_in_traceback(startup):
        message = "The log stops inside a traceback: why the server failed is in what is missing."
        yield Finding("LOG_INCOMPLETE", "info", message, (startup.last_line,), "Give the rest of the log as well.")
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
    if facts.followed:
        message = f"This start ends without an error{begun}, and another one follows: it was ended from outside."
        advice = "Look at time-outs and liveness probes, the host's memory and the container's limits."
    else:
        message = f"The log stops before the server is up{begun}."
        advice = "Read the rest of the log before deciding: what is missing here may say more."
    yield Finding(
        "LOG_INCOMPLETE",
        "info",
        message,
        tuple([*(line for each in open_captures for line in each.lines[:1]), startup.last_line]),
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
    failed = bool(startup.ooms or startup.failures) or any(error.fatal for error in startup.errors)
    return failed or any(each.outcome in ("oom", "failed") for each in startup.captures)
