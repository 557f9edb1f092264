"""A model of PyTorch's CUDA caching allocator: which segments it asks of the device, and when.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (the same from torch 2.1 to 2.13) with default
settings: requests round up to 512 B, up to 1 MiB counts as small, best fit with ties to the lowest address,
splitting, coalescing, private pools, `empty_cache`, and one retry when the device is full.
All sizes and addresses are bytes. Nothing here touches torch or a GPU.

Not modelled: blocks used on several streams (`record_stream`), and the settings `refuse_settings` names.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

PoolId = Hashable  # "default", or anything else for a private pool (torch uses a pair of integers)
FreshAddresses = Literal["descending", "ascending"] | Callable[[int], int]
SegmentAction = Literal["segment_alloc", "segment_free"]

DEFAULT_POOL = "default"
MIN_BLOCK = 512  # kMinBlockSize
SMALL_LIMIT = 1 << 20  # kSmallSize
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # large_segment_size
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc
LARGE_UNIT = 2 << 20  # kRoundLarge

_BASE_ADDRESS = 1 << 60  # far from zero: descending addresses stay positive however long the run
_TORCH_DEFAULT_POOL = (0, 0)  # how snapshots name it

# Settings whose defaults the model has built in, with those defaults as people write them (max_split_size_mb
# has none). The harmless ones concern host memory and locking, or act only together with max_split_size_mb.
_DEFAULT_SETTINGS = {
    "backend": ["native"],
    "expandable_segments": ["False", "false"],
    "garbage_collection_threshold": ["0", "0.0"],
    "graph_capture_record_stream_reuse": ["False", "false"],
    "large_segment_size_mb": ["20"],
    "per_process_memory_fraction": ["1", "1.0"],
    "roundup_power2_divisions": ["0", "1"],
    "throw_on_cudamalloc_oom": ["False", "false"],
}
_HARMLESS_SETTINGS = ("pinned_", "release_lock_on_", "max_non_split_rounding_mb")


class AllocatorOutOfMemory(Exception):
    """A new segment does not fit, not even after the cached ones were released.

    `requested_bytes` is the size of that segment, which is what PyTorch prints after "Tried to allocate"
    (a 4-byte tensor may need 2 MiB); `free_bytes` is what the capacity had left.
    """

    def __init__(self, requested_bytes: int, free_bytes: int, capacity_bytes: int, pool: PoolId) -> None:
        super().__init__(requested_bytes, free_bytes, capacity_bytes, pool)  # as they came, so it pickles
        self.requested_bytes, self.free_bytes = requested_bytes, free_bytes
        self.capacity_bytes, self.pool = capacity_bytes, pool

    def __str__(self) -> str:
        return (
            f"out of memory in pool {self.pool!r}: a segment of {self.requested_bytes} bytes is needed, "
            f"{self.free_bytes} of {self.capacity_bytes} bytes are free"
        )


@dataclass(slots=True, eq=False)
class _Pool:
    """The default pool, or the private one of some graphs."""

    key: PoolId
    reserved: int = 0
    allocated: int = 0
    released: bool = False
    arenas: dict[tuple[int, bool], _Arena] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Arena:
    """What may serve one kind of request (one pool, one stream, small or large): its free blocks by size."""

    pool: _Pool
    stream: int
    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)  # (size, address), sorted


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, `size` bytes: `malloc` hands it out, `free` takes it back. Do not change it."""

    address: int
    size: int
    arena: _Arena = field(repr=False)
    requested: int = 0  # what was last asked for
    allocated: bool = False
    previous: Block | None = field(default=None, repr=False)
    next: Block | None = field(default=None, repr=False)

    @property
    def pool(self) -> PoolId:
        """The pool it belongs to."""
        return self.arena.pool.key


def round_size(nbytes: int) -> int:
    """Bytes a request occupies: the next multiple of 512, at least 512."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(rounded: int) -> int:
    """Bytes asked of the device for a rounded request that no free block can serve."""
    if rounded <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE_ALLOC:
        return LARGE_SEGMENT
    return -(-rounded // LARGE_UNIT) * LARGE_UNIT


def refuse_settings(conf: str) -> None:
    """Raise `ValueError` naming the first setting of `PYTORCH_CUDA_ALLOC_CONF` the model does not cover.

    Settings at their default value, or without effect on device memory, pass.
    """
    for name, value in re.findall(r"([^:,]+)(?::(\[[^\]]*\]|[^,]*))?", re.sub(r"\s", "", conf)):
        default = _DEFAULT_SETTINGS.get(name, [])
        items = [item.rpartition(":")[2] for item in value.strip("[]").split(",")]  # [64:1,>:0] has 1 and 0
        if not name.startswith(_HARMLESS_SETTINGS) and any(item not in default for item in items):
            allowed = f"only its default {default[0]} is allowed" if default else "leave it unset"
            raise ValueError(f"allocator setting {name}:{value} is not modelled: {allowed}")


class CachingAllocator:
    """The allocator of one device.

    `capacity_bytes` is the memory of the device (`None`: no limit), `external_bytes` what others hold of it,
    to be set at any time. `fresh_addresses` decides where new segments land: below all earlier ones, above
    them, or where a function of the size says. It matters because best fit breaks ties by address; real GPUs
    mostly descend. `library_workspace_bytes` is the size of what `place_library_workspace` allocates. Segment
    events are appended to `event_log`, as (what, size, address), once it is set to a list.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        fresh_addresses: FreshAddresses = "descending",
        library_workspace_bytes: int | None = None,
    ) -> None:
        if not callable(fresh_addresses) and fresh_addresses not in ("descending", "ascending"):
            raise ValueError(f"fresh_addresses is {fresh_addresses!r}; use descending or ascending")
        self.capacity_bytes = capacity_bytes
        self.external_bytes = 0
        self.library_workspace_bytes = library_workspace_bytes
        self.event_log: list[tuple[SegmentAction, int, int]] | None = None
        self._fresh_addresses = fresh_addresses
        self._lowest = self._highest = _BASE_ADDRESS  # bounds of all segments there ever were
        self._blocks: dict[int, Block] = {}
        self._pools: dict[PoolId, _Pool] = {DEFAULT_POOL: _Pool(DEFAULT_POOL)}
        self._captures: set[PoolId] = set()
        self._workspaces: dict[tuple[PoolId, int], Block] = {}
        self._reserved = self._peak_reserved = 0

    @classmethod
    def from_snapshot(cls, segments: Iterable[Mapping[str, Any]], **settings: Any) -> Self:
        """Start from a recorded state: what `torch.cuda.memory_snapshot()` returns, or `snapshot()` here.

        `settings` go to the constructor. A block that waits for another stream (`active_pending_free`) counts
        as in use. Raises `ValueError` on expandable segments and on blocks that do not fill their segment.
        """
        allocator = cls(**settings)
        for segment in segments:
            allocator._restore_segment(segment)
        return allocator

    def snapshot(self) -> list[dict[str, Any]]:
        """The state in the form of `torch.cuda.memory_snapshot()` (the keys that matter here), by address."""
        heads = [block for block in self._blocks.values() if block.previous is None]
        return [_describe_segment(head) for head in sorted(heads, key=lambda block: block.address)]

    def malloc(self, nbytes: int, pool: PoolId = DEFAULT_POOL, stream: int = 0) -> Block:
        """Allocate `nbytes` in a pool for a stream; memory is reused only within the same pool and stream.

        Zero bytes give an empty block at address 0, like PyTorch's null pointer.
        Raises `AllocatorOutOfMemory` at capacity, `ValueError` on a negative size or a released pool.
        """
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        size = round_size(nbytes)
        arena = self._arena(pool, stream, size <= SMALL_LIMIT)
        if nbytes == 0:
            return Block(0, 0, arena)
        index = bisect_left(arena.free, (size, -1))  # the smallest that is large enough, then the lowest
        if index < len(arena.free):
            block = self._blocks[arena.free.pop(index)[1]]
        else:
            block = self._new_segment(arena, segment_size(size))
        rest = block.size - size
        if rest >= MIN_BLOCK if arena.small else rest > SMALL_LIMIT:
            self._split(block, size)
        block.requested, block.allocated = nbytes, True
        arena.pool.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, where it merges with free neighbours in its segment.

        Raises `ValueError` if the block is not in use here (a second free, another allocator's block).
        """
        if block.size == 0:
            return
        if not block.allocated or self._blocks.get(block.address) is not block:
            raise ValueError(f"not a block in use: {block}")
        block.arena.pool.allocated -= block.size
        block.allocated = False
        if block.previous is not None and not block.previous.allocated:
            block = self._merge(_unlist(block.previous), block)
        if block.next is not None and not block.next.allocated:
            self._merge(block, _unlist(block.next))
        insort(block.arena.free, (block.size, block.address))

    def block_at(self, address: int) -> Block:
        """The block in use that starts at an address; `KeyError` if there is none."""
        block = self._blocks[address]
        if not block.allocated:
            raise KeyError(address)
        return block

    def begin_capture(self, pool: PoolId, stream: int = 0, keep_cache: bool = False) -> None:
        """Capture into a private pool, after `empty_cache` (`torch.cuda.graph`) or not (a bare `capture_begin`).

        Until `end_capture` no segment is given back: `cudaFree` is not allowed meanwhile. Each `malloc` still
        names its pool. Raises `ValueError` if this one is the default, released, or being captured into.
        """
        if pool == DEFAULT_POOL or pool in self._captures:
            raise ValueError(f"cannot capture into pool {pool!r}: it is the default, or being captured into")
        if not keep_cache:
            self.empty_cache()
        self._arena(pool, stream, small=True)
        self._captures.add(pool)

    def end_capture(self, pool: PoolId) -> None:
        """End the capture into a pool, whose memory stays reserved; `KeyError` if none is underway."""
        self._captures.remove(pool)

    def release_pool(self, pool: PoolId) -> None:
        """All graphs of a private pool are gone: from now on `empty_cache` gives its free segments back.

        Blocks still in use (a kept output, a library workspace) keep their segment.
        Raises `ValueError` if this is no private pool, or one being captured into.
        """
        if pool == DEFAULT_POOL or pool in self._captures or pool not in self._pools:
            raise ValueError(f"pool {pool!r} is not a private pool outside a capture")
        self._pools[pool].released = True

    def empty_cache(self) -> None:
        """Give the wholly free segments of the default and released pools back; during a capture, nothing."""
        if self._captures:
            return
        for pool in [pool for pool in self._pools.values() if pool.released or pool.key == DEFAULT_POOL]:
            self._release_free_segments(pool)
            if pool.released and pool.reserved == 0:
                del self._pools[pool.key]

    def place_library_workspace(self, pool: PoolId, stream: int) -> Block | None:
        """The workspace a library (cuBLAS) keeps per pool and stream: allocated once, never freed.

        torch comes here in its first matrix product, after the output of that product has been allocated.
        `None` if `library_workspace_bytes` is not set; raises what `malloc` raises.
        """
        if self.library_workspace_bytes is None:
            return None
        if (pool, stream) not in self._workspaces:
            self._workspaces[pool, stream] = self.malloc(self.library_workspace_bytes, pool, stream)
        return self._workspaces[pool, stream]

    def reserved_bytes(self, pool: PoolId | None = None) -> int:
        """Bytes held from the device, by one pool (0 if unknown) or by all."""
        return sum(each.reserved for each in self._pools.values() if pool in (None, each.key))

    def allocated_bytes(self, pool: PoolId | None = None) -> int:
        """Bytes of the blocks in use, rounding included, in one pool (0 if unknown) or in all."""
        return sum(each.allocated for each in self._pools.values() if pool in (None, each.key))

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes held from the device at once since the start, or since `reset_peak`."""
        return self._peak_reserved

    def reset_peak(self) -> None:
        """Let the peak start again at what is reserved now."""
        self._peak_reserved = self._reserved

    def _arena(self, pool: PoolId, stream: int, small: bool) -> _Arena:
        owner = self._pools.get(pool) or self._pools.setdefault(pool, _Pool(pool))
        if owner.released:
            raise ValueError(f"pool {pool!r} was released and still holds memory: use a new pool")
        key = (stream, small)
        return owner.arenas.get(key) or owner.arenas.setdefault(key, _Arena(owner, stream, small))

    def _new_segment(self, arena: _Arena, size: int) -> Block:
        """Get a segment from the device; when that is full, release the cached ones and try once more."""
        if self.capacity_bytes is not None:
            limit = self.capacity_bytes - self.external_bytes
            if self._reserved + size > limit:
                self.empty_cache()
            if self._reserved + size > limit:
                raise AllocatorOutOfMemory(size, limit - self._reserved, self.capacity_bytes, arena.pool.key)
        if callable(self._fresh_addresses):
            return self._add_segment(arena, self._fresh_addresses(size), size)
        descending = self._fresh_addresses == "descending"
        return self._add_segment(arena, self._lowest - size if descending else self._highest, size)

    def _add_segment(self, arena: _Arena, address: int, size: int) -> Block:
        block = self._blocks[address] = Block(address, size, arena)
        self._lowest, self._highest = min(self._lowest, address), max(self._highest, address + size)
        self._count_segment("segment_alloc", block, size)
        return block

    def _count_segment(self, action: SegmentAction, block: Block, change: int) -> None:
        block.arena.pool.reserved += change
        self._reserved += change
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        if self.event_log is not None:
            self.event_log.append((action, block.size, block.address))

    def _split(self, block: Block, size: int) -> None:
        """Keep the first bytes of a block; the rest becomes a free block behind it."""
        rest = Block(block.address + size, block.size - size, block.arena, 0, False, block, block.next)
        if rest.next is not None:
            rest.next.previous = rest
        block.next, block.size = rest, size
        self._blocks[rest.address] = rest
        insort(block.arena.free, (rest.size, rest.address))

    def _merge(self, block: Block, behind: Block) -> Block:
        """Make one block of two neighbours."""
        block.size += behind.size
        block.next = behind.next
        if behind.next is not None:
            behind.next.previous = block
        del self._blocks[behind.address]
        return block

    def _release_free_segments(self, pool: _Pool) -> None:
        """Give whole free segments back, in the order of release_cached_blocks (only the events show it)."""
        arenas = sorted(pool.arenas.values(), key=lambda each: (each.small != pool.released, each.stream))
        for arena in arenas:
            for _, address in list(arena.free):
                block = self._blocks[address]
                if block.previous is None and block.next is None:
                    del self._blocks[_unlist(block).address]
                    self._count_segment("segment_free", block, -block.size)

    def _restore_segment(self, segment: Mapping[str, Any]) -> None:
        if segment.get("is_expandable"):
            raise ValueError("the snapshot has expandable_segments, which are not modelled")
        key = segment.get("segment_pool_id", _TORCH_DEFAULT_POOL)
        pool = DEFAULT_POOL if key == _TORCH_DEFAULT_POOL else key
        arena = self._arena(pool, segment["stream"], segment["segment_type"] == "small")
        self._add_segment(arena, segment["address"], segment["total_size"])
        address, before = segment["address"], None
        for entry in segment["blocks"]:
            in_use = entry["state"] != "inactive"
            block = Block(address, entry["size"], arena, entry.get("requested_size", 0), in_use, before)
            if before is not None:
                before.next = block
            self._blocks[address] = before = block
            if in_use:
                arena.pool.allocated += block.size
            else:
                insort(arena.free, (block.size, address))
            address += block.size
        if address != segment["address"] + segment["total_size"]:
            raise ValueError(f"the blocks of the segment at {segment['address']} do not fill it")


def _unlist(block: Block) -> Block:
    """Take a free block off its free list."""
    free = block.arena.free
    del free[bisect_left(free, (block.size, block.address))]
    return block


def _describe_segment(head: Block) -> dict[str, Any]:
    """The snapshot entry of the segment that starts with a block."""
    blocks: list[dict[str, Any]] = []
    block: Block | None = head
    while block is not None:
        blocks.append({"address": block.address, "size": block.size, "requested_size": block.requested})
        blocks[-1]["state"] = "active_allocated" if block.allocated else "inactive"
        block = block.next
    return {
        "address": head.address,
        "total_size": sum(entry["size"] for entry in blocks),
        "stream": head.arena.stream,
        "segment_type": "small" if head.arena.small else "large",
        "segment_pool_id": _TORCH_DEFAULT_POOL if head.pool == DEFAULT_POOL else head.pool,
        "blocks": blocks,
    }
