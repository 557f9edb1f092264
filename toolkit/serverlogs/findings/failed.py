"""Starts that ended in an error which is not one of memory, or of which nobody can tell."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.serverlogs.captures import went_wrong
from toolkit.serverlogs.events import CaptureFailed, ErrorLine
from toolkit.serverlogs.findings.caught import caught
from toolkit.serverlogs.findings.facts import Facts, gib, labels, of_ranks, quoted
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.findings.memory_words import captured_before, who
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
        re.compile(
            r"CUBLAS_STATUS_(?!NOT_INITIALIZED)|illegal memory access|device-side assert|index out of (?:range|bounds)",
            re.IGNORECASE,
        ),
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
    (
        re.compile(r"\b(?:Assertion|Attribute|Index|Import|Key|ModuleNotFound|Name|NotImplemented|Type|Value)Error\b"),
        "an error of the program itself",
        "A lower fraction does not help; the message says what does.",
        None,
    ),
)
# Words that memory may be behind, and may not: what to say of them, and what to do.
_UNCLEAR: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"MemoryError|bad_alloc|[Cc]an(?:'t|not) allocate memory"),
        " That is the host's memory, not the card's.",
        "Give the host or the container more memory; fewer compilers at once (MAX_JOBS) need less.",
    ),
    (
        re.compile(r"_STATUS_NOT_INITIALIZED|NCCL"),
        " Want of memory on the card is one cause of these words, and not the only one.",
        "Look at what was free before it. If that was little, lower the fraction that weights and KV cache take; else "
        "NCCL_DEBUG=INFO or the lines above say more.",
    ),
)
_READ_ON = "Read the traceback above that line; if there is none, look at the host's memory and the container's limits."
# PyTorch's own hint after every CUDA error speaks of compiling, and means nothing by it.
_HINT = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions"


def not_a_memory_failure(facts: Facts) -> Iterator[Finding]:
    """A capture failed, and not for want of memory, whatever the server's hint says."""
    yield from caught(facts, "NOT_A_MEMORY_FAILURE")
    failed = [each for each in facts.startup.captures if each.outcome == "failed" and _says_why(each)]
    failed = [each for each in failed if not each.survived]
    failed = [each for each in failed if not any(error.kind == "NotEnoughMemory" for error in each.errors)]
    for role, phase in dict.fromkeys((each.role, each.phase) for each in failed):
        group = [each for each in failed if (each.role, each.phase) == (role, phase)]
        words = " | ".join(_words(each) for each in group)
        found = _kind(words, facts)
        if found is None:
            continue  # see SERVER_FAILED
        kind, advice, source = found
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


def stops_in_traceback(startup: Startup) -> bool:
    """The last thing said is that a traceback follows: why the server failed is in what is missing."""
    last = max((error for error in startup.errors), key=lambda error: error.line, default=None)
    said = max((each.line for each in (*startup.ooms, *startup.failures, *startup.errors)), default=0)
    if startup.interrupted is None and any(head > max(said, startup.alive_line) for head in startup.tracebacks[-1:]):
        return True
    return last is not None and _is_cut(last.message) and last.line == said


def _words(capture: Capture) -> str:
    parts = [capture.failed.message] if capture.failed else []
    causes = [error.message for error in capture.errors if error.kind not in _ENDS]
    return " | ".join([*parts, *causes])


def _failure_lines(capture: Capture) -> tuple[int, ...]:
    parts = [capture.failed.line] if capture.failed else []
    return (*parts, *(error.line for error in capture.errors))


def _kind(words: str, facts: Facts) -> tuple[str, str, str | None] | None:
    """What a failure was, what to do, and a source; None where the words do not tell."""
    words = words.replace(_HINT, "")
    if any(pattern.search(words) for pattern, _, _ in _UNCLEAR):
        return None
    found = next(((kind, advice, source) for pattern, kind, advice, source in _KINDS if pattern.search(words)), None)
    if found is None or "context" not in found[0]:
        return found
    _, advice, source = found
    context = facts.argument("context_length")
    largest = max(
        (bucket for each in facts.captures for bucket in each.buckets or () if each.phase == "prefill"), default=0
    )
    if not isinstance(context, int) or not context or not largest:
        return found
    if context < largest:
        return (
            f"a kernel failed, and the largest bucket ({largest}) is longer than the context ({context})",
            advice,
            source,
        )
    return "a kernel failed", "Turn the prefill graph off for this model, or use another release.", None


def _but_little_was_free(group: list[Capture]) -> str:
    free = [each.points[-1].free_gib for each in group if each.points and each.points[-1].free_gib is not None]
    least = min((value for value in free if value is not None), default=None)
    if least is None or least >= _ALMOST_NONE_GIB:
        return ""
    return f" Only {gib(least)} was free, so memory cannot be ruled out."


def server_failed(facts: Facts) -> Iterator[Finding]:
    """The server ended with an error that no other finding explains, or the log's last word is an exception."""
    startup = facts.startup
    yield from _of_nobody(startup)
    failed = [each for each in startup.captures if each.outcome == "failed" and not each.survived]
    explained = any(_says_why(each) and _kind(_words(each), facts) is not None for each in failed)
    if startup.ooms or explained or stops_in_traceback(startup) or not ends_in_error(startup):
        return
    if any(error.kind == "NotEnoughMemory" for error in startup.errors):
        return
    ends: list[ErrorLine | CaptureFailed] = [*(error for error in startup.errors if error.fatal), *startup.failures]
    cause = _cause(startup, min(ends, key=lambda each: each.line) if ends else startup.errors[-1])
    words = quoted(cause.message)
    note, advice = next(
        ((note, advice) for pattern, note, advice in _UNCLEAR if pattern.search(cause.message)), ("", _READ_ON)
    )
    ranks = [each.rank.label for each in failed]
    when = "outside of any capture"
    if failed:
        when = f"while the {failed[0].role} {failed[0].phase} graph was captured{of_ranks(ranks)}"
    sure = bool(ends) or (is_down(startup))
    perhaps = f"The log's last word is an exception ({words}); whether the server ended with it, the log does not say."
    yield Finding(
        "SERVER_FAILED",
        "error" if sure else "warning",
        (f"The server ended {when}: {words}." if sure else perhaps) + note,
        tuple(dict.fromkeys((cause.line, *(each.line for each in ends)))),
        advice,
        None,
        labels(ranks),
    )


def _of_nobody(startup: Startup) -> Iterator[Finding]:
    """Memory ran out where no line says who ran, so that none of the findings about memory can say when."""
    ooms = startup.ooms
    known = startup.ranks and startup.engine != "unknown"
    inside = any(each.outcome == "oom" for each in startup.captures)
    if known or inside or not ooms or captured_before(startup, ooms[0]):
        return
    fatal = [error.line for error in startup.errors if error.fatal]
    yield Finding(
        "SERVER_FAILED",
        "error" if fatal else "warning",
        f"Memory ran out: {who(ooms[0])}. Of which rank and at which point of a start, the log does not say.",
        (*(oom.line for oom in ooms), *fatal),
        "Give the log from the server's start on, standard output and standard error together.",
    )


def ends_in_error(startup: Startup) -> bool:
    """Whether anything fatal was said, or an exception or a traceback that nothing followed."""
    return bool(startup.ooms or startup.failures) or went_wrong(startup) or stops_in_traceback(startup)


def is_down(startup: Startup) -> bool:
    """Whether a start that was not up yet has a traceback which nothing followed."""
    up = startup.ready is not None or bool(startup.limits)
    return not up and any(head > startup.alive_line for head in startup.tracebacks[-1:])


def _cause(startup: Startup, end: ErrorLine | CaptureFailed) -> ErrorLine | CaptureFailed:
    """The exception's own last line says more than the word of an end."""
    near = [error for error in startup.errors if not error.fatal and abs(error.line - end.line) < 400]
    if not near and startup.failures:
        return startup.failures[0]
    return near[-1] if near else end
