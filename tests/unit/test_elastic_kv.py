"""A KV pool whose memory comes after its addresses: what fits, where rows land, what is charged and given back."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.prefill.devices.cpu import CpuDevice
from toolkit.prefill.elastic_kv import ElasticKVPool, tokens_that_fit
from toolkit.prefill.kv_pool import LayerGeometry, OutOfSlots, bytes_per_token

MIB, GIB = 1 << 20, 1 << 30
STEP = 2 * MIB
# K wider than V in the second, as in MLA models.
LAYERS = [LayerGeometry(8, 64, 64, 8), LayerGeometry(4, 192, 128, 4)]
ROW = bytes_per_token(LAYERS, 2)  # 1024 + 1024 + 1536 + 1024 bytes


def make(device: CpuDevice, first: int = 16, most: int = 100_000, planned: int = 0) -> ElasticKVPool:
    return ElasticKVPool(device, LAYERS, first, most, torch.bfloat16, planned)


def taken(device: CpuDevice) -> int:
    return device.total_bytes - device.free_bytes()


def steps(tokens: int, row_bytes: list[int], step: int) -> int:
    """Bytes of memory behind `tokens` and the padding slot, counted step by step."""
    total = 0
    for row in row_bytes:
        backed = 0
        while backed < (tokens + 1) * row:
            backed += step
        total += backed
    return total


# --- how many tokens fit ------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    st.integers(0, 200_000),
    st.sampled_from([1, 512, 4096]),
    st.integers(0, 300),
)
def test_so_many_tokens_fit_and_not_one_more(row_bytes: list[int], nbytes: int, step: int, most: int) -> None:
    tokens = tokens_that_fit(row_bytes, nbytes, step, most)
    assert 0 <= tokens <= most
    assert tokens == 0 or steps(tokens, row_bytes, step) <= nbytes
    assert tokens == most or steps(tokens + 1, row_bytes, step) > nbytes


@given(st.integers(0, 1 << 44), st.integers(0, 1 << 44))
def test_more_memory_never_holds_fewer_tokens(one: int, other: int) -> None:
    low, high = sorted((one, other))
    rows = [1024] * 60
    assert tokens_that_fit(rows, low, STEP, 1 << 40) <= tokens_that_fit(rows, high, STEP, 1 << 40)


def test_a_model_that_stores_nothing_holds_any_number() -> None:
    assert tokens_that_fit([], 0, STEP, 77) == 77


# --- what is charged ----------------------------------------------------------------------------------------


def test_memory_behind_the_first_tokens_alone_is_charged() -> None:
    device = CpuDevice(GIB)
    pool = make(device)
    assert (pool.num_tokens, pool.free_slots) == (16, 16)
    assert taken(device) == pool.backed_bytes == 4 * STEP
    assert [tuple(one.shape) for one in (*pool.keys, *pool.values)] == [
        (100_001, 8, 64),
        (100_001, 4, 192),
        (100_001, 8, 64),
        (100_001, 4, 128),
    ]


def test_growing_takes_what_it_was_given_to_within_a_step_a_tensor() -> None:
    device = CpuDevice(GIB)
    pool = make(device)
    addresses = [one.data_ptr() for one in (*pool.keys, *pool.values)]
    for nbytes in (40 * MIB, 100 * MIB, 300 * MIB):
        pool.grow(nbytes)
        assert nbytes - 4 * STEP < pool.backed_bytes <= nbytes
        assert taken(device) == pool.backed_bytes
        # Each tensor has whole steps; the widest row is full to within one of them.
        assert 0 <= pool.backed_bytes - (pool.num_tokens + 1) * ROW < 4 * STEP
        assert pool.free_slots == pool.num_tokens
    assert [one.data_ptr() for one in (*pool.keys, *pool.values)] == addresses


def test_it_never_shrinks_and_never_outgrows_its_addresses() -> None:
    device = CpuDevice(GIB)
    pool = make(device, most=5000)
    pool.grow(GIB)
    assert pool.num_tokens == 5000
    before = pool.backed_bytes
    assert before < 5001 * ROW + 4 * STEP
    pool.grow(0)
    pool.grow(GIB)
    assert (pool.num_tokens, pool.backed_bytes) == (5000, before)


def test_first_tokens_are_cut_to_the_most_there_are() -> None:
    assert make(CpuDevice(GIB), first=500, most=10).num_tokens == 10


def test_memory_that_is_not_there_leaves_the_tokens_as_they_were() -> None:
    device = CpuDevice(64 * MIB)
    pool = make(device)
    device.leave_free(3 * STEP)
    with pytest.raises(torch.OutOfMemoryError, match="declared capacity"):
        pool.grow(pool.backed_bytes + 40 * MIB)
    assert (pool.num_tokens, pool.free_slots) == (16, 16)
    with pytest.raises(OutOfSlots):
        pool.allocate(17)
    device.drop_ballast()
    pool.grow(48 * MIB)
    assert pool.num_tokens > 16
    assert taken(device) == pool.backed_bytes <= 48 * MIB


@pytest.mark.parametrize("capacity_steps", [0, 1, 3])
def test_a_device_too_small_for_the_first_tokens_is_left_as_it_was(capacity_steps: int) -> None:
    device = CpuDevice(capacity_steps * STEP + 1)
    with pytest.raises(torch.OutOfMemoryError):
        make(device)
    gc.collect()
    assert taken(device) == 0


def test_building_and_dropping_gives_everything_back_each_time() -> None:
    device = CpuDevice(GIB)
    device.leave_free(GIB // 2)
    ballast = device.allocator.external_bytes
    for _ in range(5):
        pool = make(device)
        pool.grow(200 * MIB)
        assert device.allocator.external_bytes == ballast + pool.backed_bytes
        del pool
        gc.collect()
        assert device.allocator.external_bytes == ballast


def test_a_tensor_that_outlives_the_pool_keeps_its_memory() -> None:
    device = CpuDevice(GIB)
    pool = make(device)
    kept = pool.keys[0][:4]
    del pool
    gc.collect()
    assert taken(device) == STEP
    kept.fill_(1)
    del kept
    gc.collect()
    assert taken(device) == 0


def test_a_reservation_never_takes_more_than_its_tensor() -> None:
    device = CpuDevice(GIB)
    reservation = device.reserve((3 * MIB,), torch.uint8, 1)
    assert reservation.backed_bytes == STEP
    reservation.back(100 * MIB)
    assert reservation.backed_bytes == taken(device) == 2 * STEP


# --- where rows land ----------------------------------------------------------------------------------------


def test_slots_from_before_and_after_growing_are_one_run() -> None:
    pool = make(CpuDevice(GIB))
    held = pool.allocate(10)
    pool.grow(100 * MIB)
    more = pool.allocate(20)
    assert (held, more) == (tuple(range(1, 11)), tuple(range(11, 31)))
    pool.release((*held, *more))
    assert pool.free_slots == pool.num_tokens
    assert pool.allocate(pool.num_tokens)[-1] == pool.num_tokens


def test_rows_across_the_border_keep_what_is_written() -> None:
    pool = make(CpuDevice(GIB))
    border = STEP // 1024  # the first row of the first layer's keys that the first step does not hold
    pool.grow(100 * MIB)
    slots = torch.arange(border - 4, border + 4)
    assert pool.num_tokens > border + 4
    assert not pool.keys[0][slots].any()
    rows = torch.arange(8 * 8 * 64).view(8, 8, 64).to(torch.bfloat16)
    pool.store(0, rows, rows * 2, slots)
    assert torch.equal(pool.keys[0][slots], rows)
    assert torch.equal(pool.values[0][slots], rows * 2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200)), max_size=8), st.integers(1, 40))
def test_no_slot_is_ever_handed_out_twice(rounds: list[tuple[int, int]], first: int) -> None:
    pool = make(CpuDevice(GIB), first=first, most=20_000)
    held: list[int] = []
    for count, mib in rounds:
        if count <= pool.free_slots:
            held += pool.allocate(count)
        pool.grow(mib * MIB)
        assert len(set(held)) == len(held)
        assert pool.free_slots == pool.num_tokens - len(held)
        assert all(1 <= slot <= pool.num_tokens for slot in held)


# --- large ranges -------------------------------------------------------------------------------------------


def test_addresses_for_a_huge_device_cost_nothing_until_they_are_backed() -> None:
    device = CpuDevice(4096 * GIB)
    most = 4096 * GIB // ROW
    pool = make(device, most=most)
    assert taken(device) == 4 * STEP
    pool.grow(device.total_bytes)
    assert pool.num_tokens >= most - 4 * STEP // ROW
    pool.keys[1][pool.num_tokens] = 1
    assert float(pool.keys[1][pool.num_tokens].sum()) == 4 * 192


def test_addresses_that_the_machine_does_not_have_are_out_of_memory_by_name() -> None:
    device = CpuDevice(1 << 62)
    with pytest.raises(torch.OutOfMemoryError, match="cannot map"):
        make(device, most=(1 << 62) // ROW)
    gc.collect()
    assert taken(device) == 0
