"""Two lessons of the field, each as figures one can compute: the order of capture, and the ceiling. MiB is 2**20."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.forecast.sglang_body import BodyShape, body_tape
from toolkit.forecast.sglang_engine import record, warm_up
from toolkit.forecast.terms import MIB
from toolkit.memory.allocator import DEFAULT_POOL, CachingAllocator, PoolId

LARGEST_FIRST = "largest first"
SMALLEST_FIRST = "smallest first"
OWN_STREAMS = "largest first, a stream for each bucket"
OWN_POOLS = "largest first, a pool for each bucket"


def pool_by_order(shape: BodyShape, buckets: Sequence[int]) -> dict[str, float]:
    """MiB in graph pools after the whole ladder, for four ways to capture it.

    Largest first pays once: each smaller bucket fits into blocks the largest has left. Smallest first pays again and
    again, since no block that is there is large enough. And memory is reused only within the same pool AND the same
    stream: with a stream of its own, each bucket pays in full although all name one pool. (SGLang tried ascending
    order and reverted it after out-of-memory reports, public issue #26600; it shares the stream since public PR
    #33220.)

    Args:
        shape: of one rank's body.
        buckets: token counts.
    """
    down = sorted(buckets, reverse=True)
    return {
        LARGEST_FIRST: _pool_mib(shape, down, lambda _: ("graphs", 1)),
        SMALLEST_FIRST: _pool_mib(shape, down[::-1], lambda _: ("graphs", 1)),
        OWN_STREAMS: _pool_mib(shape, down, lambda position: ("graphs", position + 1)),
        OWN_POOLS: _pool_mib(shape, down, lambda position: (f"graphs {position}", 1)),
    }


def _pool_mib(shape: BodyShape, ladder: Sequence[int], where: Callable[[int], tuple[PoolId, int]]) -> float:
    allocator, tape = CachingAllocator(), body_tape(shape)
    for position, num_tokens in enumerate(ladder):
        record(allocator, tape, num_tokens, *where(position))
    return allocator.reserved_bytes() / MIB


def eager_mib(shape: BodyShape, num_tokens: int) -> float:
    """MiB torch's default pool holds after eager passes over so many tokens: what a chunk without a graph needs."""
    allocator = CachingAllocator()
    warm_up(allocator, body_tape(shape), num_tokens)
    return allocator.reserved_bytes(DEFAULT_POOL) / MIB


@dataclass(frozen=True, slots=True)
class CeilingCost:
    """Activation memory of a server whose largest bucket is `ceiling` and whose chunks are `chunk` tokens, in MiB.

    `graph_pool_mib` belongs to the graphs; `eager_mib` to chunks that run without one, 0 when no chunk does.
    """

    ceiling: int
    chunk: int
    graph_pool_mib: float
    eager_mib: float

    @property
    def total_mib(self) -> float:
        """Both together: neither can use the other's memory."""
        return self.graph_pool_mib + self.eager_mib


def ceiling_cost(shape: BodyShape, ceiling: int, chunk: int) -> CeilingCost:
    """What a ceiling costs in activations, given the chunk; a ceiling of 0 means no graphs.

    With the ceiling at the chunk no prefill runs eagerly, so the graphs' pool replaces the eager activations and a
    server with graphs can use less than one without. A ceiling below the chunk pays for both. (SGLang's blog measured
    the first: gpt-oss-120b's eager peak fell from 0.56 to 0.001 GiB, GLM-5.2's from 1.55 to 0.35.)
    """
    pool = _pool_mib(shape, [ceiling], lambda _: ("graphs", 1)) if ceiling else 0.0
    return CeilingCost(ceiling, chunk, pool, 0.0 if ceiling >= chunk else eager_mib(shape, chunk))
