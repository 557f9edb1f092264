"""The KV pool of a plan: what a token takes, and a pool that is sized after the capture instead of before it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from toolkit.forecast.engines import SGLANG
from toolkit.forecast.model_facts import ModelFacts
from toolkit.forecast.plan_ledger import Ledger
from toolkit.forecast.plan_settings import PlanSettings
from toolkit.memory.kv_cells import KvCell, kv_cell
from toolkit.memory.ledger import GIB


@dataclass(frozen=True, slots=True)
class KvLast:
    """A KV pool that is sized after the capture. One full bucket of it is there before, since captures use its rows.

    Attributes:
        first_tokens: tokens of that bucket.
        backed_gib: GiB of it.
        room_gib: GiB that a pool sized first takes beyond it; below 0 where it is smaller.
        tokens: tokens of a pool of so many GiB.
        gib: GiB that so many tokens take.
    """

    first_tokens: int
    backed_gib: float
    room_gib: float
    tokens: Callable[[float], int]
    gib: Callable[[int], float]

    @classmethod
    def of(
        cls, pool_gib: float, first_tokens: int, tokens: Callable[[float], int], gib: Callable[[int], float]
    ) -> KvLast:
        """A pool that takes `pool_gib` where it is sized first, with one bucket of `first_tokens` there before."""
        backed = gib(first_tokens)
        return cls(first_tokens, backed, pool_gib - backed, tokens, gib)


def planned_cell(settings: PlanSettings, model: ModelFacts) -> KvCell:
    """What a token takes in the KV pool of a server, or of the toolkit's own runner, which keeps K and V expanded."""
    config = model.config
    if settings.engine != SGLANG:
        expanded = {"layer_types": None, "num_hidden_layers": model.layers}
        if model.mla:
            heads = {name: config.num_attention_heads for name in ("num_attention_heads", "num_key_value_heads")}
            width = config.qk_nope_head_dim + config.qk_rope_head_dim
            expanded |= {**heads, "head_dim": width, "v_head_dim": config.v_head_dim}
            config = SimpleNamespace(**expanded)
    return kv_cell(config, settings.kv_itemsize, settings.tp)


def whole_pool(ledger: Ledger, cell: KvCell, buckets: tuple[int, ...]) -> KvLast:
    """A pool of that cell sized after the capture, without steps of memory: a server allocates it whole."""

    def gib(tokens: int) -> float:
        return tokens * cell.bytes_per_token / GIB

    pool_gib = ledger.line("kv_cache").gib
    return KvLast.of(pool_gib, max(buckets, default=0), lambda room: cell.tokens(room * GIB), gib)
