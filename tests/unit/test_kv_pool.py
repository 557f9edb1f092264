"""The KV pool: who holds which slot, and where rows land."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import PrefillLabError
from toolkit.prefill.devices.cpu import CpuDevice
from toolkit.prefill.kv_pool import PADDING_SLOT, KVPool, LayerGeometry, OutOfSlots, bytes_per_token, is_run

GIB = 1 << 30
# Two layers of their own shape: an ordinary one, and one whose K is wider than its V, as in MLA models.
LAYERS = [LayerGeometry(2, 8, 8, 4), LayerGeometry(4, 24, 16, 4)]


def make_pool(num_tokens: int = 20) -> KVPool:
    return KVPool(CpuDevice(GIB), LAYERS, num_tokens, torch.float32)


# --- slots --------------------------------------------------------------------------------------------------


def test_slots_are_handed_out_lowest_first_and_never_the_padding_slot() -> None:
    pool = make_pool(5)
    assert pool.allocate(2) == (1, 2)
    assert pool.allocate(0) == ()
    assert pool.allocate(3) == (3, 4, 5)
    assert pool.free_slots == 0
    assert PADDING_SLOT == 0


def test_a_pool_that_is_too_full_gives_nothing() -> None:
    pool = make_pool(5)
    pool.allocate(3)
    with pytest.raises(OutOfSlots, match="3 KV slots wanted, 2 of 5 are free"):
        pool.allocate(3)
    assert pool.allocate(2) == (4, 5)


def test_holes_are_filled_and_neighbours_become_one_range_again() -> None:
    pool = make_pool(9)
    first, second, third = pool.allocate(3), pool.allocate(3), pool.allocate(3)
    pool.release(second)
    assert pool.allocate(2) == (4, 5)
    pool.release(first)
    pool.release(third[1:])
    assert pool.allocate(6) == (1, 2, 3, 6, 8, 9)
    pool.release((9, 1, 5, 3, 7, 2, 8, 6, 4))
    assert pool.allocate(9) == tuple(range(1, 10))


@pytest.mark.parametrize("slots", [(3,), (4, 4), (1, 2, 3), (9,), (2, 5)])
def test_a_slot_nobody_holds_cannot_be_released(slots: tuple[int, ...]) -> None:
    pool = make_pool(9)
    held = pool.allocate(4)
    pool.release((3,))
    before = pool.free_slots
    with pytest.raises(PrefillLabError, match="released twice"):
        pool.release(slots)
    assert pool.free_slots == before
    pool.release([slot for slot in held if slot != 3])  # what is really held still can be
    assert pool.allocate(9) == tuple(range(1, 10))


@pytest.mark.parametrize("slot", [PADDING_SLOT, -1, 10, 11])
def test_a_slot_that_is_none_of_the_pool_s_cannot_be_released(slot: int) -> None:
    pool = make_pool(9)
    pool.allocate(9)
    with pytest.raises(PrefillLabError, match=f"KV slot {slot} "):
        pool.release((1, slot))
    assert pool.free_slots == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40), st.randoms(use_true_random=False))
def test_no_slot_is_ever_held_twice_and_none_is_lost(steps: list[tuple[bool, int]], random: object) -> None:
    pool, held = make_pool(24), []
    for take, count in steps:
        if take:
            try:
                held.append(pool.allocate(count))
            except OutOfSlots:
                assert count > 24 - sum(map(len, held))
        elif held:
            slots = list(held.pop(count % len(held)))
            random.shuffle(slots)  # type: ignore[attr-defined]
            half = len(slots) // 2
            pool.release(slots[:half])
            pool.release(slots[half:])
        taken = [slot for slots in held for slot in slots]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(range(1, 25))
        assert pool.free_slots == 24 - len(taken)
    for slots in held:
        pool.release(slots)
    assert pool.allocate(24) == tuple(range(1, 25))


@given(st.lists(st.integers(0, 30), max_size=6))
def test_a_run_is_neighbours_in_rising_order(slots: list[int]) -> None:
    assert is_run(slots) == (not slots or slots == list(range(slots[0], slots[0] + len(slots))))


# --- memory -------------------------------------------------------------------------------------------------


def test_bytes_of_a_token_are_those_of_its_rows() -> None:
    assert [layer.kv_values_per_token for layer in LAYERS] == [2 * 16, 4 * 40]
    assert bytes_per_token(LAYERS, 2) == 384
    pool = make_pool(20)
    rows = [*pool.keys, *pool.values]
    assert sum(one[0].numel() * one.element_size() for one in rows) == bytes_per_token(LAYERS, 4)
    assert {one.shape[0] for one in rows} == {21}  # the padding slot is one more
    assert bytes_per_token([], 2) == 0


def test_rows_land_in_their_slots_and_nowhere_else() -> None:
    pool = make_pool(6)
    key, value = torch.randn(3, 4, 24), torch.randn(3, 4, 16)
    pool.store(1, key, value, torch.tensor([5, 1, PADDING_SLOT]))
    assert torch.equal(pool.keys[1][[5, 1, 0]], key)
    assert torch.equal(pool.values[1][[5, 1, 0]], value)
    assert not pool.keys[1][[2, 3, 4, 6]].any()
    assert not pool.keys[0].any()


def test_many_padding_rows_may_share_the_padding_slot() -> None:
    pool = make_pool(6)
    key, value = torch.ones(5, 2, 8), torch.ones(5, 2, 8)
    pool.store(0, key, value, torch.tensor([2, 0, 0, 0, 0]))
    assert pool.keys[0][:3, 0, 0].tolist() == [1, 0, 1]
