"""One rank of a tensor-parallel server as a model of its own: a config with this rank's share of heads and widths.

No process group is needed: the rank-local model has the shapes of one rank, so that its traces and its parameter
count are those of the rank. What is replicated on every rank (norms, routers, MLA's down projections) stays whole.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from toolkit.errors import InvalidInput

MAX_TP = 64
_VOCAB_UNIT = 64
"""Vocabularies are padded to a multiple of this before they are split, as SGLang and vLLM do."""
_WIDTH_UNIT = 8
"""Feed-forward widths are padded to this many values: products of experts want rows of whole 16 bytes."""
# Widths of feed-forward layers, of each expert and of the shared expert.
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")

_Config = TypeVar("_Config")


def rank_local_config(config: _Config, tp: int) -> _Config:
    """A copy of a text decoder's Transformers config with what one of `tp` ranks holds.

    Query heads, feed-forward widths (of every expert) and the vocabulary are divided; KV heads are divided as far as
    they go and repeated beyond. The experts' number stays: plain tensor parallelism splits each of them.

    Raises:
        InvalidInput: tp is out of range, or does not divide the heads or a width.
    """
    if not 1 <= tp <= MAX_TP:
        raise InvalidInput(f"tp {tp} is out of range", f"1 to {MAX_TP} ranks", "for example --tp 8")
    local: Any = copy.deepcopy(config)
    if tp == 1:
        return local  # type: ignore[no-any-return]
    heads = int(local.num_attention_heads)
    kv_heads = int(getattr(local, "num_key_value_heads", None) or heads)
    if getattr(local, "head_dim", None) is None:
        local.head_dim = local.hidden_size // heads  # it would follow from the number of heads, which changes
    local.num_attention_heads = _share("attention heads", heads, tp)
    if max(kv_heads, tp) % min(kv_heads, tp):
        raise _refused("KV heads", kv_heads, tp)
    local.num_key_value_heads = max(1, kv_heads // tp)
    for name in _WIDTHS:
        if getattr(local, name, None):
            share = _share(name.replace("_", " "), int(getattr(local, name)), tp)
            setattr(local, name, -(-share // _WIDTH_UNIT) * _WIDTH_UNIT)
    padded = -(-local.vocab_size // _VOCAB_UNIT) * _VOCAB_UNIT
    local.vocab_size = -(-padded // tp)
    if (getattr(local, "pad_token_id", None) or 0) >= local.vocab_size:
        local.pad_token_id = None  # its row lies on another rank
    return local  # type: ignore[no-any-return]


def _share(what: str, whole: int, tp: int) -> int:
    if whole % tp:
        raise _refused(what, whole, tp)
    return whole // tp


def _refused(what: str, whole: int, tp: int) -> InvalidInput:
    fits = [ranks for ranks in (2**power for power in range(7)) if whole % ranks == 0]
    return InvalidInput(
        f"tp {tp} does not divide the model's {whole} {what}", "ranks hold equal shares", f"for example --tp {fits[-1]}"
    )
