"""The toolkit's own engine just before a capture: what is free and how many KV tokens there are, without capturing.

Put together as `toolkit.prefill.build` does it, over meta tensors: the same allocator model is charged with the same
weights, KV pool and static buffers. Exact on the accounted CPU device. Elsewhere only the KV pool is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput
from toolkit.forecast.kv_last import KvLast
from toolkit.memory.allocator import CachingAllocator
from toolkit.memory.ledger import GIB, Sizes
from toolkit.settings import CaptureSettings

if TYPE_CHECKING:
    from toolkit.forecast.own_traces import CaptureTraces


@dataclass(frozen=True, slots=True)
class BeforeCapture:
    """One device with everything but graphs. GiB of 2**30 bytes.

    Attributes:
        kv_tokens: tokens of a KV pool that is sized before the capture.
        kv_last: of one that is sized after it.
        free_gib: free with a pool that is sized first; exact on the accounted CPU device, None elsewhere.
        free_kv_last_gib: the same where the pool is sized last, what it would have taken by then counted as taken.
    """

    kv_tokens: int
    kv_last: KvLast
    free_gib: float | None = None
    free_kv_last_gib: float | None = None


def before_capture(
    settings: CaptureSettings, sizes: Sizes, traces: CaptureTraces, config: Any, total_bytes: int
) -> BeforeCapture:
    """The moment before the capture on a device of so many bytes.

    Raises:
        InvalidInput: weights do not fit, or leave no room for the KV pool or for what is to be left free.
    """
    import torch

    from toolkit.prefill.build import NoMemoryForKV, kv_tokens_that_fit
    from toolkit.prefill.kv_pool import bytes_per_token

    dtype, weights = getattr(torch, settings.dtype), _weights_bytes(traces)
    after_weights = total_bytes - weights
    if after_weights < 0:
        raise InvalidInput(
            f"weights of {weights / GIB:.2f} GiB do not fit a device of {total_bytes / GIB:.2f} GiB",
            "a device that holds the weights",
            "a smaller model, or a larger device",
        )
    try:
        tokens = kv_tokens_that_fit(settings, sizes, traces.geometry, dtype, total_bytes, after_weights, config)
    except NoMemoryForKV as error:
        raise InvalidInput(str(error), "a fraction that weights leave room in", "raise it") from None
    planned = (tokens + 1) * bytes_per_token(traces.geometry, dtype.itemsize) / GIB
    kv_last = _kv_last(traces, dtype.itemsize, after_weights, max(sizes.buckets, default=1), planned)
    if settings.device != "cpu":
        return BeforeCapture(tokens, kv_last)
    first, last = (_free_gib(traces, total_bytes, held, sizes.buckets) for held in (tokens, 0))
    last -= planned
    if settings.free_memory_gib is not None:  # ballast takes the rest
        first, last = min(first, settings.free_memory_gib), settings.free_memory_gib
    return BeforeCapture(tokens, kv_last, first, last)


def _weights_bytes(traces: CaptureTraces) -> int:
    """What the weights take of the device: the allocator hands memory out in steps."""
    from toolkit.prefill.devices.meta import MetaDevice

    device = MetaDevice(CachingAllocator())
    device.adopt(traces.weights)
    return device.allocator.reserved_bytes()


def _free_gib(traces: CaptureTraces, total_bytes: int, kv_tokens: int, buckets: tuple[int, ...]) -> float:
    allocator = CachingAllocator()
    held = traces.runner(allocator, kv_tokens, buckets)
    free = (total_bytes - allocator.reserved_bytes()) / GIB
    del held
    return free


def _kv_last(traces: CaptureTraces, itemsize: int, room_bytes: int, first_tokens: int, planned_gib: float) -> KvLast:
    """A pool that grows after the capture: each tensor takes whole steps of memory, one full bucket is there before."""
    from toolkit.prefill.devices.cpu import BACKING_STEP
    from toolkit.prefill.elastic_kv import pool_bytes, row_bytes, tokens_that_fit

    rows = row_bytes(traces.geometry, itemsize)
    most = max(first_tokens, room_bytes // max(1, sum(rows)))

    def gib(tokens: int) -> float:
        return pool_bytes(rows, tokens, BACKING_STEP) / GIB

    def tokens(room_gib: float) -> int:
        return tokens_that_fit(rows, round(room_gib * GIB), BACKING_STEP, most)

    return KvLast.of(planned_gib, first_tokens, tokens, gib)
