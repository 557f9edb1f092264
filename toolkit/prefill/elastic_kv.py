"""A KV pool whose size is decided after the capture: its addresses are reserved before, memory comes behind them later.

The idea is that of SGLang's opt-in post-capture sizing (0.5.16 and later). Captured graphs hold the addresses of K and
V, so these must not move when the pool grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.prefill.kv_pool import KVPool, LayerGeometry

if TYPE_CHECKING:
    import torch

    from toolkit.prefill.devices.base import Device


class ElasticKVPool(KVPool):
    """A pool with addresses for `most_tokens` and memory for `num_tokens`, which grows once.

    `planned_bytes` is what a pool sized before the capture would take under the same settings: what the capture is
    given beyond a server's free memory.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[LayerGeometry],
        first_tokens: int,
        most_tokens: int,
        dtype: torch.dtype,
        planned_bytes: int,
    ) -> None:
        self.layers = tuple(layers)
        self.num_tokens = min(first_tokens, most_tokens)
        self.planned_bytes = planned_bytes
        self._step, rows = device.backing_step, most_tokens + 1
        shapes = [(layer.kv_heads, layer.k_dim) for layer in layers]
        shapes += [(layer.kv_heads, layer.v_dim) for layer in layers]
        self.row_bytes = row_bytes(layers, dtype.itemsize)
        self._most_tokens = most_tokens
        self._parts = [
            device.reserve((rows, *shape), dtype, (self.num_tokens + 1) * row)
            for shape, row in zip(shapes, self.row_bytes, strict=True)
        ]
        tensors = [part.tensor for part in self._parts]
        self.keys, self.values = tensors[: len(layers)], tensors[len(layers) :]
        self._free = [(1, self.num_tokens)]

    @property
    def backed_bytes(self) -> int:
        """Bytes of device memory behind the pool."""
        return sum(part.backed_bytes for part in self._parts)

    def grow(self, nbytes: int) -> None:
        """Take as many tokens as `nbytes` of device memory hold in all, those there are already included.

        Never shrinks. Raises torch.OutOfMemoryError when the memory is not there.
        """
        tokens = tokens_that_fit(self.row_bytes, nbytes, self._step, self._most_tokens)
        if tokens <= self.num_tokens:
            return
        for part, row in zip(self._parts, self.row_bytes, strict=True):
            part.back((tokens + 1) * row)
        before, self.num_tokens = self.num_tokens, tokens
        self._free.append((before + 1, tokens - before))


def row_bytes(layers: Sequence[LayerGeometry], itemsize: int) -> list[int]:
    """Bytes of one token in each tensor of a pool: K of every layer, then V of every layer."""
    keys = [layer.kv_heads * layer.k_dim * itemsize for layer in layers]
    return keys + [layer.kv_heads * layer.v_dim * itemsize for layer in layers]


def tokens_that_fit(row_bytes: Sequence[int], nbytes: int, step: int, most_tokens: int) -> int:
    """Most tokens, beside the padding slot, whose rows fit `nbytes`; each tensor takes whole steps of memory."""
    low, high = 0, most_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pool_bytes(row_bytes, middle, step) <= nbytes else (low, middle - 1)
    return low


def pool_bytes(row_bytes: Sequence[int], tokens: int, step: int) -> int:
    """Device memory of a pool of `tokens` and the padding slot, each tensor in whole steps."""
    return sum(-(-(tokens + 1) * row // step) * step for row in row_bytes)
