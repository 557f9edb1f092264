"""Packed requests, and the static input buffers that every bucket shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from toolkit.prefill.kv_pool import PADDING_SLOT, KVPool, LayerGeometry, is_run

if TYPE_CHECKING:
    import torch

    from toolkit.prefill.devices.base import Device


@dataclass(frozen=True)
class Span:
    """One request inside a packed batch: `length` new tokens from row `start`, after `prefix` tokens in the pool.

    `slots` are the pool slots of the whole request in order, prefix first.
    """

    start: int
    length: int
    prefix: int
    slots: tuple[int, ...]

    @cached_property
    def contiguous(self) -> bool:
        """Whether the slots are one run, so that K and V can be read without a copy."""
        return is_run(self.slots)


@dataclass(frozen=True)
class PackedBatch:
    """Several requests one behind the other. `tokens`, `positions` and `slots` have one entry per new token."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens in the batch, without padding."""
        return len(self.tokens)

    @property
    def last_rows(self) -> list[int]:
        """Row of the last new token of every request: where logits are wanted."""
        return [span.start + span.length - 1 for span in self.spans]


@dataclass
class Request:
    """A prompt on its way: the tokens still to be prefilled, and the slots it holds (prefix first)."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...] = field(default=())

    @property
    def prefix(self) -> int:
        """Tokens already in the pool."""
        return len(self.slots)


def pack(requests: Sequence[Request], pool: KVPool) -> PackedBatch:
    """Give every request slots for its new tokens and pack all of them.

    Changes `request.slots`. Raises OutOfSlots when the pool is full; requests packed before it keep their slots.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans = []
    for request in requests:
        prefix, length = request.prefix, len(request.tokens)
        new = pool.allocate(length)
        request.slots = (*request.slots, *new)
        spans.append(Span(len(tokens), length, prefix, request.slots))
        tokens.extend(request.tokens)
        positions.extend(range(prefix, prefix + length))
        slots.extend(new)
    return PackedBatch(tuple(tokens), tuple(positions), tuple(slots), tuple(spans))


class StaticBuffers:
    """The tensors graphs are bound to, made once for the largest bucket and shared by all of them.

    `input_ids`, `position_ids`, `slot_mapping`: [max_tokens] int64. `hidden`: [max_tokens, hidden_size], the one
    output of every bucket. `queries` and `attended`: what crosses a break, flat per token, shared by all layers.
    Held here strongly for as long as any graph lives: weak references across a break are what the public
    report sgl-project/sglang#37606 traces wrong outputs to.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[LayerGeometry],
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        import torch

        self.max_tokens = max_tokens
        self.device = device
        self.input_ids = device.empty((max_tokens,), torch.int64)
        self.position_ids = device.empty((max_tokens,), torch.int64)
        self.slot_mapping = device.empty((max_tokens,), torch.int64)
        self.hidden = device.empty((max_tokens, hidden_size), dtype)
        self.queries = device.empty((max_tokens * max((x.q_heads * x.k_dim for x in layers), default=0),), dtype)
        self.attended = device.empty((max_tokens * max((x.q_heads * x.v_dim for x in layers), default=0),), dtype)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every buffer, for accounting."""
        inputs = [self.input_ids, self.position_ids, self.slot_mapping]
        return [*inputs, self.hidden, self.queries, self.attended]

    def load(self, batch: PackedBatch, num_tokens: int) -> None:
        """Copy a batch in and pad it to `num_tokens`: token 0 at position 0, written to the padding slot."""
        import torch

        padding = num_tokens - batch.num_tokens
        for buffer, values, filler in (
            (self.input_ids, batch.tokens, 0),
            (self.position_ids, batch.positions, 0),
            (self.slot_mapping, batch.slots, PADDING_SLOT),
        ):
            row = torch.tensor((*values, *(filler,) * padding), dtype=torch.int64)
            buffer[:num_tokens].copy_(row)

    def query_view(self, num_tokens: int, layer: LayerGeometry) -> torch.Tensor:
        """The query buffer as [num_tokens, q_heads, k_dim]."""
        count = num_tokens * layer.q_heads * layer.k_dim
        return self.queries[:count].view(num_tokens, layer.q_heads, layer.k_dim)

    def attended_view(self, num_tokens: int, layer: LayerGeometry) -> torch.Tensor:
        """The attention output buffer as [num_tokens, q_heads, v_dim]."""
        count = num_tokens * layer.q_heads * layer.v_dim
        return self.attended[:count].view(num_tokens, layer.q_heads, layer.v_dim)
