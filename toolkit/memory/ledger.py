"""Who owns which GiB from total memory to the start of the capture: the documented formulas, pure.

The rules are those of the newest SGLang release in `toolkit.memory.release`; `toolkit.memory.rules` has every
release. GiB and MiB are 2**30 and 2**20 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.errors import InvalidInput
from toolkit.memory.release import SizeTier, get_release
from toolkit.memory.rules import ServerFacts, resolve_server
from toolkit.settings import Backend, CaptureSettings

MIB = 1 << 20
GIB = 1 << 30
MIN_AUTO_FRACTION = 0.2
"""Under this the heuristic says that the card is too small; the user has to give a fraction."""
TIERS = get_release().tiers
"""Defaults by card size, of the newest release."""


def size_tier(total_mib: float) -> SizeTier:
    """The tier of a card with `total_mib` MiB."""
    return get_release().tier(total_mib)


def default_decode_max_bs(total_mib: float, tp: int = 1) -> int:
    """The largest decode batch a server captures by default; a reserve is held for it."""
    return get_release().default_decode_max_bs(total_mib, tp)


def default_prefill_ceiling(chunked_prefill_size: int, mla: bool) -> int:
    """The largest prefill bucket by default, in tokens: the chunk; for MLA min(8192, chunk)."""
    return get_release().prefill_ceiling(chunked_prefill_size, mla)


def reserve_mib(
    total_mib: float, chunked_prefill_size: int, decode_max_bs: int, num_buckets: int, *, mla: bool, tp: int = 1
) -> float:
    """MiB the heuristic keeps free of weights and KV. `num_buckets` is 0 when the prefill graph is disabled."""
    return get_release().reserve(
        total_mib,
        activation_tokens=chunked_prefill_size,
        decode_max_bs=decode_max_bs,
        num_buckets=num_buckets or None,
        mla=mla,
        tp=tp,
    )


def auto_mem_fraction(
    total_mib: float, chunked_prefill_size: int, decode_max_bs: int, num_buckets: int, *, mla: bool, tp: int = 1
) -> float:
    """`mem_fraction_static` as a server computes it: round((M - R) / M, 3). May be negative on a tiny card."""
    reserve = reserve_mib(total_mib, chunked_prefill_size, decode_max_bs, num_buckets, mla=mla, tp=tp)
    return get_release().fraction(total_mib, reserve)


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
    # The sizes are the same for every backend that captures, tc_piecewise included, which newer servers refuse.
    off = settings.resolved_backend is Backend.DISABLED
    given = None if settings.mem_fraction == "auto" else settings.mem_fraction
    got = resolve_server(
        get_release(),
        ServerFacts(
            gpu_mem_mib=total_mib,
            mla=mla,
            prefill_backend=Backend.DISABLED if off else Backend.BREAKABLE,
            chunked_prefill_size=settings.chunked_prefill_size,
            max_tokens=settings.max_tokens,
            buckets=settings.buckets,
            mem_fraction=given,
        ),
    )
    fraction = None if settings.free_memory_gib is not None else got.mem_fraction_static
    if fraction is not None and given is None and fraction < MIN_AUTO_FRACTION:
        raise InvalidInput(
            f"mem fraction auto gives {fraction:g} on a device of {total_mib / 1024:.2f} GiB",
            f"the heuristic needs at least {MIN_AUTO_FRACTION:g}",
            "give one yourself, for example --mem-fraction 0.8",
        )
    return Sizes(got.chunked_prefill_size, got.decode_max_bs, got.buckets, fraction)
