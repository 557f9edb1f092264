"""The KV pool: one slot per token, in every layer. Requests hold slots; slot 0 takes the padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from toolkit.errors import PrefillLabError

if TYPE_CHECKING:
    import torch

    from toolkit.prefill.devices.base import Device

PADDING_SLOT = 0


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one attention layer stores and asks per token: heads and the width of a head, for K, V and Q."""

    kv_heads: int
    k_dim: int
    v_dim: int
    q_heads: int

    @property
    def kv_values_per_token(self) -> int:
        """Numbers stored per token. For MLA models these are the expanded K and V, not the latent."""
        return self.kv_heads * (self.k_dim + self.v_dim)


def bytes_per_token(layers: Sequence[LayerGeometry], itemsize: int) -> int:
    """Bytes one token takes in the pool over all layers."""
    return sum(layer.kv_values_per_token for layer in layers) * itemsize


class OutOfSlots(PrefillLabError):
    """The KV pool has fewer free slots than a request needs."""


class KVPool:
    """K and V of every token slot, one pair of tensors a layer.

    `keys[i]` is [1 + num_tokens, kv_heads, k_dim], `values[i]` [1 + num_tokens, kv_heads, v_dim], both `dtype`.
    The extra slot 0 receives the rows of padding tokens and is never read by a request.
    """

    def __init__(self, device: Device, layers: Sequence[LayerGeometry], num_tokens: int, dtype: torch.dtype) -> None:
        self.layers = tuple(layers)
        self.num_tokens = num_tokens
        rows = num_tokens + 1
        self.keys = [device.empty((rows, layer.kv_heads, layer.k_dim), dtype) for layer in layers]
        self.values = [device.empty((rows, layer.kv_heads, layer.v_dim), dtype) for layer in layers]
        self._free: list[tuple[int, int]] = [(1, num_tokens)]
        self.row_bytes = [tensor[0].nbytes for tensor in (*self.keys, *self.values)]
        """Bytes of one token in each tensor."""

    @property
    def free_slots(self) -> int:
        """Slots nobody holds."""
        return sum(count for _, count in self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` slots, lowest first. Raises OutOfSlots and takes nothing when there are not enough."""
        if count > self.free_slots:
            raise OutOfSlots(f"{count} KV slots wanted, {self.free_slots} of {self.num_tokens} are free")
        taken: list[int] = []
        while len(taken) < count:
            start, size = self._free.pop(0)
            use = min(size, count - len(taken))
            taken.extend(range(start, start + use))
            if use < size:
                self._free.insert(0, (start + use, size - use))
        return tuple(taken)

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back; neighbouring free ranges become one again. Refused as a whole if nobody holds one."""
        for slot in slots:
            if not PADDING_SLOT < slot <= self.num_tokens:
                raise PrefillLabError(f"KV slot {slot} is not one of 1 to {self.num_tokens}")
        ranges = sorted([*self._free, *((slot, 1) for slot in slots)])
        merged: list[tuple[int, int]] = []
        for start, size in ranges:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            elif merged and merged[-1][0] + merged[-1][1] > start:
                raise PrefillLabError(f"KV slot {start} was released twice")
            else:
                merged.append((start, size))
        self._free = merged

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows: `key` [T, kv_heads, k_dim], `value` [T, kv_heads, v_dim], `slots` [T] int64."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)


def is_run(slots: Sequence[int]) -> bool:
    """Whether the slots are neighbours in rising order."""
    return all(after == before + 1 for before, after in pairwise(slots))
