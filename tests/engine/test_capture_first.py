"""`capture_first` for real: the KV pool comes after the graphs, nothing moves, everything adds up and is given back."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from tiny_models import GIB, MIB, VOCABULARY, batch_of, random_tokens, release, save_model

from toolkit.errors import InvalidInput
from toolkit.prefill.batch import Request, pack
from toolkit.prefill.build import Built, NoMemoryForKV, build_model_runner
from toolkit.prefill.check import check_replays
from toolkit.prefill.devices.cpu import CpuDevice
from toolkit.prefill.elastic_kv import ElasticKVPool
from toolkit.prefill.kv_pool import bytes_per_token
from toolkit.prefill.model_runner import ModelRunner
from toolkit.prefill.runners import EagerRunner, PrefillCudaGraphRunner
from toolkit.prefill.setup import GraphCapture, capture_prefill_graph
from toolkit.runs.execute import execute
from toolkit.runs.foretell import foretell
from toolkit.runs.record import RunRecord
from toolkit.settings import CaptureSettings

pytestmark = pytest.mark.usefixtures("quick_collections")
LADDER = (8, 64, 256)
KINDS = ("full", "breakable", "tc_piecewise")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 2048, "max_position_embeddings": 4096},
    "deepseek_v3": {"max_position_embeddings": 4096},
    "gemma2": {"max_position_embeddings": 4096},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: str(save_model(folder / kind, kind, **changes)) for kind, changes in SHAPES.items()}


def settings(model: str, **choices: Any) -> CaptureSettings:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "buckets": LADDER, "max_context": 64}
    if not {"free_memory_gib", "mem_fraction"} & set(choices):
        defaults["free_memory_gib"] = 0.1
    return CaptureSettings.create(model=model, **{"policy": "capture_first", **defaults, **choices})


def build(model: str, device: CpuDevice | None = None, **choices: Any) -> tuple[ModelRunner, Built]:
    built = Built()
    return build_model_runner(settings(model, **choices), device or CpuDevice(GIB), built, lambda *_: None), built


def run(runner: ModelRunner, **options: Any) -> GraphCapture:
    return capture_prefill_graph(model_runner=runner, eager_runner=EagerRunner(runner), **options)


def perform(model: str, **choices: Any) -> RunRecord:
    chosen = settings(model, **{"device_memory_gib": 1.0, **choices})
    record = execute(chosen, lambda event: None, lambda: False, run_id="20260101-000000-cafe", created="2026-01-01")
    assert RunRecord.from_json(record.to_json()) == record
    return record


# --- figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", KINDS)
def test_graphs_kv_pool_reserve_and_static_memory_are_all_there_is(models: dict[str, str], backend: str) -> None:
    runner, built = build(models["llama"], backend=backend, reserve_gib=0.02)
    pool, device = runner.kv_pool, runner.device
    assert isinstance(pool, ElasticKVPool) and built.ledger is not None
    addresses = [tensor.data_ptr() for tensor in (*pool.keys, *pool.values)]
    assert pool.num_tokens == max(LADDER)
    result = run(runner)
    assert (result.outcome, result.reason_code) == ("captured", "capture_first"), result.reason
    assert isinstance(result.runner, PrefillCudaGraphRunner)
    assert result.runner.ladder == list(LADDER)
    graphs = device.pool_reserved_bytes(result.runner.pool)
    assert graphs is not None
    named = sum(
        built.ledger[name] or 0
        for name in ("weights_gib", "static_buffers_gib", "allocator_rounding_gib", "ballast_gib")
    )
    rest = device.total_bytes - named * GIB - graphs - pool.backed_bytes - 0.02 * GIB
    tensors = 2 * len(pool.layers)
    assert -1 <= rest < tensors * device.backing_step  # a byte of rounding in GiB
    assert device.free_bytes() >= int(0.02 * GIB)
    assert result.free_after_gib == device.free_bytes() / GIB
    row = bytes_per_token(pool.layers, 4)
    assert 0 <= pool.backed_bytes - (pool.num_tokens + 1) * row < tensors * device.backing_step
    assert [tensor.data_ptr() for tensor in (*pool.keys, *pool.values)] == addresses
    assert check_replays(result.runner, VOCABULARY).problem is None


def test_it_has_fewer_kv_tokens_than_a_pool_that_comes_first_by_what_the_graphs_take(models: dict[str, str]) -> None:
    after, first = perform(models["llama"], reserve_gib=0.1), perform(models["llama"], policy="ungated")
    assert after.kv_cache_tokens is not None and first.kv_cache_tokens is not None
    row = bytes_per_token(build(models["llama"])[0].kv_pool.layers, 4)
    lost = (first.kv_cache_tokens - after.kv_cache_tokens) * row
    # KV first left 0.1 GiB and the graphs came out of these; here these are the reserve.
    assert after.mem_usage_gib is not None and after.mem_usage_gib == first.mem_usage_gib
    steps = 4 * 2 * MIB
    assert after.mem_usage_gib * GIB - steps <= lost <= after.mem_usage_gib * GIB + steps


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("choice", [{"free_memory_gib": 0.25}, {"mem_fraction": 0.5}, {"mem_fraction": 0.9}])
def test_models_of_other_kinds_and_both_ways_to_size_the_pool(
    models: dict[str, str], kind: str, choice: dict[str, float]
) -> None:
    record = perform(models[kind], reserve_gib=0.05, **choice)  # room for the eager passes of the comparison
    assert (record.outcome, record.reason_code) == ("captured", "capture_first"), record.reason
    assert record.replay_check is not None and record.replay_check.bit_equal
    assert record.decision is not None and record.free_after_gib is not None
    fitting = [bucket.num_tokens for bucket in record.buckets]
    assert fitting == sorted(LADDER, reverse=True)
    assert record.ledger["kv_cache_gib"] is not None and record.ledger["kv_cache_gib"] > 0.1
    assert any(line.startswith("Post-capture KV sizing: max_total_num_tokens=") for line in record.log)


# --- the rows beyond ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["breakable", "full"])
def test_a_prompt_across_the_border_of_the_first_memory_gives_the_same_bits(
    models: dict[str, str], backend: str
) -> None:
    """Slots that had no memory when the graphs were captured serve as those of a pool that came first."""
    hidden = {}
    for policy in ("capture_first", "ungated"):
        choices = {"backend": backend, "policy": policy, "max_context": 2048, "request_slots": 2}
        runner, _ = build(models["llama"], **choices)
        graphs = run(runner).runner
        assert isinstance(graphs, PrefillCudaGraphRunner)
        # The first step of a tensor of 64 bytes a row ends at row 32768.
        held = runner.kv_pool.allocate(32_768 - 900)
        generator, request, parts = random.Random(3), Request(()), []
        for _ in range(8):
            request.tokens = random_tokens(250, generator)
            batch = pack([request], runner.kv_pool)
            result = graphs.run(batch)
            assert (result.runner, result.bucket) == ("graph", 256)
            parts.append(result.hidden.clone())
        assert request.slots[0] < 32_768 < request.slots[-1]
        hidden[policy] = torch.cat(parts)
        runner.kv_pool.release((*held, *request.slots))
        assert runner.kv_pool.free_slots == runner.kv_pool.num_tokens
    assert torch.isfinite(hidden["ungated"]).all()
    assert torch.equal(hidden["capture_first"], hidden["ungated"])


# --- too little memory --------------------------------------------------------------------------------------


def test_out_of_memory_in_the_capture_is_loud_and_leaves_no_graph(models: dict[str, str]) -> None:
    record = perform(models["llama"], device_memory_gib=0.03, mem_fraction=0.3, buckets=(8, 2048))
    assert (record.outcome, record.exit_code, record.runner) == ("oom", 1, None), record.reason
    runner, _ = build(models["llama"], CpuDevice(GIB), buckets=(8, 2048))
    device = runner.device
    device.leave_free(40 * MIB)
    before = device.free_bytes()
    result = run(runner)
    assert (result.outcome, result.reason_code, result.oom_bucket) == ("oom", "out_of_memory", 2048)
    assert device.free_bytes() == before
    assert runner.kv_pool.num_tokens == 2048  # no pool for a server that does not start


def test_too_little_left_for_the_pool_ends_the_start_and_releases_the_graphs(models: dict[str, str]) -> None:
    record = perform(models["llama"], reserve_gib=0.9999, device_memory_gib=1.0)
    assert (record.outcome, record.reason_code, record.exit_code) == ("oom", "no_memory_for_kv", 1)
    assert record.runner is None and record.kv_cache_tokens == max(LADDER)
    assert "nothing is left for a KV pool beyond the 256 tokens of one full bucket" in record.reason
    assert any(line.startswith("Post-capture KV sizing failed: ") for line in record.log)
    runner, _ = build(models["llama"], reserve_gib=1.0)
    before = runner.device.free_bytes()
    result = run(runner)
    assert (result.runner, result.reason_code) == (None, "no_memory_for_kv")
    assert runner.device.free_bytes() == before
    assert result.free_after_gib == before / GIB


def test_memory_that_somebody_takes_while_the_pool_grows_is_an_outcome(models: dict[str, str]) -> None:
    runner, _ = build(models["llama"])
    device, pool = runner.device, runner.kv_pool
    assert isinstance(device, CpuDevice) and isinstance(pool, ElasticKVPool)
    grow, free = pool.grow, device.free_bytes()

    def late(nbytes: int) -> None:
        device.leave_free(20 * MIB)
        grow(nbytes)

    pool.grow = late  # type: ignore[method-assign]
    result = run(runner)
    assert (result.outcome, result.reason_code, result.runner) == ("oom", "no_memory_for_kv", None)
    assert "could not be given to the KV pool" in result.reason
    assert pool.num_tokens == max(LADDER)
    device.drop_ballast()
    del result
    assert device.free_bytes() > free - pool.backed_bytes


@pytest.mark.parametrize("capacity", [2**-10, 0.004, 0.012])
def test_a_tiny_device_is_too_small_by_name(models: dict[str, str], capacity: float) -> None:
    record = perform(models["llama"], device_memory_gib=capacity, mem_fraction=0.9)
    assert (record.outcome, record.runner) == ("oom", None)
    assert record.reason_code in ("out_of_memory_before_capture", "no_memory_for_kv", "out_of_memory")
    with pytest.raises(InvalidInput, match="cannot be left free"):
        perform(models["llama"], device_memory_gib=0.02, free_memory_gib=0.019)


def test_weights_that_fill_the_fraction_leave_no_pool(models: dict[str, str]) -> None:
    with pytest.raises(NoMemoryForKV):
        build(models["llama"], mem_fraction=0.001)


def test_a_device_of_4096_gib_is_addresses_alone(models: dict[str, str]) -> None:
    record = perform(models["llama"], device_memory_gib=4096.0, free_memory_gib=4000.0)
    assert (record.outcome, record.reason_code) == ("captured", "capture_first"), record.reason
    assert record.kv_cache_tokens is not None and record.kv_cache_tokens > 10**8


# --- no capture ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "code"),
    [({"backend": "disabled"}, "disabled"), ({"backend": "full", "role": "draft"}, "draft_not_forced")],
)
def test_a_guard_that_blocks_still_gets_its_kv_pool(models: dict[str, str], choices: dict[str, Any], code: str) -> None:
    record = perform(models["llama"], reserve_gib=0.05, **choices)
    assert (record.outcome, record.reason_code, record.runner) == ("skipped", code, "EagerRunner")
    assert record.kv_cache_tokens is not None and record.kv_cache_tokens > 100_000
    assert record.free_after_gib is not None and record.free_after_gib >= 0.05
    assert record.ledger["free_gib"] == record.free_after_gib


def test_a_capture_that_is_cancelled_grows_no_pool(models: dict[str, str]) -> None:
    runner, _ = build(models["llama"])
    before = runner.device.free_bytes()
    result = run(runner, cancelled=lambda: True)
    assert (result.outcome, result.runner, runner.kv_pool.num_tokens) == ("cancelled", None, 256)
    assert runner.device.free_bytes() == before


# --- again and again ----------------------------------------------------------------------------------------


def test_building_and_dropping_gives_the_memory_back(models: dict[str, str]) -> None:
    device = CpuDevice(GIB)
    for _ in range(3):
        runner = build(models["llama"], device)[0]
        gone = weakref.ref(runner)
        batch = batch_of(runner, 5)
        release(runner, batch)
        graphs = run(runner).runner
        assert isinstance(graphs, PrefillCudaGraphRunner)
        graphs.release()
        device.drop_ballast()
        del runner, graphs, batch
        gc.collect()
        device.empty_cache()
        assert gone() is None
        assert (device.allocator.external_bytes, device.free_bytes()) == (0, GIB)


# --- foretold -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "backend"), [*(("llama", backend) for backend in KINDS), ("deepseek_v3", "breakable")]
)
def test_the_forecast_of_such_a_run_is_exact_too(models: dict[str, str], kind: str, backend: str) -> None:
    record = perform(models[kind], backend=backend)
    forecast = foretell(record)
    assert [one.cumulative.mid for one in forecast.buckets] == [bucket.cumulative_mib for bucket in record.buckets]
    assert record.peak_usage_gib is not None and record.mem_usage_gib is not None
    assert forecast.total.mid == record.mem_usage_gib * 1024
    assert forecast.peak.mid == record.peak_usage_gib * 1024
