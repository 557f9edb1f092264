"""The accounted CPU device: every byte charged, the capacity exact, nothing taken from the machine for it."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import CaptureError, DeviceUnavailable
from toolkit.prefill.devices import make_device
from toolkit.prefill.devices.base import Pool
from toolkit.prefill.devices.cpu import CpuDevice

MIB, GIB = 1 << 20, 1 << 30
# Sizes from 10 MiB on take a segment of their own, whole in steps of 2 MiB (torch's caching allocator), so that
# what is charged for them is what is asked for.
LARGE = 12 * MIB


def used(device: CpuDevice) -> int:
    return device.total_bytes - device.free_bytes()


def large(device: CpuDevice, count: int = 1) -> torch.Tensor:
    return device.empty((count * LARGE,), torch.uint8)


# --- long-lived memory --------------------------------------------------------------------------------------


def test_a_fresh_device_is_empty_and_says_that_it_is_accounted() -> None:
    device = CpuDevice(8 * GIB)
    assert (device.free_bytes(), device.total_bytes, device.total_mib) == (8 * GIB, 8 * GIB, 8192)
    facts = device.facts()
    assert (facts["kind"], facts["label"], facts["total_gib"]) == ("cpu", "cpu (accounted)", 8.0)
    assert device.other_processes() == 0
    assert device.bit_exact


def test_a_tensor_is_charged_for_as_long_as_it_lives() -> None:
    device = CpuDevice(GIB)
    tensor = large(device)
    view = tensor[:5].view(5, 1)
    assert used(device) == LARGE
    del tensor
    gc.collect()
    device.empty_cache()
    assert used(device) == LARGE  # the view keeps it
    del view
    device.empty_cache()
    assert used(device) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_memory_is_zero_where_nobody_wrote(dtype: torch.dtype) -> None:
    tensor = CpuDevice(GIB).empty((1000, 7), dtype)
    assert (tensor.shape, tensor.dtype) == ((1000, 7), dtype)
    assert not tensor.any()
    tensor[3] = 1
    assert int(tensor.sum()) == 7


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_nothing_costs_nothing(shape: tuple[int, ...]) -> None:
    device = CpuDevice(MIB)
    assert device.empty(shape, torch.float32).shape == shape
    assert used(device) == 0


def test_weights_count_once_however_often_they_are_shared() -> None:
    device = CpuDevice(GIB)
    weight = torch.zeros(LARGE, dtype=torch.uint8)
    tied, other = weight.view(torch.float32), torch.zeros(2 * LARGE, dtype=torch.uint8)
    device.adopt([weight, tied, weight[:10], other, torch.empty(0)])
    assert used(device) == 3 * LARGE
    device.adopt([tied, other])
    assert used(device) == 3 * LARGE
    del other
    device.empty_cache()
    assert used(device) == LARGE


def test_accounted_work_pays_for_what_it_makes_and_not_for_what_it_is_given() -> None:
    device, given = CpuDevice(GIB), torch.zeros(LARGE, dtype=torch.uint8)
    with device.accounted():
        given.add_(1)
        given.view(2, -1)[0].zero_()
        assert used(device) == 0
        made = given + 1
    assert used(device) == LARGE == made.numel()


def test_small_tensors_share_segments_as_on_a_gpu() -> None:
    device = CpuDevice(GIB)
    kept = [device.empty((1,), torch.float32) for _ in range(100)]
    assert used(device) == 2 * MIB
    kept.append(device.empty((MIB + 1,), torch.uint8))
    assert used(device) == 22 * MIB  # from 1 to 10 MiB: a segment of 20 MiB


# --- the capacity -------------------------------------------------------------------------------------------


def test_the_last_byte_can_be_used_and_not_one_more() -> None:
    device = CpuDevice(3 * LARGE)
    kept = [large(device), large(device, 2)]
    assert device.free_bytes() == 0
    with pytest.raises(torch.OutOfMemoryError, match=r"declared capacity of 0\.04 GiB of which 0\.00 MiB is free"):
        device.empty((1,), torch.uint8)
    kept.pop()
    assert large(device, 2) is not None  # the cached segment serves it


def test_a_device_one_byte_too_small_is_too_small() -> None:
    for missing in (0, 1):
        device = CpuDevice(3 * LARGE - missing)
        weights = torch.zeros(3 * LARGE, dtype=torch.uint8)
        if missing:
            with pytest.raises(torch.OutOfMemoryError) as error:
                device.adopt([weights])
            assert device.is_out_of_memory(error.value)
            assert used(device) == 0
        else:
            device.adopt([weights])
            assert device.free_bytes() == 0
    assert not device.is_out_of_memory(RuntimeError("CUDA error: out of memory"))


@pytest.mark.parametrize("missing", [0, 1])
def test_eager_intermediates_run_out_of_memory_at_the_same_byte(missing: int) -> None:
    device = CpuDevice(3 * LARGE - missing)
    source = large(device)

    def work() -> torch.Tensor:
        with device.accounted():
            return (source + 1) + 1

    if missing:
        with pytest.raises(torch.OutOfMemoryError):
            work()
    else:
        assert work()[0] == 2
    gc.collect()
    device.empty_cache()
    assert used(device) == LARGE
    with device.accounted():
        assert (source + 1)[0] == 1  # the device works as before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30 * MIB), st.booleans()), max_size=25))
def test_the_device_never_holds_more_than_it_has_and_ends_empty(steps: list[tuple[int, bool]]) -> None:
    device, kept = CpuDevice(100 * MIB), []
    for nbytes, drop in steps:
        try:
            kept.append(device.empty((nbytes,), torch.uint8))
        except torch.OutOfMemoryError:
            assert sum(one.numel() for one in kept) + nbytes > 100 * MIB - 22 * MIB * (len(kept) + 1)
        if drop and kept:
            kept.pop(0)
        assert sum(one.numel() for one in kept) <= used(device) <= 100 * MIB
        assert device.peak_used_bytes() >= used(device)
    del kept
    device.empty_cache()
    assert used(device) == 0


def test_a_size_the_machine_cannot_map_is_out_of_memory_too() -> None:
    device = CpuDevice(1 << 62)
    with pytest.raises(torch.OutOfMemoryError, match="cannot map"):
        device.empty((1 << 60,), torch.uint8)
    device.empty_cache()
    assert used(device) == 0


# --- real memory --------------------------------------------------------------------------------------------


def test_pages_that_nobody_writes_cost_no_main_memory() -> None:
    process, device = psutil.Process(), CpuDevice(64 * GIB)
    before = process.memory_info().rss
    tensor = device.empty((16 * GIB,), torch.uint8)
    assert tensor[:: 4 * GIB].sum() == 0
    assert process.memory_info().rss - before < 16 * MIB
    tensor[: 64 * MIB] = 1
    assert 60 * MIB < process.memory_info().rss - before < 90 * MIB
    assert used(device) == 16 * GIB
    del tensor
    gc.collect()
    assert process.memory_info().rss - before < 16 * MIB


# --- ballast and peak ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 3 * GIB + 1, int(3.99 * GIB)])
def test_what_is_to_be_left_free_is_left_to_the_byte(nbytes: int) -> None:
    device = CpuDevice(8 * GIB)
    kept = large(device)
    assert device.leave_free(nbytes) == 8 * GIB - LARGE - nbytes
    assert device.free_bytes() == nbytes
    assert device.leave_free(nbytes + 1) == 0
    device.drop_ballast()
    assert device.free_bytes() == 8 * GIB - kept.numel()


def test_ballast_takes_part_in_the_capacity() -> None:
    device = CpuDevice(GIB)
    device.leave_free(LARGE)
    kept = large(device)
    with pytest.raises(torch.OutOfMemoryError):
        large(device)
    device.drop_ballast()
    assert large(device).numel() == kept.numel()


def test_the_peak_sees_what_came_and_went() -> None:
    device = CpuDevice(GIB)
    kept = large(device)
    device.leave_free(GIB // 2)
    device.reset_peak()
    at_rest = device.peak_used_bytes()
    assert at_rest == used(device) == GIB // 2
    with device.accounted():
        _ = (kept + 1).sum()
    del _
    device.empty_cache()
    assert device.peak_used_bytes() - at_rest in range(LARGE, LARGE + 3 * MIB)
    assert used(device) == at_rest
    device.reset_peak()
    assert device.peak_used_bytes() == at_rest


# --- graph pools --------------------------------------------------------------------------------------------


def test_a_pool_keeps_what_its_graphs_need_and_gives_all_of_it_back() -> None:
    device = CpuDevice(GIB)
    source, out = large(device), large(device)
    pool, graph = device.new_pool(), device.new_graph()
    assert device.pool_reserved_bytes(pool) == 0
    graph.begin(pool)
    out.copy_(source + 1)
    graph.end()
    assert device.pool_reserved_bytes(pool) == LARGE
    device.empty_cache()
    assert used(device) == 3 * LARGE
    again = device.new_graph()
    again.begin(pool)
    out.copy_(source + 2)
    again.end()
    assert device.pool_reserved_bytes(pool) == LARGE  # the second graph reuses it
    graph.replay()
    assert out[0] == 1
    assert used(device) == 3 * LARGE  # a replay takes nothing
    del graph, again
    device.release_pool(pool)
    assert used(device) == 2 * LARGE
    assert device.pool_reserved_bytes(pool) == 0


def test_two_pools_share_nothing() -> None:
    device = CpuDevice(GIB)
    source, out = large(device), large(device)
    pools = [device.new_pool(), device.new_pool()]
    for pool in pools:
        graph = device.new_graph()
        graph.begin(pool)
        out.copy_(source + 1)
        graph.end()
    assert [device.pool_reserved_bytes(pool) for pool in pools] == [LARGE, LARGE]


def test_out_of_memory_in_a_capture_is_the_same_error_and_leaves_the_device_usable() -> None:
    device = CpuDevice(4 * LARGE - 1)
    source, out = large(device), large(device)
    pool, graph = device.new_pool(), device.new_graph()
    graph.begin(pool)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            out.copy_((source + 1) + 1)
    finally:
        graph.abandon()
    gc.collect()
    device.release_pool(pool)
    assert used(device) == 2 * LARGE
    pool, graph = device.new_pool(), device.new_graph()
    graph.begin(pool)
    out.copy_(source + 3)
    graph.end()
    graph.replay()
    assert out[0] == 3


# --- what is refused ----------------------------------------------------------------------------------------


def test_captures_cannot_be_nested_and_the_first_goes_on() -> None:
    device = CpuDevice(GIB)
    source, out = torch.ones(2), torch.zeros(2)
    pool, graph = device.new_pool(), device.new_graph()
    graph.begin(pool)
    for other_pool in (pool, device.new_pool()):
        inner = device.new_graph()
        with pytest.raises(CaptureError, match="nested"):
            inner.begin(other_pool)
        with pytest.raises(CaptureError, match="not being captured"):
            inner.end()
        inner.abandon()
    out.copy_(source * 5)
    graph.end()
    out.zero_()
    graph.replay()
    assert out.tolist() == [5, 5]


def test_a_capture_cannot_begin_inside_accounted_work() -> None:
    device = CpuDevice(GIB)
    with device.accounted():
        with device.accounted():  # which itself may be nested
            pass
        with pytest.raises(CaptureError, match="accounted"):
            device.new_graph().begin(device.new_pool())
    assert device.recording is None


def test_a_graph_is_captured_once_and_replayed_only_after_that() -> None:
    device = CpuDevice(GIB)
    pool, graph = device.new_pool(), device.new_graph()
    for call in (graph.replay, graph.end):
        with pytest.raises(CaptureError):
            call()
    assert graph.node_count is None
    graph.abandon()  # never raises
    graph.begin(pool)
    with pytest.raises(CaptureError, match="never captured"):
        graph.replay()
    graph.end()
    with pytest.raises(CaptureError, match="not being captured"):
        graph.end()
    with pytest.raises(CaptureError, match="holds a capture already"):
        graph.begin(pool)
    graph.replay()  # nothing was recorded, so nothing runs
    assert graph.node_count == 0


def test_a_graph_that_was_abandoned_is_empty_and_can_be_captured_again() -> None:
    device = CpuDevice(GIB)
    out, pool, graph = torch.zeros(1), device.new_pool(), device.new_graph()
    graph.begin(pool)
    out.add_(1)
    graph.abandon()
    graph.abandon()
    with pytest.raises(CaptureError, match="never captured"):
        graph.replay()
    graph.begin(pool)
    out.add_(10)
    graph.end()
    graph.replay()
    assert out.item() == 21


def test_a_pool_of_another_device_is_refused() -> None:
    class Foreign(Pool): ...

    device = CpuDevice(GIB)
    with pytest.raises(CaptureError, match="pool"):
        device.new_graph().begin(Foreign())
    assert device.recording is None


# --- the surroundings of a capture --------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_frozen_during_a_capture_and_as_before_afterwards(enabled: bool) -> None:
    device = CpuDevice(GIB)
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(RuntimeError, match="in mid-capture"), device.capturing():
            assert not gc.isenabled()
            raise RuntimeError("in mid-capture")
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if was else gc.disable()


def test_devices_are_made_by_name() -> None:
    assert make_device("cpu", 2.5).total_bytes == int(2.5 * GIB)
    with pytest.raises(DeviceUnavailable, match=r"cuda:99.*cpu"):
        make_device("cuda:99", 8)
