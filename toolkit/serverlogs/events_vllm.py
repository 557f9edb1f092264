"""What vLLM's start-up log says, beside the records it shares with SGLang (`events`). vLLM prints GiB."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.serverlogs.events import Event


@dataclass(frozen=True, slots=True)
class VllmModelLoaded(Event):
    """`Model loading took`."""

    gib: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class VllmStartupMemory(Event):
    """`Free memory on device (F/T GiB) on startup.` and what the budget went to, as far as printed."""

    free_gib: float | None = None
    total_gib: float | None = None
    utilization: float | None = None
    desired_gib: float | None = None
    consumed_gib: float | None = None
    activation_gib: float | None = None
    graph_gib: float | None = None
    kv_gib: float | None = None


@dataclass(frozen=True, slots=True)
class VllmAvailableKv(Event):
    """`Available KV cache memory`."""

    gib: float | None = None


@dataclass(frozen=True, slots=True)
class VllmKvTokens(Event):
    """`GPU KV cache size`, with the concurrency where it is on the same line or its own."""

    tokens: int | None = None
    context: int | None = None
    concurrency: float | None = None


@dataclass(frozen=True, slots=True)
class VllmGraphProfile(Event):
    """`Profiling CUDA graph memory`: how many graphs of each kind, and the largest of each."""

    piecewise: int | None = None
    piecewise_largest: int | None = None
    full: int | None = None
    full_largest: int | None = None


@dataclass(frozen=True, slots=True)
class VllmGraphEstimate(Event):
    """`Estimated CUDA graph memory`."""

    gib: float | None = None


@dataclass(frozen=True, slots=True)
class VllmGraphFinished(Event):
    """`Graph capturing finished`; of two in one worker the first is the estimate pass, the second the real one."""

    seconds: float | None = None
    gib: float | None = None


@dataclass(frozen=True, slots=True)
class VllmPool(Event):
    """`CUDA graph pool memory`, actual against estimated. Actual may be negative on a shared GPU."""

    actual_gib: float | None = None
    estimated_gib: float | None = None
    difference_gib: float | None = None
