"""Who owns which GiB from total memory to the start of the capture: the documented formulas, pure.

Source of every rule here: SGLang 0.5.15-0.5.23 executed over 6,480 settings; the figures are those of the
newest release. GiB and MiB are 2**30 and 2**20 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.errors import InvalidInput
from toolkit.ladder import generate_prefill_buckets
from toolkit.settings import Backend, CaptureSettings

MIB = 1 << 20
GIB = 1 << 30
MIN_AUTO_FRACTION = 0.2
"""Under this the heuristic says that the card is too small; the user has to give a fraction."""


@dataclass(frozen=True, slots=True)
class SizeTier:
    """Defaults of a server for cards below `below_mib` (nvidia-smi MiB, exclusive)."""

    below_mib: float
    chunked_prefill_size: int
    decode_max_bs: int
    decode_max_bs_tp4: int


TIERS = (
    SizeTier(20480, 2048, 8, 8),
    SizeTier(35840, 4096, 48, 160),
    SizeTier(61440, 4096, 32, 160),
    SizeTier(163840, 8192, 256, 512),
    SizeTier(math.inf, 16384, 512, 512),
)
_LARGE_CARD_MIB = 61440
_LARGE_CARD_MIN_RESERVE_MIB = 10240
_MLA_GRAPH_RESERVE_MIB = 1536


def size_tier(total_mib: float) -> SizeTier:
    """The tier of a card with `total_mib` MiB (0.5.20 and later)."""
    return next(tier for tier in TIERS if total_mib < tier.below_mib)


def default_decode_max_bs(total_mib: float, tp: int = 1) -> int:
    """The largest decode batch a server captures by default; a reserve is held for it."""
    tier = size_tier(total_mib)
    return tier.decode_max_bs_tp4 if tp >= 4 else tier.decode_max_bs


def default_prefill_ceiling(chunked_prefill_size: int, mla: bool) -> int:
    """The largest prefill bucket by default: the chunk; for MLA min(8192, chunk) (0.5.23)."""
    return min(8192, chunked_prefill_size) if mla else chunked_prefill_size


def reserve_mib(
    total_mib: float, chunked_prefill_size: int, decode_max_bs: int, num_buckets: int, *, mla: bool, tp: int = 1
) -> float:
    """MiB the heuristic keeps free of weights and KV. `num_buckets` is 0 when the prefill graph is disabled."""
    graphs = (_MLA_GRAPH_RESERVE_MIB if mla else 8 * num_buckets) if num_buckets else 0
    reserve = 512 + 1.5 * max(chunked_prefill_size, 2048) + 128 * tp + 2 * decode_max_bs + graphs
    return max(reserve, _LARGE_CARD_MIN_RESERVE_MIB) if total_mib > _LARGE_CARD_MIB else reserve


def auto_mem_fraction(
    total_mib: float, chunked_prefill_size: int, decode_max_bs: int, num_buckets: int, *, mla: bool, tp: int = 1
) -> float:
    """`mem_fraction_static` as a server computes it: round((M - R) / M, 3). May be negative on a tiny card."""
    reserve = reserve_mib(total_mib, chunked_prefill_size, decode_max_bs, num_buckets, mla=mla, tp=tp)
    return round((total_mib - reserve) / total_mib, 3)


def kv_pool_bytes(free_after_weights: int, baseline_free: int, mem_fraction: float) -> int:
    """Bytes for the KV pool: free_after_weights - B * (1 - fraction). Zero or less means nothing is left.

    `baseline_free` is B: free bytes after the device context and before weights, not the card's total.
    """
    return math.floor(free_after_weights - baseline_free * (1 - mem_fraction))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a server settles before it loads weights. `mem_fraction_static` is None when free memory was given."""

    chunked_prefill_size: int
    decode_max_bs: int
    buckets: tuple[int, ...]
    mem_fraction_static: float | None


def resolve_sizes(settings: CaptureSettings, total_mib: float, *, mla: bool) -> Sizes:
    """Chunk, ladder and fraction for a card of `total_mib` MiB, as the newest release settles them.

    Raises InvalidInput when the fraction is `auto` and the card is too small for the heuristic.
    """
    tier = size_tier(total_mib)
    chunk = settings.chunked_prefill_size or tier.chunked_prefill_size
    ceiling = settings.max_tokens or default_prefill_ceiling(chunk, mla)
    buckets = settings.buckets or tuple(generate_prefill_buckets(ceiling))
    decode = default_decode_max_bs(total_mib)
    fraction: float | None = None
    if settings.free_memory_gib is None:
        given = settings.mem_fraction
        graphs = 0 if settings.resolved_backend is Backend.DISABLED else len(buckets)
        fraction = auto_mem_fraction(total_mib, chunk, decode, graphs, mla=mla) if given == "auto" else given
        if given == "auto" and fraction < MIN_AUTO_FRACTION:
            raise InvalidInput(
                f"mem fraction auto gives {fraction:g} on a device of {total_mib / 1024:.2f} GiB",
                f"the heuristic needs at least {MIN_AUTO_FRACTION:g}",
                "give one yourself, for example --mem-fraction 0.8",
            )
    return Sizes(chunk, decode, buckets, fraction)
