"""Bytes of KV cache a token takes in a server, per rank, by the model's kind of attention. Pure arithmetic.

The formulas are those of SGLang 0.5.15-0.5.23, executed. This is what a server stores: the latent for MLA, where
the toolkit's own engine keeps expanded K and V.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InvalidInput

SWA_FULL_TOKENS_RATIO = 0.8
"""Tokens a sliding-window pool holds for each token of the full pool, by default."""
_WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class KvCell:
    """What one token costs on one rank.

    `bytes_per_token` is the budget divided by the tokens it holds; it need not be whole, because a sliding-window
    layer keeps fewer tokens than a full one. `windowed_ratio` is that share, None without windowed layers.
    """

    kind: str
    bytes_per_token: float
    full_layers: int
    windowed_layers: int
    windowed_ratio: float | None = None

    def tokens(self, pool_bytes: float) -> int:
        """Tokens of full attention that fit into a pool of so many bytes; 0 where it has none."""
        return max(0, math.floor(pool_bytes / self.bytes_per_token))

    def windowed_tokens(self, pool_bytes: float) -> int | None:
        """Tokens the windowed layers hold beside them, None without such layers."""
        return None if self.windowed_ratio is None else int(self.windowed_ratio * self.tokens(pool_bytes))


def kv_cell(config: Any, itemsize: float, tp: int = 1, ratio: float = SWA_FULL_TOKENS_RATIO) -> KvCell:
    """The cell of a model.

    Args:
        config: a Transformers config, or anything with its attributes; its text half is used.
        itemsize: bytes of one stored number: 2 for bf16, 1 for fp8.
        tp: ranks that share the KV heads. Heads are never split, so beyond their number they are repeated; the MLA
            latent is not divided at all.
        ratio: `swa_full_tokens_ratio` of the server.

    Raises:
        InvalidInput: tp does not divide the heads, or no layer attends.
    """
    text = getattr(config, "text_config", None) or config
    layers = Counter(_layer_types(text))
    windowed = sum(layers[name] for name in _WINDOWED)
    full = layers.total() - windowed - layers["linear_attention"]
    if full + windowed == 0:
        raise InvalidInput("the model has no attention layer", "a KV cache is planned for attention layers")
    if getattr(text, "kv_lora_rank", None) is not None:
        latent = text.kv_lora_rank + text.qk_rope_head_dim
        return KvCell("mla", latent * itemsize * (full + windowed), full + windowed, 0)
    layer = _heads_per_rank(text, tp) * sum(_head_dims(text)) * itemsize
    if windowed and full:
        return KvCell("sliding_window", full * layer + ratio * windowed * layer, full, windowed, ratio)
    return KvCell("gqa", (full + windowed) * layer, full, windowed)


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _heads_per_rank(config: Any, tp: int) -> int:
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if tp < 1 or max(heads, tp) % min(heads, tp):
        raise InvalidInput(
            f"tp {tp} does not divide the model's {heads} KV heads", "a divisor or a multiple of them", "for example 1"
        )
    return max(1, heads // tp)


def _head_dims(config: Any) -> tuple[int, int]:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head), int(getattr(config, "v_head_dim", None) or head)
