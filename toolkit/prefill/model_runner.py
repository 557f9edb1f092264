"""ModelRunner: a model on a device with its KV pool and static buffers, ready to run packed batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from toolkit.prefill.attention import ForwardContext, StaticAttention, forward_context, probe_geometry
from toolkit.prefill.batch import PackedBatch, Request, StaticBuffers, pack
from toolkit.prefill.kv_pool import KVPool, LayerGeometry
from toolkit.settings import Backend

if TYPE_CHECKING:
    from toolkit.prefill.devices.base import Device


_RECURRENT_MIXERS = ("mamba", "ssm", "linear_attn", "conv", "temporal_block")


def resolve_language_model(model: Any) -> Any | None:
    """The decoder body inside `model`, or None when there is none (SGLang's name and meaning).

    The body is what takes token ids and returns the last hidden state: `model.model` of a causal LM, the text
    tower of a multimodal one.
    """
    for candidate in (model, getattr(model, "model", None)):
        tower = getattr(candidate, "language_model", None)
        if tower is not None:
            return getattr(tower, "model", tower)
    body = getattr(model, "model", None)
    return body if isinstance(body, torch.nn.Module) else None


def compute_attention_and_moe_layers(body: Any) -> tuple[list[Any], list[Any]]:
    """(attention modules, MoE modules) of the decoder layers, in order (SGLang's name and meaning).

    Fewer attention modules than layers means that some layers do not apply standard GQA. A layer that also
    carries a recurrent mixer is not one that does: its state would leak between packed requests.
    """
    attention, moe = [], []
    for layer in getattr(body, "layers", []):
        module = getattr(layer, "self_attn", None)
        recurrent = any(getattr(layer, name, None) is not None for name in _RECURRENT_MIXERS)
        if module is not None and hasattr(module, "layer_idx") and not recurrent:
            attention.append(module)
        feed_forward = getattr(layer, "mlp", None)
        if feed_forward is not None and hasattr(feed_forward, "experts"):
            moe.append(feed_forward)
    return attention, moe


def model_geometry(config: Any) -> list[LayerGeometry]:
    """What each attention layer stores, by one forward of a weightless copy of the model on the meta device."""
    from toolkit.prefill.attention import ATTENTION_NAME, register_attention
    from toolkit.weights import meta_model

    register_attention()
    # bf16 whatever the model runs in: the meta kernel of grouped_mm (mixtures of experts) takes nothing else.
    model = meta_model(config, torch.bfloat16, ATTENTION_NAME)
    body = resolve_language_model(model)
    return probe_geometry(body) if body is not None and hasattr(body, "layers") else []


@dataclass
class ModelRunner:
    """Everything one rank holds. Built after weights and KV pool are in place; the capture comes later.

    `context_length` is the longest request the model takes, `request_slots` and `max_context` size the `full`
    backend. `locked_keys` are what the user chose by hand; `reserve_gib` is what has to stay free (None: by default),
    `post_capture_gib` what is declared to be needed after the capture.
    """

    device: Device
    model: Any
    kv_pool: KVPool
    buffers: StaticBuffers
    buckets: tuple[int, ...]
    backend: str
    context_length: int
    policy: str = "ungated"
    reserve_gib: float | None = None
    post_capture_gib: float = 0.0
    role: str = "target"
    compiler: str = "eager"
    request_slots: int = 4
    max_context: int = 2048
    max_requests: int = 4096
    locked_keys: frozenset[tuple[str, str]] = frozenset()
    tokenizer: Any = None
    eagle_target: bool = False
    lora_unsupported: bool = False
    _static: StaticAttention | None = field(default=None, repr=False)

    @property
    def body(self) -> Any:
        """The decoder body that graphs capture."""
        return resolve_language_model(self.model)

    @property
    def capture_limits(self) -> tuple[int, int]:
        """(requests, tokens of context each) one bucket of the backend can serve."""
        if self.backend == Backend.FULL:
            return self.request_slots, min(self.max_context, self.context_length)
        return self.max_requests, self.context_length

    @property
    def static_attention(self) -> StaticAttention:
        """The `full` backend's metadata, made on first use and charged to the device."""
        if self._static is None:
            self._static = _make_static_attention(
                self.device, self.request_slots, self.max_context, self.buffers.max_tokens
            )
        return self._static

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Last hidden state [T, hidden_size] of packed tokens [T]; attention looks at the active context."""
        output = self.body(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def forward_eager(self, batch: PackedBatch) -> torch.Tensor:
        """Hidden states [T, hidden_size] of a batch, unpadded and without any graph."""
        place = self.device.torch_device
        ids, positions, slots = (
            torch.tensor(values, dtype=torch.int64).to(place) for values in (batch.tokens, batch.positions, batch.slots)
        )
        context = ForwardContext(self.kv_pool, self.buffers, slots, batch.num_tokens, spans=batch.spans)
        with torch.no_grad(), forward_context(context):
            return self.forward(ids, positions)

    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [len(rows), vocabulary] fp32 of some rows of `hidden`; `lm_head` always runs eager."""
        config = self.model.config.get_text_config()
        with torch.no_grad():
            scores: torch.Tensor = self.model.get_output_embeddings()(hidden[list(rows)]).float()
        scores = scores * float(getattr(config, "logit_scale", None) or 1.0)
        scores = scores / float(getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return torch.tanh(scores / cap) * cap if cap else scores

    def dummy_batch(self, num_tokens: int) -> PackedBatch:
        """`num_tokens` zeros in requests as long as the backend takes; the caller releases their slots."""
        _, longest = self.capture_limits
        pieces = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
        return pack([Request((0,) * length) for length in pieces], self.kv_pool)


def _make_static_attention(device: Device, slots: int, context: int, max_tokens: int) -> StaticAttention:
    keys = slots * context
    static = StaticAttention(
        kv_index=device.empty((keys,), torch.int64),
        row_request=device.empty((max_tokens,), torch.int64),
        row_position=device.empty((max_tokens,), torch.int64),
        key_request=device.empty((keys,), torch.int64),
        key_position=device.empty((keys,), torch.int64),
    )
    static.key_request.copy_(torch.arange(slots).repeat_interleave(context))
    static.key_position.copy_(torch.arange(context).repeat(slots))
    return static
