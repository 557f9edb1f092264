"""What must hold of the allocator whatever is asked of it, tried with random programs."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from toolkit.memory.allocator import AllocatorOutOfMemory, Block, CachingAllocator, round_size

MIB = 1 << 20
# Around every limit: 512 B, 1 MiB, 10 MiB, 20 MiB, and anything between.
SIZES = st.one_of(
    st.integers(1, 4096),
    st.sampled_from([MIB, 10 * MIB, 20 * MIB]).flatmap(lambda limit: st.integers(limit - 600, limit + 600)),
    st.integers(1, 40 * MIB),
)
POOLS = st.sampled_from(["default", (0, 1), (0, 2)])
STREAMS = st.integers(0, 1)


class Programs(RuleBasedStateMachine):
    """Random sequences of every public operation, checked after each step."""

    blocks = Bundle("blocks")

    @initialize(capacity=st.integers(2, 200), order=st.sampled_from(["descending", "ascending"]))
    def start(self, capacity: int, order: Any) -> None:
        self.allocator = CachingAllocator(capacity * MIB, order)
        self.allocator.event_log = []
        self.in_use: dict[int, tuple[int, Block, Any]] = {}  # by address: requested size, block, pool
        self.capturing: set[Any] = set()

    @rule(target=blocks, sizes=st.lists(SIZES, min_size=1, max_size=6), pool=POOLS, stream=STREAMS)
    def malloc(self, sizes: list[int], pool: Any, stream: int) -> Any:
        return multiple(*(block for nbytes in sizes if (block := self.try_malloc(nbytes, pool, stream))))

    def try_malloc(self, nbytes: int, pool: Any, stream: int) -> Block | None:
        before = self.allocator.reserved_bytes()
        try:
            block = self.allocator.malloc(nbytes, pool, stream)
        except AllocatorOutOfMemory as error:
            assert error.free_bytes < error.requested_bytes
            assert not self.capturing or self.allocator.reserved_bytes() == before
            return None
        assert block.address not in self.in_use
        self.in_use[block.address] = (nbytes, block, pool)
        return block

    @rule(block=consumes(blocks))
    def free(self, block: Block) -> None:
        del self.in_use[block.address]
        self.allocator.free(block)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    @rule(pool=st.sampled_from([(0, 1), (0, 2)]))
    def begin_or_end_capture(self, pool: Any) -> None:
        if pool in self.capturing:
            self.allocator.end_capture(pool)
        else:
            self.allocator.begin_capture(pool)
        self.capturing ^= {pool}

    @invariant()
    def figures_agree_with_the_blocks(self) -> None:
        snapshot = self.allocator.snapshot()
        used = [block for segment in snapshot for block in segment["blocks"] if block["state"] != "inactive"]
        assert sorted(block["address"] for block in used) == sorted(self.in_use)
        for nbytes, block, _ in self.in_use.values():
            assert block.requested == nbytes
            assert round_size(nbytes) <= block.size <= round_size(nbytes) + MIB
        assert self.allocator.reserved_bytes() == sum(segment["total_size"] for segment in snapshot)
        assert self.allocator.allocated_bytes() == sum(block["size"] for block in used)
        assert self.allocator.allocated_bytes() <= self.allocator.reserved_bytes()
        assert self.allocator.reserved_bytes() <= self.allocator.peak_reserved_bytes
        assert self.allocator.capacity_bytes is not None
        assert self.allocator.peak_reserved_bytes <= self.allocator.capacity_bytes

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        snapshot = self.allocator.snapshot()
        for segment in snapshot:
            address = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == address
                address += block["size"]
            assert address == segment["address"] + segment["total_size"]
            states = [block["state"] for block in segment["blocks"]]
            assert ("inactive", "inactive") not in pairwise(states)
        spans = [(segment["address"], segment["address"] + segment["total_size"]) for segment in snapshot]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))

    @invariant()
    def segments_belong_to_one_pool(self) -> None:
        held: dict[Any, int] = defaultdict(int)
        for segment in self.allocator.snapshot():
            pool = "default" if segment["segment_pool_id"] == (0, 0) else segment["segment_pool_id"]
            held[pool] += segment["total_size"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    assert self.in_use[block["address"]][2] == pool
        for pool in ("default", (0, 1), (0, 2)):
            assert self.allocator.reserved_bytes(pool) == held[pool]

    @invariant()
    def the_event_log_accounts_for_every_byte(self) -> None:
        assert self.allocator.event_log is not None
        signs = {"segment_alloc": 1, "segment_free": -1}
        assert self.allocator.reserved_bytes() == sum(
            signs[action] * size for action, size, _ in self.allocator.event_log
        )

    def teardown(self) -> None:
        """Free everything, release the pools: nothing may stay behind."""
        if not hasattr(self, "allocator"):
            return
        for pool in self.capturing:
            self.allocator.end_capture(pool)
        for _, block, _ in self.in_use.values():
            self.allocator.free(block)
        self.allocator.empty_cache()
        assert self.allocator.allocated_bytes() == self.allocator.reserved_bytes("default") == 0
        for pool in ((0, 1), (0, 2)):
            if pool in self.capturing or self.allocator.reserved_bytes(pool):
                self.allocator.release_pool(pool)
        self.allocator.empty_cache()
        assert self.allocator.reserved_bytes() == 0
        assert self.allocator.snapshot() == []


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@given(requests=st.lists(st.tuples(SIZES, POOLS, STREAMS, st.booleans()), max_size=30), then=SIZES)
@settings(max_examples=60, deadline=None)
def test_a_snapshot_carries_the_whole_state(requests: list[tuple[int, Any, int, bool]], then: int) -> None:
    """What is restored from a snapshot goes on exactly as the original."""
    original = CachingAllocator()
    blocks = [(original.malloc(nbytes, pool, stream), drop) for nbytes, pool, stream, drop in requests]
    for block, drop in blocks:
        if drop:
            original.free(block)
    restored = CachingAllocator.from_snapshot(original.snapshot())
    assert restored.snapshot() == original.snapshot()
    assert restored.allocated_bytes() == original.allocated_bytes()
    original.empty_cache()
    restored.empty_cache()
    for pool in ("default", (0, 1)):
        original.malloc(then, pool)
        restored.malloc(then, pool)
    assert [each["blocks"] for each in restored.snapshot()] == [each["blocks"] for each in original.snapshot()]
