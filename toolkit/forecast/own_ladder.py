"""A ladder of capture traces through the allocator model: what each bucket adds, in any order, sharing or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from toolkit.errors import InvalidInput
from toolkit.memory.allocator import CachingAllocator, FreshAddresses, PoolId

if TYPE_CHECKING:
    from toolkit.forecast.own_traces import CaptureTraces
    from toolkit.prefill.model_runner import ModelRunner

Order = Literal["descending", "ascending"]
Sharing = Literal["pool and stream", "pool", "nothing"]
ORDERS: tuple[Order, ...] = ("descending", "ascending")
_PLACES: dict[Sharing, Callable[[int], tuple[PoolId, int]]] = {
    "pool and stream": lambda position: ("graphs", 1),
    "pool": lambda position: ("graphs", 1 + position),
    "nothing": lambda position: (f"graphs {position}", 1),
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


class Ladders:
    """Ladders of one model and backend on one device: what stands in memory before the capture, and the way through.

    With `kv_tokens` it is the accounted CPU device with a KV pool of that size, whose gaps warm-up passes may use.
    Without, it is a GPU, where captures run on a stream of their own and find nothing to use.
    """

    def __init__(
        self, traces: CaptureTraces, kv_tokens: int | None, max_tokens: int, addresses: FreshAddresses = "descending"
    ) -> None:
        self._traces, self._kv_tokens, self._max_tokens = traces, kv_tokens, max_tokens
        self._addresses = addresses
        self._rehearsal, self._held = self._prepared()
        self._growth: dict[int, int] = {}

    def steps(self, ladder: tuple[int, ...]) -> tuple[LadderStep, ...]:
        """One step a bucket, in the order given."""
        allocator, held = self._prepared()
        reserved, in_use = allocator.reserved_bytes(), allocator.allocated_bytes()
        steps = []
        for num_tokens in ladder:
            peak = self._bucket(allocator, num_tokens) - reserved
            now = (allocator.reserved_bytes() - reserved, allocator.allocated_bytes() - in_use)
            steps.append(LadderStep(num_tokens, *now, peak))
        del held
        return tuple(steps)

    def _bucket(self, allocator: CachingAllocator, num_tokens: int) -> int:
        """Capture one bucket; returns the most that was reserved meanwhile."""
        trace, before = self._traces.at(num_tokens), allocator.reserved_bytes()
        allocator.reset_peak()
        if not trace.separable:
            trace.replay(allocator, "graphs", self._stream)
            return allocator.peak_reserved_bytes
        trace.recording.replay(allocator, "graphs", self._stream)
        return max(allocator.peak_reserved_bytes, before + self._warm_up_growth(num_tokens))

    def _warm_up_growth(self, num_tokens: int) -> int:
        """Bytes warm-up passes take beside all that is there. They find the same default pool whatever the ladder."""
        if num_tokens not in self._growth:
            allocator = self._rehearsal
            allocator.reset_peak()
            before = allocator.reserved_bytes()
            self._traces.at(num_tokens).warm_up.replay(allocator, "graphs", self._stream)
            self._growth[num_tokens] = allocator.peak_reserved_bytes - before
        return self._growth[num_tokens]

    @property
    def _stream(self) -> int:
        return int(self._kv_tokens is None)

    def _prepared(self) -> tuple[CachingAllocator, ModelRunner | None]:
        """An allocator as it is before the capture, and who holds what is in use there."""
        allocator = CachingAllocator(fresh_addresses=self._addresses)
        if self._kv_tokens is None:
            return allocator, None
        return allocator, self._traces.runner(allocator, self._kv_tokens, (self._max_tokens,))


@lru_cache(maxsize=32)
def ladders(
    traces: CaptureTraces, kv_tokens: int | None, max_tokens: int, addresses: FreshAddresses = "descending"
) -> Ladders:
    """`Ladders`, made once."""
    return Ladders(traces, kv_tokens, max_tokens, addresses)


@lru_cache(maxsize=256)
def ladder_steps(
    traces: CaptureTraces, ladder: tuple[int, ...], kv_tokens: int | None, addresses: FreshAddresses = "descending"
) -> tuple[LadderStep, ...]:
    """`Ladders.steps`, kept for sliders that return.

    Args:
        traces: of the model and backend.
        ladder: buckets in order of capture.
        kv_tokens: slots of the KV pool on the accounted CPU device; None for a GPU.
        addresses: where new segments land.
    """
    return ladders(traces, kv_tokens, max(ladder), addresses).steps(ladder)
