"""One forward as a list of allocations and frees, and what an allocator makes of it. All sizes are bytes; no torch.

`toolkit.memory.trace` records such lists, `toolkit.forecast` writes them by hand: a plan needs them without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.memory.allocator import DEFAULT_POOL, Block, CachingAllocator, PoolId, round_size


@dataclass(frozen=True, slots=True)
class AllocationTrace:
    """The allocations of one forward.

    Attributes:
        sizes: bytes asked for by each allocation, in order.
        events: what happened, in order: `i` for allocation `i`, `~i` (that is, `-i - 1`) for its end.
        first_product: how many events had happened when the first matrix product had its output allocated, which is
            when the library allocates its workspace; None when there was no product.
    """

    sizes: tuple[int, ...]
    events: tuple[int, ...]
    first_product: int | None = None

    @property
    def retained(self) -> tuple[int, ...]:
        """Sizes in bytes of what was still alive at the end: the results."""
        ended = {~event for event in self.events if event < 0}
        return tuple(size for number, size in enumerate(self.sizes) if number not in ended)

    @property
    def live_peak_bytes(self) -> int:
        """The most bytes alive at once, each allocation rounded up as the allocator does."""
        live = peak = 0
        for event in self.events:
            live += round_size(self.sizes[event]) if event >= 0 else -round_size(self.sizes[~event])
            peak = max(peak, live)
        return peak

    def replay(self, allocator: CachingAllocator, pool: PoolId = DEFAULT_POOL, stream: int = 0) -> list[Block]:
        """Make the allocator do what the forward did; returns the blocks still in use, oldest first.

        The library workspace is placed behind the output of the first matrix product, unless that pool and stream
        have one (see `CachingAllocator.place_library_workspace`). Raises what `malloc` raises, and then gives back
        what it had taken.
        """
        blocks: dict[int, Block] = {}
        try:
            for position, event in enumerate(self.events):
                if position == self.first_product:
                    allocator.place_library_workspace(pool, stream)
                if event >= 0:
                    blocks[event] = allocator.malloc(self.sizes[event], pool, stream)
                else:
                    allocator.free(blocks.pop(~event))
            if self.first_product == len(self.events):
                allocator.place_library_workspace(pool, stream)
        except BaseException:
            for block in blocks.values():
                allocator.free(block)
            raise
        return list(blocks.values())
