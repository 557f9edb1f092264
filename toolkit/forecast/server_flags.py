"""The arguments that make an SGLang server do what a plan says. Pure.

`cuda_graph_backend_prefill`, `cuda_graph_max_bs_prefill`, `cuda_graph_bs_prefill` and `mem_fraction_static` are fields
of ServerArgs in every release 0.5.15 to 0.5.23 (read in the published wheels).
"""

from __future__ import annotations

from collections.abc import Collection

from toolkit.ladder import generate_prefill_buckets
from toolkit.settings import Backend

FRACTION = "--mem-fraction-static"


def name_backend(backend: Backend) -> str:
    """The argument that names a prefill backend, which bypasses the gate and most rules."""
    return f"--cuda-graph-backend-prefill {backend.value}"


def set_ceiling(tokens: int) -> str:
    """The argument that sets the largest prefill bucket."""
    return f"--cuda-graph-max-bs-prefill {tokens}"


def set_fraction(fraction: float) -> str:
    """The argument that sets the share of memory for weights and KV pool."""
    return f"{FRACTION} {fraction:g}"


def set_ladder(buckets: Collection[int]) -> str:
    """The arguments that set a ladder: its ceiling, and the list where the default ladder up to there is another."""
    ladder = sorted(buckets)
    ceiling = set_ceiling(ladder[-1])
    if ladder == list(generate_prefill_buckets(ladder[-1])):
        return ceiling
    return f"{ceiling} --cuda-graph-bs-prefill {' '.join(map(str, ladder))}"
