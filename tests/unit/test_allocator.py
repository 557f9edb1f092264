"""The rules of the allocator one by one; test_allocator_traces.py holds them against recordings."""

from __future__ import annotations

import ast
import pickle
import sys
from pathlib import Path

import pytest

import toolkit.memory.allocator as module
from toolkit.memory.allocator import (
    AllocatorOutOfMemory,
    CachingAllocator,
    refuse_settings,
    round_size,
    segment_size,
)

KIB, MIB = 1 << 10, 1 << 20
POOL = (0, 1)


def log_of(allocator: CachingAllocator) -> list[tuple[str, int]]:
    """What happened to segments of which size."""
    assert allocator.event_log is not None
    return [(action, size) for action, size, _ in allocator.event_log]


@pytest.fixture
def allocator() -> CachingAllocator:
    new = CachingAllocator()
    new.event_log = []
    return new


def test_the_module_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(("nbytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_requests_round_up_to_512_bytes(nbytes: int, rounded: int) -> None:
    assert round_size(nbytes) == rounded
    assert CachingAllocator().malloc(nbytes).size == rounded


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_segment_sizes_change_at_1_and_10_mib(rounded: int, segment: int, allocator: CachingAllocator) -> None:
    assert segment_size(rounded) == segment
    allocator.malloc(rounded)
    assert log_of(allocator) == [("segment_alloc", segment)]
    assert allocator.reserved_bytes() == segment


def test_a_small_block_is_split_from_a_rest_of_512_bytes() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(MIB)
    rest = allocator.malloc(MIB - 512)
    assert (first.size, rest.size) == (MIB, MIB - 512)
    assert allocator.malloc(512).address == rest.address + rest.size
    assert allocator.reserved_bytes() == 2 * MIB


@pytest.mark.parametrize(("rest", "size"), [(MIB, 20 * MIB), (MIB + 512, 19 * MIB - 512)])
def test_a_large_block_is_split_only_when_more_than_1_mib_remains(rest: int, size: int) -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    assert allocator.malloc(20 * MIB - rest).size == size
    assert allocator.allocated_bytes() == size


def test_best_fit_takes_the_smallest_then_the_lowest() -> None:
    for order, expected in (("descending", 2), ("ascending", 0)):
        allocator = CachingAllocator(fresh_addresses=order)  # type: ignore[arg-type]
        blocks = [allocator.malloc(12 * MIB) for _ in range(3)]
        larger = allocator.malloc(14 * MIB)
        for block in (larger, *blocks):
            allocator.free(block)
        assert allocator.malloc(11 * MIB).address == blocks[expected].address
        assert allocator.malloc(13 * MIB).address == larger.address


def test_fresh_addresses_descend_ascend_or_come_from_a_function() -> None:
    descending = CachingAllocator()
    assert descending.malloc(MIB).address - 20 * MIB == descending.malloc(2 * MIB).address
    ascending = CachingAllocator(fresh_addresses="ascending")
    assert ascending.malloc(MIB).address + 2 * MIB == ascending.malloc(2 * MIB).address
    assert CachingAllocator(fresh_addresses=lambda size: size * 100).malloc(1).address == 200 * MIB
    with pytest.raises(ValueError, match="sideways"):
        CachingAllocator(fresh_addresses="sideways")  # type: ignore[arg-type]


def test_free_neighbours_merge_within_a_segment_only(allocator: CachingAllocator) -> None:
    pieces = [allocator.malloc(256 * KIB) for _ in range(16)]  # fills two adjacent segments
    assert allocator.reserved_bytes() == 4 * MIB
    for block in pieces[::2] + pieces[1::2]:
        allocator.free(block)
    assert [[block["size"] for block in segment["blocks"]] for segment in allocator.snapshot()] == [[2 * MIB]] * 2


def test_memory_is_shared_only_within_a_pool_and_a_stream(allocator: CachingAllocator) -> None:
    first = allocator.malloc(3 * MIB)
    address = first.address
    allocator.free(first)
    assert allocator.malloc(3 * MIB, stream=7).address != address
    other = allocator.malloc(3 * MIB, pool=POOL)
    assert (other.address != address, other.pool) == (True, POOL)
    assert allocator.malloc(3 * MIB).address == address
    assert allocator.reserved_bytes() == 60 * MIB
    assert (allocator.reserved_bytes(POOL), allocator.reserved_bytes("default")) == (20 * MIB, 40 * MIB)
    assert (allocator.allocated_bytes(POOL), allocator.allocated_bytes()) == (3 * MIB, 9 * MIB)
    assert allocator.reserved_bytes("unknown") == allocator.allocated_bytes("unknown") == 0


def test_zero_bytes_cost_nothing_and_negative_ones_are_refused(allocator: CachingAllocator) -> None:
    empty = allocator.malloc(0)
    assert (empty.size, empty.address, allocator.reserved_bytes()) == (0, 0, 0)
    allocator.free(empty)
    with pytest.raises(ValueError, match="-1"):
        allocator.malloc(-1)


def test_only_blocks_in_use_here_can_be_freed(allocator: CachingAllocator) -> None:
    block, stays = allocator.malloc(512), allocator.malloc(512)
    assert allocator.block_at(stays.address) is stays
    allocator.free(block)
    with pytest.raises(ValueError, match="not a block in use"):
        allocator.free(block)
    with pytest.raises(ValueError, match="not a block in use"):
        CachingAllocator().free(stays)
    with pytest.raises(KeyError):
        allocator.block_at(block.address)


def test_empty_cache_gives_back_whole_free_segments_large_ones_first(allocator: CachingAllocator) -> None:
    small, split, large = allocator.malloc(1), allocator.malloc(2 * MIB), allocator.malloc(30 * MIB)
    allocator.malloc(2 * MIB)  # keeps the segment of `split`
    for block in (small, split, large):
        allocator.free(block)
    allocator.empty_cache()
    assert log_of(allocator)[3:] == [("segment_free", 30 * MIB), ("segment_free", 2 * MIB)]
    assert (allocator.reserved_bytes(), allocator.peak_reserved_bytes) == (20 * MIB, 52 * MIB)
    allocator.reset_peak()
    assert allocator.peak_reserved_bytes == 20 * MIB


def test_a_capture_starts_with_an_empty_cache_and_keeps_its_memory(allocator: CachingAllocator) -> None:
    allocator.free(allocator.malloc(30 * MIB))
    allocator.begin_capture(POOL, stream=1)
    assert allocator.reserved_bytes() == 0
    allocator.free(allocator.malloc(40 * MIB, POOL, 1))
    allocator.end_capture(POOL)
    allocator.empty_cache()
    assert allocator.reserved_bytes(POOL) == 40 * MIB

    allocator.begin_capture(POOL, stream=1)  # a second graph reuses what the first has freed
    allocator.malloc(39 * MIB, POOL, 1)
    allocator.end_capture(POOL)
    assert allocator.reserved_bytes() == 40 * MIB


def test_released_pools_give_back_what_nobody_uses(allocator: CachingAllocator) -> None:
    kept = allocator.malloc(11 * MIB, POOL)
    allocator.free(allocator.malloc(12 * MIB, POOL))
    allocator.free(allocator.malloc(1, POOL))
    allocator.release_pool(POOL)
    with pytest.raises(ValueError, match="released"):
        allocator.begin_capture(POOL)
    assert log_of(allocator)[3:] == [("segment_free", 2 * MIB), ("segment_free", 12 * MIB)]
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes() == 0
    allocator.begin_capture(POOL)  # nothing is left of the old pool, so its name is free


def test_captures_refuse_what_makes_no_sense(allocator: CachingAllocator) -> None:
    for call in (allocator.begin_capture, allocator.release_pool):
        with pytest.raises(ValueError, match="default"):
            call("default")
    with pytest.raises(ValueError, match="nobody"):
        allocator.release_pool("nobody")
    with pytest.raises(KeyError):
        allocator.end_capture(POOL)
    allocator.begin_capture(POOL)
    with pytest.raises(ValueError, match="being captured"):
        allocator.begin_capture(POOL)
    with pytest.raises(ValueError, match="outside a capture"):
        allocator.release_pool(POOL)


def test_a_full_device_releases_the_cache_and_tries_again() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.event_log = []
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(32 * MIB)
    assert log_of(allocator)[1:] == [("segment_free", 30 * MIB), ("segment_alloc", 32 * MIB)]
    assert allocator.peak_reserved_bytes == 32 * MIB


def test_a_full_device_keeps_the_cache_during_a_capture() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.begin_capture(POOL)
    allocator.free(allocator.malloc(30 * MIB))
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(32 * MIB, POOL)
    assert allocator.reserved_bytes() == 30 * MIB
    assert (caught.value.requested_bytes, caught.value.free_bytes) == (32 * MIB, 10 * MIB)
    allocator.end_capture(POOL)
    allocator.malloc(32 * MIB, POOL)


def test_out_of_memory_says_what_was_needed_and_survives_pickling() -> None:
    allocator = CachingAllocator(capacity_bytes=30 * MIB)
    allocator.external_bytes = 9 * MIB
    allocator.malloc(2 * MIB)
    with pytest.raises(AllocatorOutOfMemory, match=r"'default'.* 2097152 .* 1048576 of 31457280 ") as caught:
        allocator.malloc(4)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert vars(copy) == {
        "requested_bytes": 2 * MIB,
        "free_bytes": MIB,
        "capacity_bytes": 30 * MIB,
        "pool": "default",
    }
    allocator.external_bytes = 8 * MIB
    allocator.malloc(4)


def test_a_library_workspace_is_placed_once_per_pool_and_stream() -> None:
    assert CachingAllocator().place_library_workspace(POOL, 0) is None
    allocator = CachingAllocator(library_workspace_bytes=8_519_680)
    first = allocator.place_library_workspace(POOL, 0)
    assert first is not None
    assert allocator.place_library_workspace(POOL, 0) is first
    assert allocator.place_library_workspace(POOL, 1) is not first
    assert (allocator.allocated_bytes(POOL), allocator.reserved_bytes(POOL)) == (2 * 8_519_680, 40 * MIB)
    allocator.release_pool(POOL)
    allocator.empty_cache()
    assert allocator.reserved_bytes(POOL) == 40 * MIB


def test_snapshots_that_cannot_be_modelled_are_refused() -> None:
    allocator = CachingAllocator()
    allocator.malloc(1)
    (segment,) = allocator.snapshot()
    with pytest.raises(ValueError, match="expandable_segments"):
        CachingAllocator.from_snapshot([segment | {"is_expandable": True}])
    with pytest.raises(ValueError, match="do not fill"):
        CachingAllocator.from_snapshot([segment | {"total_size": 4 * MIB}])


@pytest.mark.parametrize("order", ["descending", "ascending"])
def test_new_segments_stay_clear_of_those_of_the_snapshot(order: str) -> None:
    earlier = CachingAllocator(fresh_addresses="ascending")
    for _ in range(3):
        earlier.malloc(MIB + 1, stream=3)
    later = CachingAllocator.from_snapshot(earlier.snapshot(), fresh_addresses=order)
    later.malloc(12 * MIB)
    later.malloc(12 * MIB)
    spans = [(each["address"], each["address"] + each["total_size"]) for each in later.snapshot()]
    assert all(spans[index][1] <= spans[index + 1][0] for index in range(2))
    assert later.reserved_bytes() == 44 * MIB


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "expandable_segments:False",
        " backend:native , garbage_collection_threshold:0.0",
        "roundup_power2_divisions:[256:1,512:0,>:1],large_segment_size_mb:20",
        "pinned_use_background_threads:True,release_lock_on_cudamalloc:True,per_process_memory_fraction:1.0",
    ],
)
def test_settings_without_effect_pass(conf: str) -> None:
    refuse_settings(conf)


@pytest.mark.parametrize(
    "conf",
    [
        "expandable_segments:True",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[256:1,512:2,>:1]",
        "max_split_size_mb:128",
        "garbage_collection_threshold:0.8",
        "large_segment_size_mb:64",
        "per_process_memory_fraction:0.5",
        "backend:cudaMallocAsync",
        "a_setting_of_tomorrow:1",
    ],
)
def test_settings_that_change_decisions_are_refused_by_name(conf: str) -> None:
    with pytest.raises(ValueError, match=conf.split(":")[0]):
        refuse_settings(f"expandable_segments:False,{conf},pinned_num_register_threads:4")
