"""Memory of a capture on the accounted device: figures that add up, and out of memory that leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    GIB,
    MIB,
    VOCABULARY,
    CpuDevice,
    batch_of,
    capture,
    captured,
    make_model,
    make_runner,
    release,
    tiny_config,
    tiny_runner,
)

from toolkit.errors import CaptureError, OutOfMemoryAtBucket
from toolkit.prefill.attention import register_attention
from toolkit.prefill.backends import BACKENDS
from toolkit.prefill.check import check_replays
from toolkit.prefill.model_runner import ModelRunner
from toolkit.prefill.runners import EagerRunner, PrefillCudaGraphRunner
from toolkit.settings import Backend

KINDS = ("full", "breakable", "tc_piecewise")
LADDER = (16, 256, 1024, 2048)


def big_runner(backend: str = "breakable", device: CpuDevice | None = None, **fields: Any) -> ModelRunner:
    """Small weights, a wide layer, large buckets: the graphs of 2048 tokens take tens of MiB."""
    model = make_model(tiny_config("llama", intermediate_size=2048), attn_implementation=register_attention())
    options = {"kv_tokens": 2100, "context_length": 4096, "max_context": 512, "buckets": LADDER, **fields}
    return make_runner(model, backend=backend, device=device or CpuDevice(GIB), **options)


@pytest.fixture(scope="module")
def needed() -> int:
    """MiB that the largest bucket of `big_runner` needs, found once by capturing it."""
    result = capture(big_runner())
    assert result.peak_usage_gib is not None
    return round(result.peak_usage_gib * 1024)


# --- figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", KINDS)
def test_the_figures_of_a_capture_add_up(backend: str) -> None:
    runner = big_runner(backend)
    device = runner.device
    before = device.free_bytes()
    result = capture(runner)
    assert result.outcome == "captured"
    usage, peak = result.memory_usage_gib, result.peak_usage_gib
    assert usage is not None and peak is not None
    assert peak >= usage >= 0
    assert result.free_before_gib == before / GIB
    assert result.free_after_gib == device.free_bytes() / GIB
    assert usage == pytest.approx(result.free_before_gib - result.free_after_gib)
    assert isinstance(result.runner, PrefillCudaGraphRunner)
    assert device.pool_reserved_bytes(result.runner.pool) == pytest.approx(usage * GIB)
    figures = result.figures
    assert [figure.num_tokens for figure in figures] == sorted(LADDER, reverse=True)
    total = 0.0
    for figure in figures:
        assert figure.added_mib is not None and figure.cumulative_mib is not None
        total += figure.added_mib
        assert figure.cumulative_mib == pytest.approx(total)
        assert figure.free_after_gib == pytest.approx(result.free_before_gib - total / 1024)
        assert figure.elapsed_s == pytest.approx(figure.warmup_s + figure.capture_s)
        assert figure.warmup_s > 0 and figure.capture_s > 0
    assert total == pytest.approx(usage * 1024)
    assert result.capture_time_s >= sum(figure.elapsed_s for figure in figures)


@pytest.mark.parametrize("backend", KINDS)
def test_the_largest_bucket_pays_for_the_pool(backend: str) -> None:
    """Public measurements agree: 2.29 of 2.71 GB for the first of 58 buckets (shared H100 log, breakable)."""
    whole = capture(big_runner(backend))
    alone = capture(big_runner(backend, buckets=LADDER[-1:]))
    first, *later = [figure.added_mib or 0 for figure in whole.figures]
    assert first == alone.figures[0].added_mib
    assert first > 10 * sum(later)


def test_a_larger_ceiling_takes_more_and_dropping_small_buckets_gives_nothing_back() -> None:
    def usage(buckets: tuple[int, ...]) -> float:
        return capture(big_runner(buckets=buckets)).memory_usage_gib or 0

    assert usage((256,)) < usage((1024,)) < usage((2048,)) <= usage(LADDER)
    assert usage(LADDER[1:]) == pytest.approx(usage(LADDER), abs=2 / 1024)


def test_the_static_window_of_full_is_paid_for_in_the_pool() -> None:
    """Of one layer at a time: K and V rows of slots x context, and a mask of a byte a row and key."""

    def usage(max_context: int) -> float:
        options = {"buckets": (64,), "kv_tokens": 100, "context_length": 1 << 20, "request_slots": 4}
        result = capture(tiny_runner("llama", backend="full", max_context=max_context, **options))
        return (result.memory_usage_gib or 0) * 1024

    keys = 4 * 16384
    workspace = keys * (2 * 2 * 8 * 4) + keys * 64
    assert workspace == 12 * MIB
    assert usage(16) < 8
    assert 12 <= usage(16384) < 12 + 8


def test_replays_and_checks_take_nothing_from_the_device() -> None:
    runner = big_runner(buckets=(16, 256))
    graphs = captured(runner)
    free = runner.device.free_bytes()
    assert check_replays(graphs, VOCABULARY).problem is None
    batch = batch_of(runner, 200)
    for _ in range(3):
        graphs.run(batch)
    release(runner, batch)
    runner.device.empty_cache()
    assert runner.device.free_bytes() == free


@pytest.mark.parametrize("backend", KINDS)
def test_a_released_ladder_gives_all_of_it_back(backend: str) -> None:
    runner = big_runner(backend, buckets=(16, 256))
    before = runner.device.free_bytes()
    graphs = captured(runner)
    assert runner.device.free_bytes() < before
    graphs.release()
    runner.device.empty_cache()
    assert runner.device.free_bytes() == before


# --- out of memory ------------------------------------------------------------------------------------------


def starve(device: CpuDevice, left: int) -> Callable[[dict[str, Any]], None]:
    """An event sink: once two buckets are captured, all but `left` bytes are taken from outside."""

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "bucket" and event["index"] == 1:
            device.leave_free(left)

    return watch


def attempt(runner: ModelRunner, watch: Callable[[dict[str, Any]], None]) -> Any:
    from toolkit.prefill.setup import capture_prefill_graph

    return capture_prefill_graph(model_runner=runner, eager_runner=EagerRunner(runner), on_event=watch)


@pytest.mark.parametrize("backend", KINDS)
def test_out_of_memory_in_mid_ladder_leaves_the_device_as_it_was(backend: str) -> None:
    device = CpuDevice(GIB)
    runner = big_runner(backend, device)
    before = device.free_bytes()
    result = attempt(runner, starve(device, 0))
    assert (result.outcome, result.oom_bucket, result.runner) == ("oom", 256, None)
    assert result.reason.startswith("out of memory at bucket 256: cpu (accounted) out of memory. Tried to allocate")
    assert [figure.num_tokens for figure in result.figures] == [2048, 1024]
    assert device.recording is None
    device.drop_ballast()
    device.empty_cache()
    assert device.free_bytes() == before
    assert runner.kv_pool.free_slots == runner.kv_pool.num_tokens
    assert gc.isenabled()
    # The same process, the same model: a smaller ladder is captured and right.
    runner.buckets = (8, 16)
    graphs = captured(runner)
    assert graphs.ladder == [8, 16]
    assert check_replays(graphs, VOCABULARY).problem is None


@pytest.mark.parametrize("backend", KINDS)
def test_out_of_memory_inside_a_segment_closes_it(backend: str) -> None:
    """Warm-up still fits, then memory is gone: the failure happens while a graph is open."""
    device = CpuDevice(GIB)
    runner = big_runner(backend, device, buckets=(16, 1024))
    before = device.free_bytes()
    made = BACKENDS[Backend(backend)](runner)
    graphs = PrefillCudaGraphRunner(runner, made, EagerRunner(runner))
    capture_bucket = made.capture

    def starved(*arguments: Any) -> Any:
        device.leave_free(MIB)
        return capture_bucket(*arguments)

    made.capture = starved  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryAtBucket) as error:
        graphs.capture((16, 1024), lambda event: None, lambda: False)
    assert error.value.num_tokens == 1024
    assert device.recording is None
    assert graphs.captured == {}
    graphs.release()
    device.drop_ballast()
    device.empty_cache()
    assert device.free_bytes() == before
    made.capture = capture_bucket  # type: ignore[method-assign]
    assert captured(runner).ladder == [16, 1024]


def outcome_with(free: int, buckets: tuple[int, ...] = LADDER) -> tuple[str, int | None]:
    """Outcome and failing bucket with `free` bytes left; the graphs are gone afterwards."""
    runner = big_runner(buckets=buckets)
    runner.device.leave_free(free)
    result = capture(runner)
    if isinstance(result.runner, PrefillCudaGraphRunner):
        result.runner.release()
    return result.outcome, result.oom_bucket


def test_a_bucket_fits_from_an_exact_byte_on() -> None:
    too_little, enough = 40, 72  # MiB
    while enough - too_little > 1:
        middle = (enough + too_little) // 2
        if outcome_with(middle * MIB, (2048,)) == ("captured", None):
            enough = middle
        else:
            too_little = middle
    # What a layer has at once, gate, up and their product of 16 MiB each, and a few segments of 2 MiB.
    assert 48 <= enough <= 60
    for _ in range(2):
        assert outcome_with(enough * MIB, (2048,)) == ("captured", None)
        assert outcome_with(enough * MIB - 1, (2048,)) == ("oom", 2048)


def test_with_less_free_memory_an_earlier_bucket_fails(needed: int) -> None:
    """Largest first: the ladder gets the further the more there is, and `needed` is always enough."""
    outcomes = [outcome_with(free * MIB) for free in (10, needed // 2, needed - 8, needed, 2 * needed)]
    assert outcomes[0] == ("oom", 2048)
    assert outcomes[-2:] == [("captured", None)] * 2
    failing = [bucket or 0 for _, bucket in outcomes]
    assert failing == sorted(failing, reverse=True)
    assert len(set(failing)) == 3  # 2048, then 1024 whose warm-up has to fit beside the first graph, then none


def test_a_smaller_ladder_fits_where_a_larger_one_does_not(needed: int) -> None:
    runner = big_runner()
    runner.device.leave_free(needed // 2 * MIB)
    assert capture(runner).outcome == "oom"
    runner.buckets = LADDER[:2]
    assert capture(runner).outcome == "captured"


def test_other_failures_are_no_memory_matter() -> None:
    runner = big_runner(buckets=(16,))
    body = runner.body

    def reads_the_host(*_: Any, **__: Any) -> None:
        raise_on = runner.buffers.input_ids.sum() * 2
        if raise_on > 0:
            raise AssertionError

    handle = body.layers[1].register_forward_pre_hook(reads_the_host)
    before = runner.device.free_bytes()
    result = capture(runner)
    assert (result.outcome, result.reason_code, result.oom_bucket) == ("failed", "capture_error", None)
    assert "reads a result on the host" in result.reason
    handle.remove()

    def breaks(*_: Any, **__: Any) -> None:
        raise ArithmeticError("a library\nfailed")

    handle = body.layers[1].register_forward_pre_hook(breaks)
    result = capture(runner)
    assert (result.outcome, result.reason_code) == ("failed", "unexpected_error")
    assert result.reason == "ArithmeticError: a library failed"
    handle.remove()
    runner.device.empty_cache()
    assert runner.device.free_bytes() == before
    assert captured(runner).ladder == [16]


def test_a_capture_outside_the_toolkit_s_forward_is_refused() -> None:
    runner = big_runner(buckets=(16,))
    with pytest.raises(CaptureError, match="outside a forward pass"):
        runner.forward(torch.zeros(4, dtype=torch.int64), torch.arange(4))
