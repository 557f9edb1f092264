"""Parameters of one rank by name and number, and the bytes they take as stored: counted from the config, no torch.

Families whose shapes follow from their config alone are counted here; others are built on the meta device, which
needs torch and Transformers. What a rank holds is what its rank-local config counts: heads, feed-forward widths (of
each expert) and the vocabulary are divided by tp; norms, routers, MLA's down projections and KV heads fewer than
ranks are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InvalidInput
from toolkit.memory.rank_local import rank_local_config
from toolkit.resources import IMPORTING, short


@dataclass(frozen=True, slots=True)
class Parameter:
    """Elements of the parameter `name` (as Transformers names it), summed over the layers that have it."""

    name: str
    elements: int


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family differs from Llama: biases, norms of q and k, norms of a layer, and its feed-forward."""

    attention: Callable[[Any, _Family], Iterator[Parameter]]
    qk_norm: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qkv_bias: bool = False
    bias_follows_config: bool = True
    sinks: bool = False
    router: str = "gate"
    router_extra: str | None = None
    expert_bias: bool = False


def rank_parameters(config: Any, tp: int = 1) -> list[Parameter]:
    """What one of `tp` ranks holds.

    Args:
        config: a text decoder's config, anything with its attributes.
        tp: tensor parallel size.

    Raises:
        InvalidInput: tp does not divide the heads or a width.
    """
    local = rank_local_config(config, tp)
    family = _FAMILIES.get(str(getattr(config, "model_type", "")))
    return list(_count(local, family)) if family is not None else _built(local)


def is_counted(config: Any) -> bool:
    """Whether the parameters follow from the config alone; otherwise the model is built on the meta device."""
    return getattr(config, "model_type", None) in _FAMILIES


def stored_gib(parameters: list[Parameter], bits: Callable[[str], float]) -> float:
    """GiB that parameters take when each element of one takes `bits(name)` bits, scales included."""
    return sum(parameter.elements * bits(parameter.name) for parameter in parameters) / 8 / (1 << 30)


# --- counting -----------------------------------------------------------------------------------------------


def _count(config: Any, family: _Family) -> Iterator[Parameter]:
    hidden, layers = config.hidden_size, config.num_hidden_layers
    yield Parameter("model.embed_tokens.weight", config.vocab_size * hidden)
    if not getattr(config, "tie_word_embeddings", False):
        yield Parameter("lm_head.weight", config.vocab_size * hidden)
    yield Parameter("model.norm.weight", hidden)
    each = [*(Parameter(f"{name}.weight", hidden) for name in family.norms), *family.attention(config, family)]
    yield from _of_layers(each, range(layers))
    sparse = _sparse_layers(config)
    yield from _of_layers(
        _gated(config, "mlp", config.intermediate_size), [n for n in range(layers) if n not in sparse]
    )
    yield from _of_layers(_experts(config, family), sorted(sparse))


def _of_layers(each: list[Parameter], layers: range | list[int]) -> Iterator[Parameter]:
    for parameter in each if layers else ():
        yield Parameter(f"model.layers.{layers[0]}.{parameter.name}", parameter.elements * len(layers))


def _gqa(config: Any, family: _Family) -> Iterator[Parameter]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or hidden // heads
    follows = family.bias_follows_config and bool(getattr(config, "attention_bias", False))
    for name, width in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
        yield Parameter(f"self_attn.{name}_proj.weight", hidden * width)
        if follows or family.qkv_bias:
            yield Parameter(f"self_attn.{name}_proj.bias", width)
    yield Parameter("self_attn.o_proj.weight", heads * head * hidden)
    if follows:
        yield Parameter("self_attn.o_proj.bias", hidden)
    if family.qk_norm:
        yield Parameter("self_attn.q_norm.weight", head)
        yield Parameter("self_attn.k_norm.weight", head)
    if family.sinks:
        yield Parameter("self_attn.sinks", heads)


def _mla(config: Any, family: _Family) -> Iterator[Parameter]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    rope, nope, value = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    q_rank = getattr(config, "q_lora_rank", None)
    if q_rank:
        yield Parameter("self_attn.q_a_proj.weight", hidden * q_rank)
        yield Parameter("self_attn.q_a_layernorm.weight", q_rank)
        yield Parameter("self_attn.q_b_proj.weight", q_rank * heads * (nope + rope))
    else:
        yield Parameter("self_attn.q_proj.weight", hidden * heads * (nope + rope))
    yield Parameter("self_attn.kv_a_proj_with_mqa.weight", hidden * (latent + rope))
    yield Parameter("self_attn.kv_a_layernorm.weight", latent)
    yield Parameter("self_attn.kv_b_proj.weight", latent * heads * (nope + value))
    yield Parameter("self_attn.o_proj.weight", heads * value * hidden)
    if getattr(config, "attention_bias", False):
        yield Parameter("self_attn.q_a_proj.bias", q_rank or 0)
        yield Parameter("self_attn.kv_a_proj_with_mqa.bias", latent + rope)
        yield Parameter("self_attn.o_proj.bias", hidden)


def _gated(config: Any, where: str, width: int) -> list[Parameter]:
    each = [Parameter(f"{where}.{name}_proj.weight", config.hidden_size * width) for name in ("gate", "up", "down")]
    if getattr(config, "mlp_bias", False):
        each += [Parameter(f"{where}.{name}_proj.bias", width) for name in ("gate", "up")]
        each.append(Parameter(f"{where}.down_proj.bias", config.hidden_size))
    return each


def _experts(config: Any, family: _Family) -> list[Parameter]:
    count = _expert_count(config)
    if not count:
        return []
    hidden = config.hidden_size
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    each = [
        Parameter(f"mlp.{family.router}.weight", count * hidden),
        Parameter("mlp.experts.gate_up_proj", count * hidden * 2 * width),
        Parameter("mlp.experts.down_proj", count * width * hidden),
    ]
    if family.router_extra is not None:
        each.append(Parameter(f"mlp.{family.router}.{family.router_extra}", count))
    if family.expert_bias:
        each.append(Parameter("mlp.experts.gate_up_proj_bias", count * 2 * width))
        each.append(Parameter("mlp.experts.down_proj_bias", count * hidden))
    shared = getattr(config, "n_shared_experts", None)
    return each + (_gated(config, "mlp.shared_experts", shared * width) if shared else [])


def _expert_count(config: Any) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((int(count) for name in names if (count := getattr(config, name, None))), 0)


def _sparse_layers(config: Any) -> set[int]:
    """Layers whose feed-forward is a mixture of experts."""
    if not _expert_count(config):
        return set()
    first = getattr(config, "first_k_dense_replace", None) or 0
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    return {n for n in range(first, config.num_hidden_layers) if n not in dense and (n + 1) % step == 0}


_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_FAMILIES = {
    "llama": _Family(_gqa),
    "mistral": _Family(_gqa, bias_follows_config=False),
    "qwen2": _Family(_gqa, qkv_bias=True, bias_follows_config=False),
    "qwen3": _Family(_gqa, qk_norm=True),
    "qwen3_moe": _Family(_gqa, qk_norm=True),
    "gemma3_text": _Family(_gqa, qk_norm=True, norms=_GEMMA_NORMS),
    "gpt_oss": _Family(_gqa, sinks=True, router="router", router_extra="bias", expert_bias=True),
    "deepseek_v3": _Family(_mla, router_extra="e_score_correction_bias"),
}
"""Families whose parameters are counted; tests compare each with the published number of parameters."""


# --- building -----------------------------------------------------------------------------------------------


def _built(config: Any) -> list[Parameter]:
    """The parameters of the model as Transformers builds it, on the meta device; tied ones once."""
    import torch

    try:
        with IMPORTING, torch.device("meta"):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # code of many families meets somebody's config
        raise InvalidInput(
            f"a model of type {getattr(config, 'model_type', None)!r} cannot be built from its config ({short(error)})",
            f"families counted without building are {', '.join(_FAMILIES)}",
            "check the file",
        ) from None
    return [Parameter(name, parameter.numel()) for name, parameter in model.named_parameters()]
