"""capture_prefill_graph: guards, then the policy, then the capture, and always a result object."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sglang_facts import guard_case, log_lines
from tiny_models import (
    GIB,
    TINY,
    CpuDevice,
    capture,
    make_model,
    make_runner,
    tiny_config,
    tiny_runner,
)

from toolkit.errors import InvalidInput
from toolkit.prefill.model_runner import (
    ModelRunner,
    compute_attention_and_moe_layers,
    model_geometry,
    resolve_language_model,
)
from toolkit.prefill.runners import EagerRunner, PrefillCudaGraphRunner
from toolkit.prefill.setup import GraphCapture, begin_line, end_line, get_available_gpu_memory

BACKEND_LOCKED = frozenset({("prefill", "backend")})
SIZES_LOCKED = frozenset({("prefill", "max_bs"), ("prefill", "bs")})


class ScriptedDevice(CpuDevice):
    """A device whose free memory is read from a script: one value before the capture, another one after it."""

    def __init__(self, before_gib: float, after_gib: float) -> None:
        super().__init__(8 * GIB)
        self._reading, self._after = before_gib, after_gib

    def free_bytes(self) -> int:
        return round(self._reading * GIB)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with super().capturing():
            yield
        self._reading = self._after


def scripted(before_gib: float, after_gib: float = 3.5, **fields: Any) -> ModelRunner:
    return tiny_runner("llama", device=ScriptedDevice(before_gib, after_gib), buckets=(4, 8), **fields)


def run(runner: ModelRunner) -> tuple[GraphCapture, list[str]]:
    """The result, and every log line."""
    events: list[dict[str, Any]] = []
    result = capture(runner, events)
    return result, [event["line"] for event in events if event["event"] == "log"]


# --- the gate, and life without it --------------------------------------------------------------------------


def test_low_free_memory_still_captures_prefill_graph() -> None:
    """The regression test of public PR sgl-project/sglang#33352: 3.99 GiB before, 3.5 after, graphs all the same."""
    result, lines = run(scripted(3.99))
    assert isinstance(result.runner, PrefillCudaGraphRunner)
    assert result.runner.ladder == [4, 8]
    assert result.outcome == "captured"
    assert result.memory_usage_gib == pytest.approx(0.49)
    assert (result.free_before_gib, result.free_after_gib) == (pytest.approx(3.99), 3.5)
    assert result.capture_time_s > 0
    assert result.reason_code == "ungated"
    assert lines[0].endswith("avail mem=3.99 GB")
    assert lines[1].endswith("mem usage=0.49 GB, avail mem=3.50 GB.")


@pytest.mark.parametrize(
    ("free_gib", "locked", "outcome", "code"),
    [
        (3.99, frozenset(), "skipped", "gate_low_memory"),
        (4.00, frozenset(), "captured", "gate_passed"),
        (3.99, BACKEND_LOCKED, "captured", "gate_bypassed"),
        (0.00, BACKEND_LOCKED, "captured", "gate_bypassed"),
        (3.99, SIZES_LOCKED, "skipped", "gate_low_memory"),
    ],
)
def test_the_gate_decides_when_it_is_the_policy(
    free_gib: float, locked: frozenset[tuple[str, str]], outcome: str, code: str
) -> None:
    result, lines = run(scripted(free_gib, policy="gated", locked_keys=locked))
    assert (result.outcome, result.reason_code) == (outcome, code)
    expected = PrefillCudaGraphRunner if outcome == "captured" else EagerRunner
    assert type(result.runner) is expected
    assert result.free_before_gib == pytest.approx(free_gib)
    if outcome == "skipped":
        assert lines == log_lines(guard_case("free_3.99_auto_target", "0.5.17"))
        assert (result.memory_usage_gib, result.capture_time_s, result.figures) == (0.0, 0.0, ())
        assert result.free_after_gib == result.free_before_gib


def test_the_gate_asks_draft_workers_too_in_the_same_words() -> None:
    result, lines = run(scripted(3.99, policy="gated", role="draft"))
    assert (result.outcome, result.reason_code) == ("skipped", "gate_low_memory")
    assert lines == log_lines(guard_case("free_3.99_auto_draft", "0.5.17"))


def test_free_memory_is_read_after_cached_blocks_were_given_back() -> None:
    device = CpuDevice(GIB)
    gone = device.empty((100 << 20,), torch.uint8)
    del gone
    assert device.free_bytes() < GIB
    assert get_available_gpu_memory(device) == 1.0


def test_memory_that_somebody_gave_back_makes_usage_negative_as_in_a_server() -> None:
    result, lines = run(scripted(3.0, 3.25))
    assert result.memory_usage_gib == pytest.approx(-0.25)
    assert "mem usage=-0.25 GB, avail mem=3.25 GB." in lines[1]


def test_an_unknown_policy_is_bad_input() -> None:
    with pytest.raises(InvalidInput, match="policy"):
        run(scripted(3.99, policy="sometimes"))


# --- log lines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "role", "backend", "ladder", "free_gib"),
    [
        ("ok_target", "target", "breakable", (4, 8, 2048), 10.0),
        ("ok_draft", "draft", "breakable", (4, 8, 2048), 10.0),
        ("eagle_target_full", "target", "full", (4, 8, 2048), 10.0),
        ("free_3.99_auto_target", "target", "breakable", (4, 8, 2048), 3.99),
        ("free_0.00_locked", "target", "breakable", (4, 8, 2048), 0.0),
    ],
)
def test_begin_and_end_lines_are_those_of_the_release(
    case: str, role: str, backend: str, ladder: Sequence[int], free_gib: float
) -> None:
    """The case had a capture that took 1.25 GiB in no time."""
    lines = [begin_line(role, backend, tuple(ladder), free_gib), end_line(role, 0.0, 1.25, free_gib - 1.25)]
    assert lines == log_lines(guard_case(case))


@pytest.mark.parametrize(("role", "backend"), [("target", "breakable"), ("target", "full"), ("draft", "breakable")])
def test_a_capture_logs_its_begin_and_its_end(role: str, backend: str) -> None:
    result, lines = run(tiny_runner("llama", backend=backend, role=role, buckets=(4, 8, 16)))
    assert result.outcome == "captured"
    assert lines == [
        begin_line(role, backend, (4, 8, 16), result.free_before_gib or 0),
        end_line(role, result.capture_time_s, result.memory_usage_gib or 0, result.free_after_gib or 0),
    ]
    assert re.fullmatch(
        rf"Capture {role} prefill CUDA graph begin\. backend={backend}, num_tokens=\[4, 8, 16\], "
        r"avail mem=\d+\.\d\d GB",
        lines[0],
    )
    assert re.fullmatch(
        rf"Capture {role} prefill CUDA graph end\. elapsed=\d+\.\d\d s, mem usage=\d+\.\d\d GB, "
        r"avail mem=\d+\.\d\d GB\.",
        lines[1],
    )


def test_events_come_as_decision_and_ladder_then_two_a_bucket() -> None:
    events: list[dict[str, Any]] = []
    result = capture(tiny_runner("llama", buckets=(4, 16, 8)), events)
    kinds = [event["event"] for event in events]
    assert kinds == ["facts", "ladder", "log", *["bucket_begin", "bucket"] * 3, "log"]
    assert events[0]["decision"]["code"] == "ungated"
    assert events[1]["buckets"] == [4, 16, 8]
    begun = [event for event in events if event["event"] == "bucket_begin"]
    done = [event for event in events if event["event"] == "bucket"]
    assert [(e["index"], e["total"], e["num_tokens"]) for e in begun] == [(0, 3, 16), (1, 3, 8), (2, 3, 4)]
    assert [(e["index"], e["total"], e["num_tokens"]) for e in done] == [(0, 3, 16), (1, 3, 8), (2, 3, 4)]
    assert begun[0]["free_gib"] == result.free_before_gib
    assert [e["free_gib"] for e in begun[1:]] == [e["free_after_gib"] for e in done[:-1]]


def test_a_capture_that_was_cancelled_has_no_runner_and_says_where_it_stopped() -> None:
    answers = iter([False, True])
    runner = tiny_runner("llama", buckets=(4, 8, 16))
    before = runner.device.free_bytes()
    result = capture(runner, cancelled=lambda: next(answers))
    assert (result.outcome, result.reason_code, result.runner) == ("cancelled", "cancelled", None)
    assert result.reason == "cancelled before bucket 8, 1 captured"
    assert [figure.num_tokens for figure in result.figures] == [16]
    assert result.memory_usage_gib is None
    assert runner.device.free_bytes() == before


# --- guards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["target", "draft"])
def test_disabled_runs_eager_and_takes_nothing(role: str) -> None:
    result, lines = run(tiny_runner("llama", backend="disabled", role=role))
    assert (result.outcome, result.reason_code) == ("skipped", "disabled")
    assert type(result.runner) is EagerRunner
    assert (result.memory_usage_gib, result.capture_time_s) == (0.0, 0.0)
    assert lines == log_lines(guard_case(f"disabled_{role}"))


@pytest.mark.parametrize(("backend", "outcome"), [("breakable", "captured"), ("full", "skipped")])
def test_a_draft_worker_is_forced_on_breakable_only_and_silent_otherwise(backend: str, outcome: str) -> None:
    result, lines = run(tiny_runner("llama", backend=backend, role="draft"))
    assert result.outcome == outcome
    if outcome == "skipped":
        assert (result.reason_code, lines) == ("draft_not_forced", [])


def test_an_eagle_target_is_refused_on_tc_piecewise() -> None:
    result, lines = run(tiny_runner("llama", backend="tc_piecewise", eagle_target=True))
    assert (result.outcome, result.reason_code) == ("skipped", "eagle_target")
    assert lines == log_lines(guard_case("eagle_target_tc"))
    assert run(tiny_runner("llama", eagle_target=True))[0].outcome == "captured"


def test_a_lora_configuration_without_support_is_refused() -> None:
    result, lines = run(tiny_runner("llama", lora_unsupported=True))
    assert (result.outcome, result.reason_code) == ("skipped", "lora_unsupported")
    assert lines == log_lines(guard_case("lora_unsupported"))


def test_an_empty_ladder_is_named_before_any_policy() -> None:
    result, lines = run(tiny_runner("llama", device=CpuDevice(GIB), buckets=(), policy="gated"))
    assert (result.outcome, result.reason_code) == ("skipped", "no_capture_sizes")
    assert lines == log_lines(guard_case("bs_empty"))
    assert result.free_before_gib is None  # it was never asked


def test_buckets_beyond_slots_context_and_pool_are_left_out() -> None:
    fits = run(tiny_runner("llama", backend="full", buckets=(4, 64, 128), request_slots=2, max_context=32))[0]
    assert isinstance(fits.runner, PrefillCudaGraphRunner)
    assert fits.runner.ladder == [4, 64]
    pool = run(tiny_runner("llama", buckets=(4, 64, 128), kv_tokens=100))[0]
    assert isinstance(pool.runner, PrefillCudaGraphRunner)
    assert pool.runner.ladder == [4, 64]
    none, lines = run(tiny_runner("llama", buckets=(128,), kv_tokens=100))
    assert (none.outcome, none.reason_code) == ("skipped", "no_size_fits")
    assert lines[0].startswith("Disable prefill CUDA graph capture because no configured capture size fits backend=")


class Headless(torch.nn.Module):
    """A model of the family in which the capture finds something missing."""

    def __init__(self, config: Any, body: torch.nn.Module | None) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.zeros(1))
        if body is not None:
            self.model = body


def test_a_model_without_a_decoder_body_is_no_language_model() -> None:
    config = tiny_config("llama")
    result, lines = run(make_runner(Headless(config, None)))
    assert (result.outcome, result.reason_code) == ("skipped", "not_a_language_model")
    assert lines == log_lines(guard_case("not_language_model"))


@pytest.mark.parametrize(("role", "case"), [("target", "no_layers"), ("draft", "no_layers_draft")])
def test_a_body_without_layers_is_refused(role: str, case: str) -> None:
    result, lines = run(make_runner(Headless(tiny_config("llama"), torch.nn.Linear(2, 2)), role=role))
    assert (result.outcome, result.reason_code) == ("skipped", "no_layers")
    assert lines == log_lines(guard_case(case))


def test_layers_without_standard_attention_are_refused() -> None:
    runner = tiny_runner("llama")
    del runner.body.layers[1].self_attn
    result, lines = run(runner)
    assert (result.outcome, result.reason_code) == ("skipped", "non_standard_gqa")
    assert lines == log_lines(guard_case("non_gqa"))


# --- what is found in a model -------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_body_attention_and_experts_are_found(model_type: str) -> None:
    model = make_model(tiny_config(model_type))
    body = resolve_language_model(model)
    assert body is model.model
    attention, moe = compute_attention_and_moe_layers(body)
    layers = model.config.num_hidden_layers
    assert [module.layer_idx for module in attention] == list(range(layers))
    assert len(moe) == {"gpt_oss": layers, "qwen3_moe": layers, "deepseek_v3": layers - 1}.get(model_type, 0)


def test_the_text_tower_of_a_multimodal_model_is_the_language_model() -> None:
    tower, wrapper = torch.nn.Linear(2, 2), torch.nn.Module()
    wrapper.model = torch.nn.Module()
    wrapper.model.language_model = tower
    assert resolve_language_model(wrapper) is tower
    wrapper.language_model = torch.nn.Module()
    wrapper.language_model.model = other = torch.nn.Linear(1, 1)
    assert resolve_language_model(wrapper) is other
    assert resolve_language_model(torch.nn.Linear(2, 2)) is None
    assert compute_attention_and_moe_layers(None) == ([], [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
@pytest.mark.parametrize("model_type", sorted(TINY))
def test_geometry_is_found_without_weights_whatever_the_config_says_of_dtypes(model_type: str, dtype: Any) -> None:
    config = tiny_config(model_type, dtype=dtype)
    geometry = model_geometry(config)
    assert len(geometry) == config.num_hidden_layers
    expected = (4, 16, 12, 4) if model_type == "deepseek_v3" else (2, 8, 8, 4)
    assert {(x.kv_heads, x.k_dim, x.v_dim, x.q_heads) for x in geometry} == {expected}
    assert config.dtype == (None if dtype is None else getattr(torch, dtype))  # not changed
