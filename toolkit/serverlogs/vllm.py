"""vLLM's lines about memory and graphs: literal beginning -> what the rest of the line says."""

from __future__ import annotations

import re

from toolkit.serverlogs.events import Compiling, Event, Rank, ServerReady
from toolkit.serverlogs.events_vllm import (
    VllmAvailableKv,
    VllmGraphEstimate,
    VllmGraphFinished,
    VllmGraphProfile,
    VllmKvTokens,
    VllmModelLoaded,
    VllmPool,
    VllmStartupMemory,
)
from toolkit.serverlogs.failures import Parser
from toolkit.serverlogs.server_args import vllm_start
from toolkit.serverlogs.words import number, whole

_MOST_WORDS = 500
Events = tuple[Event, ...]


def _model_loaded(text: str, line: int, rank: Rank) -> Events:
    return (VllmModelLoaded(line, rank, number(text, " took "), number(text, " and ", "s")),)


def _graph_finished(text: str, line: int, rank: Rank) -> Events:
    return (VllmGraphFinished(line, rank, number(text, " finished in ", "s"), number(text, ", took ")),)


def _available_kv(text: str, line: int, rank: Rank) -> Events:
    return (VllmAvailableKv(line, rank, number(text, " memory: ")),)


def _kv_tokens(text: str, line: int, rank: Rank) -> Events:
    tokens = whole(text, "size: ", ",") if " tokens" in text else None
    return (VllmKvTokens(line, rank, tokens, _context(text), _concurrency(text)),)


def _max_concurrency(text: str, line: int, rank: Rank) -> Events:
    return (VllmKvTokens(line, rank, None, _context(text), _concurrency(text)),)


def _context(text: str) -> int | None:
    return whole(text, "concurrency for ", ",") if " tokens per request" in text else None


_TIMES = re.compile(r"tokens per request: (\d{1,9}(?:\.\d{1,6})?)x")


def _concurrency(text: str) -> float | None:
    times = _TIMES.search(text)
    return float(times[1]) if times else None


_PROFILE = re.compile(r"(PIECEWISE|FULL)=(\d{1,7})(?:(?=,)| \(largest=(\d{1,9})\))")


def _profile(text: str, line: int, rank: Rank) -> Events:
    found = {kind: (int(count), int(most) if most else None) for kind, count, most in _PROFILE.findall(text)}
    none = (None, None)
    return (VllmGraphProfile(line, rank, *found.get("PIECEWISE", none), *found.get("FULL", none)),) if found else ()


def _estimate(text: str, line: int, rank: Rank) -> Events:
    return (VllmGraphEstimate(line, rank, number(text, " memory: ")),)


_POOL = re.compile(r" (-?\d{1,9}(?:\.\d{1,6})?) GiB \((actual|estimated)\)")


def _pool(text: str, line: int, rank: Rank) -> Events:
    sizes = {kind: float(size) for size, kind in _POOL.findall(text)}
    if not sizes:
        return ()
    return (VllmPool(line, rank, sizes.get("actual"), sizes.get("estimated"), number(text, "difference: ")),)


_FREE = re.compile(r"Free memory on device (?:[\w:]{1,40} )?\((\d{1,9}(?:\.\d{1,6})?)/(\d{1,9}(?:\.\d{1,6})?) GiB\)")
_DESIRED = re.compile(r"utilization (?:is )?\((\d{1,3}(?:\.\d{1,9})?), (\d{1,9}(?:\.\d{1,6})?) GiB\)")


def _startup_memory(text: str, line: int, rank: Rank) -> Events:
    free = _FREE.match(text)
    if free is None:
        return ()
    desired = _DESIRED.search(text[:1000])
    return (
        VllmStartupMemory(
            line,
            rank,
            float(free[1]),
            float(free[2]),
            float(desired[1]) if desired else None,
            float(desired[2]) if desired else None,
            number(text, "Actual usage is "),
            _before(text, " for peak activation"),
            _before(text, " for CUDAGraph memory"),
            number(text, "kv cache memory in use is "),
        ),
    )


_LAST_GIB = re.compile(r"(-?\d{1,9}(?:\.\d{1,6})?) GiB$")


def _before(text: str, mark: str) -> float | None:
    at = text.find(mark)
    found = _LAST_GIB.search(text[max(at - 24, 0) : at]) if at >= 0 else None
    return float(found[1]) if found else None


_TOOK = re.compile(r"(?:takes|took) (\d{1,9}(?:\.\d{1,6})?) ?s")


def _compiled(text: str, line: int, rank: Rank) -> Events:
    took = _TOOK.search(text[:_MOST_WORDS])
    return (Compiling(line, rank, text[:_MOST_WORDS], float(took[1]) if took else None),) if took else ()


def _ready(text: str, line: int, rank: Rank) -> Events:
    return (ServerReady(line, rank, "uvicorn"),)


RULES: tuple[tuple[str, Parser], ...] = (
    ("Initializing a V", vllm_start),
    ("Initializing an LLM engine", vllm_start),
    ("Model loading took", _model_loaded),
    ("Loading model weights took", _model_loaded),
    ("Graph capturing finished", _graph_finished),
    ("Available KV cache memory", _available_kv),
    ("GPU KV cache size", _kv_tokens),
    ("Maximum concurrency for", _max_concurrency),
    ("Profiling CUDA graph memory", _profile),
    ("Estimated CUDA graph memory", _estimate),
    ("CUDA graph pool memory", _pool),
    ("Free memory on device", _startup_memory),
    ("torch.compile t", _compiled),
    ("Application startup complete", _ready),
)
IGNORED = ("Avg prompt throughput", "Loading weights took", "Engine 0")
