"""What went wrong, by the words of PyTorch, Python and both engines: memory, failed captures, other ends."""

from __future__ import annotations

import re
from collections.abc import Callable

from toolkit.serverlogs.events import CaptureFailed, ErrorLine, Event, OutOfMemory, Rank, TracebackHead
from toolkit.serverlogs.words import gib, gib_before

Parser = Callable[[str, int, Rank], tuple[Event, ...]]

_MOST_WORDS = 500
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w{0,60}\.){0,8}([A-Za-z_]\w{0,60}):? ?", re.ASCII)
_ENDS = ("Error", "Exception", "Interrupt", "Unsupported", "SystemExit")
_GRAPH_FAILED = re.compile(
    r"Capture (?:(?:target|draft) )?(?:(prefill|Prefill|decode|verify|extend) )?\w{2,12} graph failed:? ?"
)
# Which words mean that memory ran out, and who said so.
_ALLOCATOR = ("OutOfMemoryError", "CUDA out of memory", "HIP out of memory", "Tried to allocate")
# Libraries allocate handles and workspaces beside PyTorch: cuBLAS, cuDNN and their like, and NCCL.
_LIBRARY = ("_STATUS_ALLOC_FAILED", "Cuda failure", "NCCL")
_DRIVER = ("out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "hipErrorOutOfMemory")


def out_of_memory(message: str, line: int, rank: Rank) -> OutOfMemory | None:
    """The record of a message that says memory ran out, None for any other."""
    if any(words in message for words in _ALLOCATOR):
        source = "allocator"
    elif _LIBRARY[0] in message or any(words in message for words in _DRIVER):
        source = "library" if any(words in message for words in _LIBRARY) else "driver"
    else:
        return None
    return OutOfMemory(
        line,
        rank,
        source,
        message[:_MOST_WORDS],
        tried_gib=gib(message, "Tried to allocate"),
        free_gib=gib_before(message, " is free"),
        total_gib=gib(message, "total capacity of"),
        private_pools_gib=gib_before(message, " allocated in private pools"),
    )


def graph_failed(message: str, line: int, rank: Rank) -> tuple[Event, ...]:
    """`Capture ... graph failed: ...`, with the memory it lacked if that was why."""
    match = _GRAPH_FAILED.match(message)
    if match is None:
        return ()
    phase = (match[1] or "decode").lower()
    failed = CaptureFailed(line, rank, phase, message[match.end() : match.end() + _MOST_WORDS])
    memory = out_of_memory(message, line, rank)
    return (memory, failed) if memory else (failed,)


def exception(message: str, line: int, rank: Rank) -> tuple[Event, ...]:
    """The last line of a traceback: `module.SomeError: words`."""
    match = _EXCEPTION.match(message)
    if match is None or not match[1].endswith(_ENDS):
        return ()
    words = message[match.end() :]
    if words.startswith("Capture ") and (failed := graph_failed(words, line, rank)):
        return failed
    memory = out_of_memory(message, line, rank)
    if memory:
        return (memory,)
    if "Not enough memory. Please try to increase" in words:
        return (ErrorLine(line, rank, "NotEnoughMemory", message[:_MOST_WORDS], fatal=True),)
    return (ErrorLine(line, rank, match[1], message[:_MOST_WORDS]),)


def is_exception(word: str) -> bool:
    """Whether a line's first word may be an exception's name."""
    return word.rstrip(":").endswith(_ENDS)


def is_last_line(word: str, alone: bool) -> bool:
    """Whether `word` is an exception's name as the last line of a traceback has it: a colon follows, or nothing."""
    return (word.endswith(":") or alone) and is_exception(word) and word.rstrip(":") not in _ENDS


def _memory(message: str, line: int, rank: Rank) -> tuple[Event, ...]:
    memory = out_of_memory(message, line, rank)
    return (memory,) if memory else ()


def _end(kind: str) -> Parser:
    def parse(message: str, line: int, rank: Rank) -> tuple[Event, ...]:
        found: tuple[Event, ...] = (ErrorLine(line, rank, kind, message[:_MOST_WORDS], fatal=True),)
        memory = out_of_memory(message, line, rank)
        return (memory, *found) if memory else found

    return parse


def _traceback(message: str, line: int, rank: Rank) -> tuple[Event, ...]:
    return (TracebackHead(line, rank),)


RULES: tuple[tuple[str, Parser], ...] = (
    ("Traceback (most recent call last)", _traceback),
    ("Scheduler hit an exception", _end("SchedulerException")),
    ("TpModelWorkerClient hit an exception", _end("SchedulerException")),
    ("Received sigquit", _end("ChildDied")),
    ("SIGQUIT received", _end("ChildDied")),
    ("Rank 0 scheduler is dead", _end("ChildDied")),
    ("Piecewise CUDA Graph failed with error", _end("PiecewiseFailed")),
    ("EngineCore failed to start", _end("EngineFailed")),
    ("Engine core initialization failed", _end("EngineFailed")),
    ("CUDA out of memory", _memory),
    ("Cuda failure", _memory),
)
