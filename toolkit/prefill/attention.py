"""Attention as one custom operator over the KV pool, and the function Transformers calls for every decoder.

The function writes the new K and V rows to the pool, attends to everything the request has there (its prefix
included), and is where a breakable capture breaks. As an operator with a declared output and workspace it
looks the same to a capture, to torch.compile and to a memory trace: nobody sees how SDPA works inside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from toolkit.errors import CaptureError
from toolkit.prefill.batch import Span, StaticBuffers
from toolkit.prefill.kv_pool import KVPool, LayerGeometry

ATTENTION_NAME = "prefill_lab"
"""The name in `transformers.AttentionInterface`. It is no mask function, so Transformers builds no mask."""

_LIBRARY = torch.library.Library("prefill_lab", "DEF")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, int layer, float scaling, int window, float softcap, "
    "Tensor? sinks) -> Tensor"
)
_LIBRARY.define(
    "attend_into(Tensor query, Tensor(a!) out, int layer, float scaling, int window, float softcap, "
    "Tensor? sinks) -> ()"
)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends. `window` 0 and `softcap` 0 mean none; `sinks` is one logit a head or None."""

    layer: int
    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operator's arguments behind its tensors."""
        return (self.layer, self.scaling, self.window, self.softcap, self.sinks)


class AttentionHook(Protocol):
    """Who takes over at attention: a backend that breaks there, or a probe."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """`query` [T, q_heads, k_dim], `key`, `value` [T, kv_heads, dim] -> [T, q_heads, v_dim]."""


@dataclass(frozen=True)
class StaticAttention:
    """Metadata of the `full` backend at fixed addresses: request slots x context, filled before each replay.

    `kv_index` [slots * context] int64 pool slots; `row_request`, `row_position` [max_tokens] int64 (request -1
    for padding); `key_request`, `key_position` [slots * context] int64, constant.
    """

    kv_index: torch.Tensor
    row_request: torch.Tensor
    row_position: torch.Tensor
    key_request: torch.Tensor
    key_position: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor, for accounting."""
        return [self.kv_index, self.row_request, self.row_position, self.key_request, self.key_position]

    def mask(self, num_tokens: int, window: int) -> torch.Tensor:
        """Which keys each row may see, [num_tokens, slots * context] bool. Padding rows see key 0."""
        request, position = self.row_request[:num_tokens, None], self.row_position[:num_tokens, None]
        allowed = (self.key_request == request) & (self.key_position <= position)
        if window:
            allowed = allowed & (self.key_position > position - window)
        allowed[:, 0] |= request[:, 0] < 0
        return allowed


@dataclass
class ForwardContext:
    """What attention needs to know about the batch that runs now. One is active during every forward."""

    pool: KVPool
    buffers: StaticBuffers
    slot_mapping: torch.Tensor
    num_tokens: int
    spans: tuple[Span, ...] = ()
    static: StaticAttention | None = None
    hook: AttentionHook | None = None
    index_cache: dict[int, torch.Tensor] = field(default_factory=dict)
    mask_cache: dict[int, torch.Tensor] = field(default_factory=dict)

    def kv_rows(self, layer: int, number: int, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request in order, [S, kv_heads, dim]; a run of neighbouring slots needs no copy."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        if span.contiguous:
            rows = slice(span.slots[0], span.slots[-1] + 1)
            return keys[rows], values[rows]
        if number not in self.index_cache:
            self.index_cache[number] = torch.tensor(span.slots, dtype=torch.int64).to(keys.device)
        index = self.index_cache[number]
        return keys.index_select(0, index), values.index_select(0, index)


class _Contexts(threading.local):
    """Batches under way in one thread: a forecast may trace in one while another runs."""

    def __init__(self) -> None:
        self.stack: list[ForwardContext] = []


_active = _Contexts()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the one attention looks at."""
    _active.stack.append(context)
    try:
        yield
    finally:
        _active.stack.pop()


def active_context() -> ForwardContext:
    """The batch that runs now. Raises CaptureError outside a forward of this toolkit."""
    if not _active.stack:
        raise CaptureError(f"attention {ATTENTION_NAME!r} was called outside a forward pass of the toolkit")
    return _active.stack[-1]


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers calls in every layer. `query` [1, q_heads, T, k_dim], `key`, `value` [1, kv_heads, T, dim].

    Returns ([1, T, q_heads, v_dim], None). Causality comes from the pool, never from `attention_mask`.
    """
    spec = AttentionSpec(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scaling=float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5,
        window=int(sliding_window or 0),
        softcap=float(softcap or 0.0),
        sinks=s_aux,
    )
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    hook = None if torch.compiler.is_compiling() else active_context().hook
    out = hook.attend(*rows, spec) if hook else torch.ops.prefill_lab.attention(*rows, *spec.arguments)
    return out.unsqueeze(0), None


def register_attention() -> str:
    """Make the function known to Transformers, once; returns its name for `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_function)
    return ATTENTION_NAME


def _attention_real(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any) -> torch.Tensor:
    context = active_context()
    spec = AttentionSpec(*arguments)
    context.pool.store(spec.layer, key, value, context.slot_mapping)
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
    attend(context, query, out, spec)
    return out


def _attention_meta(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[-1])


def _attend_into_real(query: torch.Tensor, out: torch.Tensor, *arguments: Any) -> None:
    attend(active_context(), query, out, AttentionSpec(*arguments))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention", _attention_real, _key)
    _LIBRARY.impl("attend_into", _attend_into_real, _key)
_LIBRARY.impl("attention", _attention_meta, "Meta")
_LIBRARY.impl("attend_into", lambda *_: None, "Meta")


def declared_workspace_bytes(arguments: tuple[Any, ...]) -> int:
    """Bytes attention takes and gives back inside one call, as charged on a device that is accounted.

    `arguments` are the operator's. Ragged attention over neighbouring slots streams through K and V in place
    and is charged nothing; gathered rows and the static mask of `full` are charged for one layer at a time.
    """
    context = active_context()
    query, layer = arguments[0], next(item for item in arguments if isinstance(item, int))
    per_row: int = context.pool.layers[layer].kv_values_per_token * query.element_size()
    if context.static is not None:
        keys = context.static.kv_index.numel()
        return keys * per_row + keys * context.num_tokens
    return max((len(span.slots) * per_row for span in context.spans if not span.contiguous), default=0)


def attend(context: ForwardContext, query: torch.Tensor, out: torch.Tensor, spec: AttentionSpec) -> None:
    """Attention of `query` [T, q_heads, k_dim] over the pool into `out` [T, q_heads, v_dim]."""
    if context.static is not None:
        return _attend_static(context, context.static, query, out, spec)
    covered = 0
    for number, span in enumerate(context.spans):
        rows = slice(span.start, span.start + span.length)
        keys, values = context.kv_rows(spec.layer, number, span)
        causal = span.prefix == 0 and not (spec.window and spec.window < span.length)
        mask = None if causal else _span_mask(span, spec.window, query.device)
        out[rows] = _attend_one(query[rows], keys, values, mask, spec)
        covered = span.start + span.length
    out[covered:] = 0  # padding rows: defined, so that nothing downstream meets garbage


def _attend_static(
    context: ForwardContext, static: StaticAttention, query: torch.Tensor, out: torch.Tensor, spec: AttentionSpec
) -> None:
    keys = context.pool.keys[spec.layer].index_select(0, static.kv_index)
    values = context.pool.values[spec.layer].index_select(0, static.kv_index)
    if spec.window not in context.mask_cache:  # computed once a pass, by its first layer
        context.mask_cache[spec.window] = static.mask(context.num_tokens, spec.window)
    out.copy_(_attend_one(query, keys, values, context.mask_cache[spec.window], spec))


def _span_mask(span: Span, window: int, device: torch.device) -> torch.Tensor:
    """[length, prefix + length] bool: causal against the end of the request, within the window if there is one."""
    position = torch.arange(span.prefix, span.prefix + span.length, device=device)[:, None]
    key = torch.arange(len(span.slots), device=device)
    allowed = key <= position
    return allowed & (key > position - window) if window else allowed


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, keys, values))
    if spec.softcap or spec.sinks is not None:
        return _attend_by_hand(q, k, v, mask, spec)
    if query.is_cuda and mask is not None:
        # With a mask only the memory-efficient kernel stays linear in memory, and it knows no grouped heads.
        k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in (k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def _attend_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    """Soft-capped logits and attention sinks, which SDPA does not offer (Gemma 2, gpt-oss)."""
    k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * spec.scaling
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    if spec.sinks is not None:
        sink = spec.sinks.float().view(1, -1, 1, 1).expand(1, -1, scores.shape[-2], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[-2]].to(v.dtype)
    return (weights @ v)[0].transpose(0, 1)


def probe_geometry(body: torch.nn.Module, num_tokens: int = 4) -> list[LayerGeometry]:
    """What every attention layer stores and asks, found by one forward of `body` on meta tensors.

    `body` must live on the meta device. Returns one entry per attention layer, in the order they run.
    """
    probe = _Probe()
    ids = torch.zeros((1, num_tokens), dtype=torch.int64, device="meta")
    context = ForwardContext(None, None, ids[0], num_tokens, hook=probe)  # type: ignore[arg-type]
    with forward_context(context), torch.no_grad():
        body(input_ids=ids, position_ids=ids, use_cache=False)
    return [probe.seen[layer] for layer in sorted(probe.seen)]


class _Probe:
    def __init__(self) -> None:
        self.seen: dict[int, LayerGeometry] = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        self.seen[spec.layer] = LayerGeometry(key.shape[1], key.shape[2], value.shape[2], query.shape[1])
        return query.new_empty(query.shape[0], query.shape[1], value.shape[2])
