"""What a trace sees: sizes, order, the moment of each end; what it makes an allocator do; and interpolation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.memory.allocator import AllocatorOutOfMemory, CachingAllocator, round_size
from toolkit.memory.trace import AffineTraces, AllocationTrace, record_allocations

MIB = 1 << 20


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# --- what is seen -------------------------------------------------------------------------------------------


def test_sizes_and_order_are_those_of_the_calls() -> None:
    given_before = meta(10)

    def forward() -> torch.Tensor:
        doubled = given_before * 2  # 40 bytes, ends when the sum is there
        total = doubled + meta(1)  # the 4 bytes end at once
        del doubled
        return total.to(torch.bfloat16)

    trace = record_allocations(forward)
    assert trace.sizes == (40, 4, 40, 20)
    assert trace.events == (0, 1, 2, ~1, ~0, 3, ~2)
    assert trace.retained == (20,)
    assert trace.live_peak_bytes == 3 * 512


def test_views_in_place_calls_and_inputs_are_no_allocations() -> None:
    weight, x = meta(8, 4), meta(2, 4)

    def forward() -> torch.Tensor:
        y = x @ weight.t()
        y.add_(1).view(4, 4).mul_(2)
        return y[0].unsqueeze(0)

    trace = record_allocations(forward)
    assert trace.sizes == (2 * 8 * 4,)
    assert trace.retained == (64,)  # the view keeps all of it alive


def test_a_storage_ends_with_the_last_tensor_that_shares_it() -> None:
    def forward() -> None:
        first = meta(4)
        second = first.view(2, 2)
        del first
        meta(100)
        del second
        meta(200)

    assert record_allocations(forward).events == (0, 1, ~1, ~0, 2, ~2)


def test_what_is_kept_elsewhere_stays_alive() -> None:
    cache = []
    trace = record_allocations(lambda: cache.append(meta(4)))
    assert (trace.events, trace.retained) == ((0,), (16,))
    cache.clear()  # long after: changes nothing and fails nowhere
    assert trace.events == (0,)


def test_tensors_of_other_devices_do_not_count() -> None:
    def forward() -> torch.Tensor:
        return torch.empty(100) + 1

    assert record_allocations(forward).sizes == ()
    assert record_allocations(forward, device="cpu").sizes == (400, 400)


def test_empty_tensors_take_nothing() -> None:
    assert record_allocations(lambda: meta(0, 5)).sizes == ()


def test_the_first_product_is_marked_behind_its_output() -> None:
    weight = meta(4, 4)

    def forward() -> torch.Tensor:
        x = meta(3, 4) + 0
        y = x @ weight
        return y @ weight

    trace = record_allocations(forward)
    assert trace.sizes == (48, 48, 48, 48)
    assert trace.first_product is not None
    assert trace.events[trace.first_product - 1] == 2
    assert record_allocations(lambda: meta(4) + 1).first_product is None


def test_an_operator_may_declare_what_it_takes_inside() -> None:
    def workspace(func: object, args: tuple[object, ...]) -> int:
        return 777 if func is torch.ops.aten.add.Tensor else 0

    x = meta(4)
    trace = record_allocations(lambda: (x + x) * 2, workspace_bytes=workspace)
    assert trace.sizes == (777, 16, 16)
    assert trace.events[:3] == (0, ~0, 1)


def test_tracing_never_wakes_cuda() -> None:
    code = (
        "import torch\n"
        "def refuse(*_): raise AssertionError('torch.cuda was used')\n"
        "torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = refuse\n"
        "from toolkit.memory.trace import record_allocations\n"
        "x = torch.empty(4, 4, device='meta')\n"
        "print(record_allocations(lambda: x @ x).sizes, torch.cuda.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "(64,) False\n", done.stderr


# --- what an allocator makes of it --------------------------------------------------------------------------


def test_a_replay_leaves_what_was_alive_and_places_the_workspace_once() -> None:
    trace = AllocationTrace(sizes=(2 * MIB, 5 * MIB, 2 * MIB), events=(0, 1, ~0, 2, ~1), first_product=2)
    allocator = CachingAllocator(library_workspace_bytes=8 * MIB)
    first = trace.replay(allocator, pool="p", stream=3)
    assert [block.size for block in first] == [2 * MIB]
    assert allocator.allocated_bytes("p") == 10 * MIB
    trace.replay(allocator, pool="p", stream=3)
    assert allocator.allocated_bytes("p") == 12 * MIB
    trace.replay(allocator, pool="p", stream=4)
    assert allocator.allocated_bytes("p") == 22 * MIB
    assert allocator.allocated_bytes("default") == 0


def test_a_product_at_the_very_end_still_brings_its_workspace() -> None:
    allocator = CachingAllocator(library_workspace_bytes=MIB)
    AllocationTrace((512,), (0,), first_product=1).replay(allocator)
    assert allocator.allocated_bytes() == MIB + 512


def test_a_replay_that_does_not_fit_gives_back_what_it_took() -> None:
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    trace = AllocationTrace((30 * MIB, 30 * MIB, 30 * MIB), (0, 1, 2))
    with pytest.raises(AllocatorOutOfMemory):
        trace.replay(allocator)
    assert allocator.allocated_bytes() == 0
    assert len(AllocationTrace((30 * MIB,), (0,)).replay(allocator)) == 1


# --- every count from a few ---------------------------------------------------------------------------------


def counting(record: Callable[[int], AllocationTrace]) -> tuple[Callable[[int], AllocationTrace], list[int]]:
    asked: list[int] = []

    def recorded(num_tokens: int) -> AllocationTrace:
        asked.append(num_tokens)
        return record(num_tokens)

    return recorded, asked


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=5),
    st.integers(1, 50),
    st.integers(60, 20_000),
    st.data(),
)
def test_straight_lines_are_interpolated_to_the_byte(
    lines: list[tuple[int, int]], low: int, high: int, data: st.DataObject
) -> None:
    def record(num_tokens: int) -> AllocationTrace:
        sizes = tuple(base + slope * num_tokens for base, slope in lines)
        return AllocationTrace(sizes, tuple(range(len(sizes))), 1)

    recorded, asked = counting(record)
    traces = AffineTraces(recorded, low, high)
    assert traces.is_affine
    for num_tokens in data.draw(st.lists(st.integers(low, high), max_size=5)):
        assert traces.at(num_tokens) == record(num_tokens)
    assert len(asked) == 3
    assert traces.at(high + 1) == record(high + 1)  # outside the range it is recorded
    assert asked[-1] == high + 1


BENT: dict[str, Callable[[int], AllocationTrace]] = {
    "square": lambda count: AllocationTrace((count * count,), (0,)),
    "steps": lambda count: AllocationTrace((count // 64 * 64,), (0,)),
    "a threshold": lambda count: AllocationTrace((max(count, 5000),), (0,)),
    "other events": lambda count: AllocationTrace((count, count), (0, 1) if count < 100 else (0, 1, ~0)),
    "other moment of the first product": lambda count: AllocationTrace((count, count), (0, 1), 1 if count < 99 else 2),
}


@pytest.mark.parametrize("confirm", [True, False])
@pytest.mark.parametrize("record", BENT.values(), ids=BENT)
def test_what_is_not_affine_is_recorded_bucket_by_bucket(
    record: Callable[[int], AllocationTrace], confirm: bool
) -> None:
    recorded, asked = counting(record)
    traces = AffineTraces(recorded, 4, 8192, confirm=confirm)
    assert not traces.is_affine
    assert [traces.at(count) for count in (4, 100, 640, 8192)] == [record(count) for count in (4, 100, 640, 8192)]
    assert {100, 640} <= set(asked)
    assert len(asked) == len(set(asked)), "a count was recorded twice"


def test_a_bend_that_meets_the_line_at_both_ends_is_found_by_the_third_recording() -> None:
    def record(count: int) -> AllocationTrace:
        return AllocationTrace((count * 2 if count in (4, 8192) else count,), (0,))

    assert not AffineTraces(record, 4, 8192).is_affine
    assert AffineTraces(record, 4, 8192, confirm=False).is_affine  # which is why it is made


def test_a_range_of_one_or_two_counts_is_recorded() -> None:
    recorded, asked = counting(lambda count: AllocationTrace((count,), (0,)))
    assert not AffineTraces(recorded, 8, 8).is_affine
    traces = AffineTraces(recorded, 8, 9)
    assert traces.is_affine
    assert (traces.at(8).sizes, traces.at(9).sizes) == ((8,), (9,))
    assert set(asked) == {8, 9}


@given(st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_peak_and_retained_agree_with_the_allocator(sizes: list[int], random: object) -> None:
    events, alive = [], []
    for number in range(len(sizes)):
        events.append(number)
        alive.append(number)
        if random.random() < 0.6:  # type: ignore[attr-defined]
            events.append(~alive.pop(random.randrange(len(alive))))  # type: ignore[attr-defined]
    trace = AllocationTrace(tuple(sizes), tuple(events))
    allocator = CachingAllocator()
    blocks = trace.replay(allocator)
    assert sorted(trace.retained) == sorted(block.requested for block in blocks)
    assert (
        sum(map(round_size, trace.retained)) <= allocator.allocated_bytes() <= trace.live_peak_bytes + len(sizes) * MIB
    )
    assert trace.live_peak_bytes <= allocator.peak_reserved_bytes
