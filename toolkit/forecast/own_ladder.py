"""A ladder of capture traces through the allocator model: what each bucket adds, in any order, sharing or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from toolkit.errors import InvalidInput
from toolkit.memory.allocator import CachingAllocator, PoolId

if TYPE_CHECKING:
    from toolkit.forecast.own_traces import CaptureTraces
    from toolkit.prefill.model_runner import ModelRunner

Order = Literal["descending", "ascending"]
Sharing = Literal["pool and stream", "pool", "nothing"]
ORDERS: tuple[Order, ...] = ("descending", "ascending")
_POOL, _STREAM = "graphs", 1
_PLACES: dict[Sharing, Callable[[int], tuple[PoolId, int]]] = {
    "pool and stream": lambda position: (_POOL, _STREAM),
    "pool": lambda position: (_POOL, _STREAM + position),
    "nothing": lambda position: (f"{_POOL} {position}", _STREAM),
}
SHARINGS: tuple[Sharing, ...] = tuple(_PLACES)
"""What the buckets of a ladder share: one pool and one stream as the engine does, one pool from a stream each, or
neither."""


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One bucket captured: bytes beyond those before the ladder, reserved and in use now, and its own peak."""

    num_tokens: int
    reserved: int
    in_use: int
    peak: int


def ordered(buckets: Sequence[int], order: Order) -> tuple[int, ...]:
    """The buckets in order of capture. Raises InvalidInput for an order that is none."""
    if order not in ORDERS:
        raise InvalidInput(f"order {order!r} is unknown", ", ".join(ORDERS), "the engine's is descending")
    return tuple(sorted(buckets, reverse=order == "descending"))


def ladder_pool_bytes(
    traces: CaptureTraces, buckets: Sequence[int], *, order: Order = "descending", sharing: Sharing = "pool and stream"
) -> list[int]:
    """Bytes in graph pools after each bucket, in order of capture.

    Largest first pays once: each smaller bucket fits into blocks the largest has left. Smallest first pays again and
    again. Memory is reused only within the same pool and the same stream.

    Args:
        traces: of the model and backend.
        buckets: token counts.
        order: `descending`, as the engine captures, or `ascending`.
        sharing: one of `SHARINGS`.

    Raises:
        InvalidInput: order or sharing is unknown.
    """
    if sharing not in _PLACES:
        raise InvalidInput(f"sharing {sharing!r} is unknown", ", ".join(SHARINGS), "the engine's is pool and stream")
    allocator, reserved = CachingAllocator(), []
    for position, num_tokens in enumerate(ordered(buckets, order)):
        traces.at(num_tokens).recording.replay(allocator, *_PLACES[sharing](position))
        reserved.append(allocator.reserved_bytes())
    return reserved


@lru_cache(maxsize=256)
def ladder_steps(
    traces: CaptureTraces,
    ladder: tuple[int, ...],
    kv_tokens: int | None,
    addresses: Order = "descending",
    static_tokens: int | None = None,
) -> tuple[LadderStep, ...]:
    """One step a bucket, in the order given.

    Args:
        traces: of the model and backend.
        ladder: buckets in order of capture.
        kv_tokens: slots of the KV pool on the accounted CPU device, where warm-up passes may use gaps beside it; 0 for
            a pool sized after the capture, whose memory the allocator never sees. None for a GPU: there captures run
            on a stream of their own, and find nothing to use.
        addresses: where new segments land.
        static_tokens: rows of the static buffers on the CPU device; None is the largest bucket.
    """
    rows = static_tokens or max(ladder)
    if not all(traces.at(num_tokens).separable for num_tokens in ladder):
        return _replayed_whole(traces, ladder, kv_tokens, addresses, rows)
    warm_up = _warm_ups(traces, kv_tokens, rows if kv_tokens is not None else 0)
    steps, before = [], 0
    for step in _recorded(traces, ladder, addresses):
        peak = max(step.peak, before + warm_up.growth(step.num_tokens))
        steps.append(replace(step, peak=peak))
        before = step.reserved
    return tuple(steps)


@lru_cache(maxsize=256)
def _recorded(traces: CaptureTraces, ladder: tuple[int, ...], addresses: Order) -> tuple[LadderStep, ...]:
    """The segments alone: whatever stands in the default pool, theirs is the same."""
    allocator, steps = CachingAllocator(fresh_addresses=addresses), []
    for num_tokens in ladder:
        traces.at(num_tokens).recording.replay(allocator, _POOL, _STREAM)
        held = allocator.reserved_bytes()  # a graph's pool never shrinks, so this is its peak too
        steps.append(LadderStep(num_tokens, held, allocator.allocated_bytes(), held))
    return tuple(steps)


class _WarmUps:
    """What warm-up passes take beside all that is there: they find the same default pool whatever the ladder."""

    def __init__(self, traces: CaptureTraces, kv_tokens: int | None, max_tokens: int) -> None:
        self._traces, self._stream = traces, _STREAM if kv_tokens is None else 0
        self._allocator = CachingAllocator()
        self._held = _hold(traces, self._allocator, kv_tokens, max_tokens)
        self._growth: dict[int, int] = {}

    def growth(self, num_tokens: int) -> int:
        """Bytes at their peak, beyond those reserved before."""
        if num_tokens not in self._growth:
            before = self._allocator.reserved_bytes()
            self._allocator.reset_peak()
            self._traces.at(num_tokens).warm_up.replay(self._allocator, _POOL, self._stream)
            self._growth[num_tokens] = self._allocator.peak_reserved_bytes - before
        return self._growth[num_tokens]


@lru_cache(maxsize=64)
def _warm_ups(traces: CaptureTraces, kv_tokens: int | None, max_tokens: int) -> _WarmUps:
    return _WarmUps(traces, kv_tokens, max_tokens)


def _replayed_whole(
    traces: CaptureTraces, ladder: tuple[int, ...], kv_tokens: int | None, addresses: Order, static_tokens: int
) -> tuple[LadderStep, ...]:
    """Bucket by bucket on one allocator, for models that keep something of their warm-up."""
    allocator, stream = CachingAllocator(fresh_addresses=addresses), _STREAM if kv_tokens is None else 0
    held = _hold(traces, allocator, kv_tokens, static_tokens)
    reserved, in_use, steps = allocator.reserved_bytes(), allocator.allocated_bytes(), []
    for num_tokens in ladder:
        allocator.reset_peak()
        traces.at(num_tokens).replay(allocator, _POOL, stream)
        now = (allocator.reserved_bytes() - reserved, allocator.allocated_bytes() - in_use)
        steps.append(LadderStep(num_tokens, *now, allocator.peak_reserved_bytes - reserved))
    del held
    return tuple(steps)


def _hold(
    traces: CaptureTraces, allocator: CachingAllocator, kv_tokens: int | None, max_tokens: int
) -> ModelRunner | None:
    """What stands in memory before a capture; it stays while the result is held. Nothing that matters on a GPU."""
    return None if kv_tokens is None else traces.runner(allocator, kv_tokens, (max_tokens,))
