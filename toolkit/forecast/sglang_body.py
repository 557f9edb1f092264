"""SGLang's decoder body as a list of allocations: which buffers one forward takes and gives back, in order.

SGLang runs fused kernels, so its body differs from plain Transformers: add and norm are one kernel that works in
place, as are rotary embedding and the norms of q and k; qkv is one product, gate and up are another, and silu-and-mul
has an output of its own. The order of the buffers is that of SGLang's model and layer files of July to September 2026
(`models/llama.py`, `models/qwen3_moe.py`, `models/deepseek_v2.py`, `layers/radix_attention.py`,
`layers/moe/moe_runner/triton_utils/fused_moe.py`, `.../marlin.py`, github.com/sgl-project/sglang). Every size is a
number of bytes a token, so one list serves every bucket. No model is built and no weight is needed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from toolkit.errors import InvalidInput
from toolkit.memory.rank_local import rank_local_config
from toolkit.memory.trace import AllocationTrace

Weights = Literal["bf16", "fp8", "int4", "mxfp4"]
LayerKind = Literal["dense", "moe"]

WEIGHTS: tuple[Weights, ...] = ("bf16", "fp8", "int4", "mxfp4")
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_FP8_GROUP = 128  # block-wise fp8: one float32 scale for 128 activations of a token
_FOUR_BYTES = 4  # scales, router weights and expert numbers
_PERIOD = 4
"""Layers of one kind that are replayed: from then on each takes the blocks of the one before (a test checks it)."""


@dataclass(frozen=True, slots=True)
class BodyShape:
    """What one rank's decoder body allocates by: widths are numbers of values a token, on this rank.

    Attributes:
        hidden: width of the residual stream.
        layers: kinds of the layers, in order.
        qkv: width of the fused qkv product; for MLA of the fused down projection.
        attention: width of the attention output; for MLA all heads' latents.
        mla: widths of q's norm, q, absorbed q, the rotated concatenation and the up-projected output; () without MLA.
        dense: width of a dense feed-forward layer.
        expert: width of one expert.
        shared: width of the shared experts together, 0 without.
        experts: their number.
        top_k: experts a token goes to.
        itemsize: bytes of one activation.
        weights: how the linear layers are stored.
        reduces_out_of_place: whether each all-reduce has an output of its own.
    """

    hidden: int
    layers: tuple[LayerKind, ...]
    qkv: int
    attention: int
    mla: tuple[int, ...] = ()
    dense: int = 0
    expert: int = 0
    shared: int = 0
    experts: int = 0
    top_k: int = 0
    itemsize: int = 2
    weights: Weights = "bf16"
    reduces_out_of_place: bool = False


def body_shape(
    config: Any, tp: int = 1, dtype: str = "bfloat16", weights: Weights = "bf16", *, compiled: bool = False
) -> BodyShape:
    """The shape of one rank's body.

    Args:
        config: a published config: a mapping (such as a catalogue entry's) or a Transformers config. Of a multimodal
            one the text half is used.
        tp: ranks that share the layers.
        dtype: of the activations.
        weights: how the linear layers are stored. `int4` and `mxfp4` run the Marlin kernels, whose activations stay
            in `dtype`.
        compiled: whether torch.compile runs the body (`tc_piecewise`), where all-reduces are out of place.

    Raises:
        InvalidInput: tp does not divide the model, the dtype or the weights are unknown, or a layer does not attend.
    """
    if dtype not in ITEMSIZES:
        raise InvalidInput(f"dtype {dtype!r} is unknown to the forecast", ", ".join(ITEMSIZES))
    if weights not in WEIGHTS:
        raise InvalidInput(f"weights {weights!r} are unknown to the forecast", ", ".join(WEIGHTS))
    local = rank_local_config(_text_config(config), tp)
    kinds = _layer_kinds(local)
    shared = _first(local, "shared_expert_intermediate_size") or 0
    expert = _first(local, "moe_intermediate_size", "intermediate_size") or 0
    shared = shared or (_first(local, "n_shared_experts") or 0) * expert
    is_moe = "moe" in kinds
    qkv, attention, mla = _mla_widths(local) if _first(local, "kv_lora_rank") else _gqa_widths(local)
    return BodyShape(
        hidden=local.hidden_size,
        layers=kinds,
        qkv=qkv,
        attention=attention,
        mla=mla,
        dense=local.intermediate_size,
        expert=expert if is_moe else 0,
        shared=shared if is_moe else 0,
        experts=_experts(local) if is_moe else 0,
        top_k=(_first(local, "num_experts_per_tok") or 0) if is_moe else 0,
        itemsize=ITEMSIZES[dtype],
        weights=weights,
        reduces_out_of_place=compiled and tp > 1,
    )


def _text_config(config: Any) -> Any:
    if isinstance(config, Mapping):
        config = SimpleNamespace(**config)
    text = getattr(config, "text_config", None)
    return config if text is None else _text_config(text)


def _first(config: Any, *names: str) -> int | None:
    """The first of these attributes that is set."""
    return next((int(value) for name in names if (value := getattr(config, name, None))), None)


def _experts(config: Any) -> int:
    return _first(config, "num_experts", "n_routed_experts", "num_local_experts") or 0


def _layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    strange = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if strange:
        raise InvalidInput(
            f"layers of type {sorted(strange)[0]!r} are not in the sglang forecast",
            "it models full and sliding attention, dense and MoE layers, and MLA",
            "use --engine transformers, or measure",
        )
    dense_first, step = _first(config, "first_k_dense_replace") or 0, _first(config, "decoder_sparse_step") or 1
    dense_ones = set(getattr(config, "mlp_only_layers", None) or ())
    has_experts = _experts(config) > 0

    def kind(layer: int) -> LayerKind:
        sparse = has_experts and layer >= dense_first and layer not in dense_ones and (layer + 1) % step == 0
        return "moe" if sparse else "dense"

    return tuple(kind(layer) for layer in range(config.num_hidden_layers))


def _gqa_widths(config: Any) -> tuple[int, int, tuple[int, ...]]:
    heads = config.num_attention_heads
    kv_heads = _first(config, "num_key_value_heads") or heads
    head_dim = _first(config, "head_dim") or config.hidden_size // heads
    return (heads + 2 * kv_heads) * head_dim, heads * head_dim, ()


def _mla_widths(config: Any) -> tuple[int, int, tuple[int, ...]]:
    """Absorbed MLA, the way SGLang attends inside a prefill graph (`_handle_attention_backend`)."""
    heads, latent, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    q_rank = _first(config, "q_lora_rank") or 0
    q = heads * (config.qk_nope_head_dim + rope)
    widths = (q_rank + latent, q, heads * latent, heads * (latent + rope), heads * config.v_head_dim)
    return q_rank + latent + rope, heads * latent, widths


# --- the tape -----------------------------------------------------------------------------------------------


class BodyTape:
    """The allocations of one forward for any token count.

    Attributes:
        bytes_per_token: of each allocation, in order.
        events: as in `AllocationTrace`.
    """

    def __init__(self) -> None:
        self.bytes_per_token: list[int] = []
        self.events: list[int] = []

    def take(self, nbytes: int) -> int:
        """An allocation of so many bytes a token; its number."""
        self.bytes_per_token.append(nbytes)
        self.events.append(len(self.bytes_per_token) - 1)
        return self.events[-1]

    def give(self, *numbers: int) -> None:
        """These allocations end, in this order."""
        self.events.extend(~number for number in numbers)

    def at(self, num_tokens: int) -> AllocationTrace:
        """The trace of that many tokens."""
        return AllocationTrace(tuple(size * num_tokens for size in self.bytes_per_token), tuple(self.events))


@functools.lru_cache(maxsize=64)
def body_tape(shape: BodyShape, *, whole: bool = False) -> BodyTape:
    """What one forward of the body allocates, from the embeddings to the last hidden state, which stays.

    Args:
        shape: of one rank's body.
        whole: every layer. Otherwise no more than a few of each run of equal layers, which is enough to know the pool.
    """
    tape = BodyTape()
    width = shape.hidden * shape.itemsize
    residual = tape.take(width)  # the embeddings become the residual stream
    hidden = tape.take(width)  # the first norm has an output, all later ones work in place
    for kind, run in itertools.groupby(shape.layers):
        count = len(list(run))
        for _ in range(count if whole else min(count, _PERIOD)):
            hidden = _attention(tape, shape, hidden)
            hidden = _MLPS[kind](tape, shape, hidden)
    tape.give(residual)
    return tape


def _linear(tape: BodyTape, shape: BodyShape, width_in: int, width_out: int) -> int:
    """A product; with fp8 weights its input is first quantised, into buffers that go when it is done."""
    quantised = []
    if shape.weights == "fp8":
        quantised = [tape.take(width_in), tape.take(_fp8_scales(width_in))]
    out = tape.take(width_out * shape.itemsize)
    tape.give(*quantised)
    return out


def _fp8_scales(width: int) -> int:
    return -(-width // _FP8_GROUP) * _FOUR_BYTES


def _reduced(tape: BodyTape, shape: BodyShape, hidden: int) -> int:
    """The all-reduce behind a row-parallel product, where it is out of place."""
    if not shape.reduces_out_of_place:
        return hidden
    out = tape.take(shape.hidden * shape.itemsize)
    tape.give(hidden)
    return out


def _attention(tape: BodyTape, shape: BodyShape, hidden: int) -> int:
    """Up to the output projection. q, k and v are views of one buffer; attention writes into a prepared output."""
    size = shape.itemsize
    qkv = _linear(tape, shape, shape.hidden, shape.qkv)
    held = [qkv]
    if shape.mla:
        norms, q, absorbed, rotated, out = shape.mla
        held += [tape.take(width * size) for width in (norms, q, absorbed, rotated)]
        held.append(tape.take(shape.attention * size))
        held.append(tape.take(out * size))
        width_in = out
    else:
        held.append(tape.take(shape.attention * size))
        width_in = shape.attention
    projected = _reduced(tape, shape, _linear(tape, shape, width_in, shape.hidden))
    tape.give(*held, hidden)
    return projected


def _gated(tape: BodyTape, shape: BodyShape, width: int) -> int:
    """gate-and-up, silu-and-mul, down: all three buffers are alive at the end of the third."""
    gate_up = _linear(tape, shape, shape.hidden, 2 * width)
    activated = tape.take(width * shape.itemsize)
    down = _linear(tape, shape, width, shape.hidden)
    tape.give(gate_up, activated)
    return down


def _dense_mlp(tape: BodyTape, shape: BodyShape, hidden: int) -> int:
    down = _reduced(tape, shape, _gated(tape, shape, shape.dense))
    tape.give(hidden)
    return down


def _moe_mlp(tape: BodyTape, shape: BodyShape, hidden: int) -> int:
    """Router, shared experts, routed experts; the routed output is written over their input if nobody else needs it."""
    router = [tape.take(shape.experts * shape.itemsize)]
    router += [tape.take(shape.top_k * _FOUR_BYTES) for _ in ("weights", "expert numbers", "sorted tokens")]
    shared = _gated(tape, shape, shape.shared) if shape.shared else None
    fused = _marlin_experts if shape.weights in ("int4", "mxfp4") else _triton_experts
    out = fused(tape, shape, hidden, in_place=shared is None)
    tape.give(*router)
    if shared is not None:
        tape.give(shared)
    if out != hidden:
        tape.give(hidden)
    return _reduced(tape, shape, out)


def _triton_experts(tape: BodyTape, shape: BodyShape, hidden: int, *, in_place: bool) -> int:
    """Two grouped products over tokens x top_k rows, each with its own output; the first goes before the third."""
    row = shape.top_k * shape.itemsize
    out = hidden if in_place else tape.take(shape.hidden * shape.itemsize)
    first = tape.take(row * 2 * shape.expert)
    if shape.weights == "fp8":
        tape.give(tape.take(shape.hidden))
    second = tape.take(row * shape.expert)
    tape.give(first)
    third = tape.take(row * shape.hidden)
    if shape.weights == "fp8":
        rows = [tape.take(shape.top_k * shape.expert), tape.take(shape.top_k * _fp8_scales(shape.expert))]
        tape.give(*rows)
    tape.give(second, third)
    return out


def _marlin_experts(tape: BodyTape, shape: BodyShape, hidden: int, *, in_place: bool) -> int:
    """Marlin's products share one buffer for the first and third output."""
    row = shape.top_k * shape.itemsize
    second = tape.take(row * shape.expert)
    both = tape.take(row * max(2 * shape.expert, shape.hidden))
    out = hidden if in_place else tape.take(shape.hidden * shape.itemsize)
    tape.give(second, both)
    return out


_MLPS = {"dense": _dense_mlp, "moe": _moe_mlp}
