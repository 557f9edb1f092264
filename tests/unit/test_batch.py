"""Packed requests and the static buffers they are padded into."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.prefill.batch import PackedBatch, Request, Span, StaticBuffers, pack
from toolkit.prefill.devices.cpu import CpuDevice
from toolkit.prefill.kv_pool import PADDING_SLOT, KVPool, LayerGeometry, OutOfSlots

GIB = 1 << 30
LAYERS = [LayerGeometry(2, 8, 8, 4), LayerGeometry(4, 24, 16, 4)]


def make_pool(num_tokens: int = 40) -> KVPool:
    return KVPool(CpuDevice(GIB), LAYERS, num_tokens, torch.float32)


def make_buffers(max_tokens: int = 16) -> StaticBuffers:
    return StaticBuffers(CpuDevice(GIB), LAYERS, max_tokens, 32, torch.float32)


# --- packing ------------------------------------------------------------------------------------------------


def test_requests_stand_one_behind_the_other() -> None:
    batch = pack([Request((7, 8, 9)), Request((5,)), Request((6, 4))], make_pool())
    assert batch == PackedBatch(
        tokens=(7, 8, 9, 5, 6, 4),
        positions=(0, 1, 2, 0, 0, 1),
        slots=(1, 2, 3, 4, 5, 6),
        spans=(Span(0, 3, 0, (1, 2, 3)), Span(3, 1, 0, (4,)), Span(4, 2, 0, (5, 6))),
    )
    assert (batch.num_tokens, batch.last_rows) == (6, [2, 3, 5])


def test_a_prefix_in_the_pool_moves_positions_and_keeps_its_slots() -> None:
    pool = make_pool()
    first, second = Request((7, 8, 9)), Request((1, 2))
    pack([first, second], pool)
    first.tokens = (10, 11)
    assert first.prefix == 3
    batch = pack([first], pool)
    assert batch.positions == (3, 4)
    assert batch.slots == (6, 7)
    assert batch.spans == (Span(0, 2, 3, (1, 2, 3, 6, 7)),)
    assert not batch.spans[0].contiguous
    assert first.slots == (1, 2, 3, 6, 7)
    assert second.slots == (4, 5)


def test_a_batch_that_does_not_fit_is_refused_and_who_came_first_keeps_its_slots() -> None:
    pool = make_pool(5)
    fits, does_not = Request((1, 2, 3)), Request((1, 2, 3))
    with pytest.raises(OutOfSlots):
        pack([fits, does_not], pool)
    assert (fits.slots, does_not.slots, pool.free_slots) == ((1, 2, 3), (), 2)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=5))
def test_however_requests_are_packed_rows_positions_and_slots_agree(shapes: list[tuple[int, int]]) -> None:
    pool, requests = make_pool(80), []
    for prefix, length in shapes:
        gap = pool.allocate(1)  # so that most requests end up in pieces
        request = Request((1,) * prefix)
        pack([request], pool)
        pool.release(gap)
        request.tokens = tuple(range(length))
        requests.append(request)
    batch = pack(requests, pool)
    assert batch.num_tokens == sum(length for _, length in shapes) == len(batch.positions) == len(batch.slots)
    assert len({slot for span in batch.spans for slot in span.slots}) == sum(map(sum, shapes))
    row = 0
    for span, request, (prefix, length) in zip(batch.spans, requests, shapes, strict=True):
        assert (span.start, span.length, span.prefix) == (row, length, prefix)
        rows = slice(row, row + length)
        assert batch.tokens[rows] == request.tokens
        assert batch.positions[rows] == tuple(range(prefix, prefix + length))
        assert batch.slots[rows] == span.slots[prefix:]
        assert span.slots == request.slots
        row += length
    assert batch.last_rows == [span.start + span.length - 1 for span in batch.spans]


# --- static buffers -----------------------------------------------------------------------------------------


def test_a_batch_is_padded_with_token_0_at_position_0_in_the_padding_slot() -> None:
    buffers = make_buffers()
    buffers.load(pack([Request((7, 8, 9)), Request((5,))], make_pool()), 6)
    assert buffers.input_ids[:6].tolist() == [7, 8, 9, 5, 0, 0]
    assert buffers.position_ids[:6].tolist() == [0, 1, 2, 0, 0, 0]
    assert buffers.slot_mapping[:6].tolist() == [1, 2, 3, 4, PADDING_SLOT, PADDING_SLOT]


def test_nothing_of_the_batch_before_is_left_in_the_padding() -> None:
    buffers, pool = make_buffers(), make_pool()
    buffers.load(pack([Request(tuple(range(20, 36)))], pool), 16)
    addresses = [x.data_ptr() for x in (buffers.input_ids, buffers.position_ids, buffers.slot_mapping)]
    buffers.load(pack([Request((3, 4))], pool), 8)
    assert buffers.input_ids.tolist() == [3, 4, *[0] * 6, *range(28, 36)]
    assert buffers.slot_mapping[:8].tolist() == [17, 18, *[PADDING_SLOT] * 6]
    assert [x.data_ptr() for x in (buffers.input_ids, buffers.position_ids, buffers.slot_mapping)] == addresses


def test_what_crosses_a_break_is_one_buffer_for_all_layers() -> None:
    buffers = make_buffers(16)
    assert buffers.queries.numel() == 16 * 4 * 24  # the widest layer decides
    assert buffers.attended.numel() == 16 * 4 * 16
    for layer in LAYERS:
        query, answer = buffers.query_view(5, layer), buffers.attended_view(5, layer)
        assert query.shape == (5, layer.q_heads, layer.k_dim)
        assert answer.shape == (5, layer.q_heads, layer.v_dim)
        assert query.data_ptr() == buffers.queries.data_ptr()
        assert answer.data_ptr() == buffers.attended.data_ptr()
        assert query.is_contiguous()


def test_static_buffers_are_charged_in_full() -> None:
    device = CpuDevice(GIB)
    StaticBuffers(device, LAYERS, 100_000, 32, torch.float32)
    sizes = [3 * 8, 32 * 4, 4 * 24 * 4, 4 * 16 * 4]
    assert 0 <= (device.total_bytes - device.free_bytes()) - 100_000 * sum(sizes) < 60 << 20
