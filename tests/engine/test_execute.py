"""One capture from settings to record, in this process: every outcome, and what the record of it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_facts import guard_case, log_lines
from tiny_models import GIB, MIB, save_model

from toolkit.errors import DeviceUnavailable, InvalidInput, ModelUnavailable
from toolkit.prefill.devices.cpu import CpuDevice, CpuGraph
from toolkit.runs.execute import execute
from toolkit.runs.record import RunRecord
from toolkit.settings import CaptureSettings

# The RunRecord of the design document.
RECORD_KEYS = {
    *("schema_version", "id", "settings", "device", "software", "outcome", "runner", "reason", "advice"),
    *("oom_bucket", "signal", "free_before_gib", "free_after_gib", "mem_usage_gib", "peak_usage_gib"),
    *("capture_time_s", "capture_order", "kv_cache_tokens", "other_processes", "buckets", "replay_check", "speed"),
}
BUCKET_KEYS = {
    *("num_tokens", "elapsed_s", "warmup_s", "capture_s"),
    *("added_mib", "cumulative_mib", "segments", "graph_nodes"),
}
CHECK_KEYS = {"max_abs_diff", "tokens_checked", "bit_equal", "prompt", "next_token"}
SPEED_KEYS = {"num_tokens", "eager_ms", "replay_ms"}
LADDER = (4, 8, 16)
WIDE = (256, 1024, 2048)
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose large buckets take tens of MiB."""
    folder = tmp_path_factory.mktemp("wide") / "llama"
    return str(save_model(folder, intermediate_size=2048, max_position_embeddings=4096))


def run(
    model: str, events: Events | None = None, cancelled: Callable[[], bool] = lambda: False, **choices: Any
) -> RunRecord:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "buckets": LADDER}
    if not {"free_memory_gib", "mem_fraction"} & set(choices):
        defaults["mem_fraction"] = 0.5
    settings = CaptureSettings.create(model=model, **{"device_memory_gib": 1.0, **defaults, **choices})
    seen: Events = [] if events is None else events
    record = execute(settings, seen.append, cancelled, run_id="20260101-000000-cafe", created="2026-01-01T00:00:00Z")
    # What the child sends and the store keeps is the same record.
    assert RunRecord.from_json(record.to_json()) == record
    return record


def names(events: Events) -> list[str]:
    return [event["event"] + (f" {event['name']}" if event["event"] == "stage" else "") for event in events]


# --- captured -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "segments"), [("auto", 3), ("full", 1), ("breakable", 3), ("tc_piecewise", 3)])
def test_a_capture_that_succeeds(model: str, backend: str, segments: int) -> None:
    record = run(model, backend=backend, max_context=64)
    assert (record.outcome, record.runner, record.exit_code) == ("captured", "PrefillCudaGraphRunner", 0)
    assert record.device_label == "cpu (accounted)"
    assert record.settings["resolved_backend"] == ("breakable" if backend == "auto" else backend)
    assert record.settings["locked_keys"] == ([] if backend == "auto" else [["prefill", "backend"]])
    assert record.capture_order == [16, 8, 4] == [bucket.num_tokens for bucket in record.buckets]
    assert {bucket.segments for bucket in record.buckets} == {segments}
    check = record.replay_check
    assert check is not None and check.bit_equal
    assert check.max_abs_diff is not None and check.max_abs_diff <= (check.tolerance or 0)
    assert 3 <= check.tokens_checked <= sum(LADDER)
    assert [point.num_tokens for point in record.speed] == list(LADDER)
    assert all(point.eager_ms > 0 and point.replay_ms > 0 for point in record.speed)
    assert (record.advice, record.oom_bucket, record.signal) == ([], None, None)


def test_the_record_has_every_key_of_its_contract(model: str) -> None:
    record = json.loads(run(model, prompt="The capital of France is").to_json())
    assert set(record) >= RECORD_KEYS
    assert record["schema_version"] == 1
    assert record["settings"]["policy"] == "ungated"
    assert (record["id"], record["created"]) == ("20260101-000000-cafe", "2026-01-01T00:00:00Z")
    assert all(set(bucket) >= BUCKET_KEYS for bucket in record["buckets"])
    assert set(record["replay_check"]) >= CHECK_KEYS
    assert all(set(point) >= SPEED_KEYS for point in record["speed"])
    assert {"torch", "transformers", "python", "prefill-lab"} <= set(record["software"])
    assert record["device"]["kind"] == "cpu"
    assert record["weights"] == "real"
    assert (record["other_processes"], record["signal"]) == (0, None)
    assert any("accounted by a model of the CUDA allocator" in note for note in record["notes"])


def test_the_ledger_adds_up(model: str) -> None:
    record = run(model)
    ledger = {name: value or 0.0 for name, value in record.ledger.items()}
    assert ledger["total_gib"] == 1.0
    parts = {
        "context_gib",
        "weights_gib",
        "kv_cache_gib",
        "static_buffers_gib",
        "allocator_rounding_gib",
        "ballast_gib",
    }
    before = 1.0 - sum(value for name, value in ledger.items() if name in parts)
    assert before == pytest.approx(ledger["free_before_capture_gib"])
    assert ledger["free_before_capture_gib"] == record.free_before_gib
    assert ledger["free_gib"] == record.free_after_gib
    assert ledger["prefill_graph_gib"] == record.mem_usage_gib
    assert record.mem_usage_gib == pytest.approx((record.free_before_gib or 0) - (record.free_after_gib or 0))
    assert sum(bucket.added_mib or 0 for bucket in record.buckets) == pytest.approx((record.mem_usage_gib or 0) * 1024)


def test_the_kv_pool_takes_what_the_fraction_leaves_it(model: str) -> None:
    """KV bytes = free after weights - B (1 - f), over 2 layers x 2 heads x 8 x K and V x 4 bytes = 256 a token."""
    record = run(model, mem_fraction=0.25)
    assert record.mem_fraction_static == 0.25
    free_after_weights = GIB - 2 * MIB  # 80 kB of weights in one small segment
    assert record.kv_cache_tokens == (free_after_weights - int(0.75 * GIB)) // 256
    larger = run(model, mem_fraction=0.5)
    assert (larger.kv_cache_tokens or 0) - (record.kv_cache_tokens or 0) == GIB // 4 // 256
    trimmed = run(model, mem_fraction=0.5, buckets=LADDER[:1])
    assert trimmed.kv_cache_tokens == larger.kv_cache_tokens  # fewer buckets give no KV back


def test_memory_and_answers_are_the_same_every_time(model: str) -> None:
    def facts_of(record: RunRecord) -> dict[str, Any]:
        kept = record.model_dump(exclude={"speed", "capture_time_s", "log", "buckets"})
        return {**kept, "buckets": [(b.num_tokens, b.added_mib, b.graph_nodes) for b in record.buckets]}

    assert facts_of(run(model)) == facts_of(run(model))


def test_events_tell_the_story_in_order(model: str) -> None:
    events: Events = []
    record = run(model, events)
    story = [name for name in names(events) if name != "note"]  # how many there are depends on the machine's load
    assert story == [
        *("facts", "stage load weights", "stage allocate KV pool", "stage allocate static buffers", "facts"),
        *("stage capture", "facts", "ladder", "log", *["bucket_begin", "bucket"] * 3, "log", "facts"),
        *("stage compare with plain Transformers", "stage check replays", *["step"] * 3),
        *("stage time replay against eager", *["step"] * 3),
    ]
    first, second, third, fourth = (event for event in events if event["event"] == "facts")
    assert third["decision"] == record.decision
    assert fourth["mem_usage_gib"] == record.mem_usage_gib
    assert first["device"]["label"] == "cpu (accounted)"
    assert second["kv_cache_tokens"] == record.kv_cache_tokens
    assert [event["line"] for event in events if event["event"] == "log"] == record.log
    assert [event["text"] for event in events if event["event"] == "note"] == record.notes
    json.dumps([event for event in events if event["event"] != "facts"])  # they travel as JSON


def test_random_weights_say_that_they_are(model: str) -> None:
    record = run(model, weights="random", prompt="Hello")
    assert record.model_dump()["weights"] == "random"
    assert any(note.startswith("weights are random") for note in record.notes)
    assert record.outcome == "captured"


def test_a_prompt_without_a_tokenizer_is_a_note_and_no_failure(model: str) -> None:
    record = run(model, prompt="The capital of France is")
    assert record.outcome == "captured"
    assert record.replay_check is not None
    assert (record.replay_check.prompt, record.replay_check.next_token) == ("The capital of France is", None)
    assert any(note.startswith("no next token for the prompt: ") and "tokenizer" in note for note in record.notes)


def test_the_collector_and_the_device_are_as_before(model: str) -> None:
    for _ in range(2):
        run(model)
    assert torch.is_grad_enabled()
    assert CpuDevice(GIB).free_bytes() == GIB


# --- skipped ------------------------------------------------------------------------------------------------


def test_free_memory_asked_for_is_free_and_the_old_gate_skips_below_four(model: str) -> None:
    options = {"device_memory_gib": 8.0, "free_memory_gib": 3.99}
    gated = run(model, policy="gated", **options)
    assert abs((gated.free_before_gib or 0) * GIB - 3.99 * GIB) < 1
    assert (gated.outcome, gated.runner, gated.reason_code) == ("skipped", "EagerRunner", "gate_low_memory")
    assert gated.log == log_lines(guard_case("free_3.99_auto_target", "0.5.17"))
    assert (gated.buckets, gated.replay_check, gated.speed, gated.exit_code) == ([], None, [], 0)
    assert gated.mem_usage_gib == 0
    assert len(gated.advice) == 2
    ungated = run(model, **options)
    assert (ungated.outcome, ungated.free_before_gib) == ("captured", gated.free_before_gib)
    assert "avail mem=3.99 GB" in ungated.log[0]
    bypassed = run(model, policy="gated", backend="breakable", **options)
    assert (bypassed.outcome, bypassed.reason_code) == ("captured", "gate_bypassed")
    passed = run(model, policy="gated", device_memory_gib=8.0, free_memory_gib=4.0)
    assert (passed.outcome, passed.free_before_gib) == ("captured", 4.0)


def test_disabled_is_a_skip_with_the_words_of_a_server(model: str) -> None:
    record = run(model, backend="disabled")
    assert (record.outcome, record.runner, record.reason_code) == ("skipped", "EagerRunner", "disabled")
    assert record.log == log_lines(guard_case("disabled_target"))
    assert record.advice == []


def test_a_ladder_below_the_first_bucket_is_a_skip(model: str) -> None:
    record = run(model, buckets=None, max_tokens=3)
    assert (record.outcome, record.reason_code) == ("skipped", "no_capture_sizes")


# --- out of memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free_mib", "bucket"), [(20, 2048), (88, 1024)])
def test_out_of_memory_is_an_outcome_with_its_bucket_every_time(wide_model: str, free_mib: int, bucket: int) -> None:
    """More capacity, a later bucket; 88 MiB hold the graph of 2048 tokens, but not the next warm-up beside it."""
    for _ in range(2):
        record = run(wide_model, buckets=WIDE, free_memory_gib=free_mib / 1024)
        assert (record.outcome, record.oom_bucket, record.reason_code) == ("oom", bucket, "out_of_memory")
    assert (record.runner, record.exit_code, record.replay_check) == (None, 1, None)
    assert record.reason.startswith(f"out of memory at bucket {bucket}: cpu (accounted) out of memory")
    assert record.capture_order == [tokens for tokens in sorted(WIDE, reverse=True) if tokens > bucket]
    assert record.free_after_gib == pytest.approx(record.free_before_gib)  # all of it came back
    assert record.mem_usage_gib is None
    assert 0 < (record.peak_usage_gib or 0) <= free_mib / 1024
    assert record.log[-1].startswith("Capture target prefill CUDA graph failed: out of memory")
    assert len(record.log) == 2
    assert any("--free-memory" in line for line in record.advice)


@pytest.mark.parametrize("memory", [{"free_memory_gib": 40 / 1024}, {"mem_fraction": 0.94}])
def test_the_advice_after_running_out_is_computed_and_holds(wide_model: str, memory: dict[str, float]) -> None:
    """Each way out alone is enough, and the fraction gives up no more than one step of the allocator too much."""
    record = run(wide_model, buckets=WIDE, device_memory_gib=0.5, **memory)
    assert (record.outcome, record.oom_bucket) == ("oom", 2048)
    words = " ".join(record.advice)
    assert "by the forecast" in words and "is the highest forecast to fit" in words
    options = dict(re.findall(r"--(buckets|free-memory|mem-fraction) ([\d.,]+)", words))
    assert len(options) == 2
    for option, value in options.items():
        buckets = tuple(map(int, value.split(","))) if option == "buckets" else WIDE
        freed = {"free-memory": "free_memory_gib", "mem-fraction": "mem_fraction"}.get(option)
        choices = {freed: float(value)} if freed else memory
        again = run(wide_model, buckets=buckets, device_memory_gib=0.5, **choices)
        assert (again.outcome, again.capture_order) == ("captured", sorted(buckets, reverse=True)), option


def test_enough_for_the_graphs_and_too_little_for_a_comparison_is_still_a_capture(wide_model: str) -> None:
    record = run(wide_model, buckets=(16, 2048), free_memory_gib=64 / 1024)
    assert (record.outcome, record.runner) == ("captured", "PrefillCudaGraphRunner")
    assert record.replay_check is None
    assert any(note.startswith("the comparison of replays with eager is n/a") for note in record.notes)
    assert record.free_after_gib is not None


def test_weights_beyond_the_fraction_leave_no_kv_pool(wide_model: str) -> None:
    record = run(wide_model, mem_fraction=0.001)
    assert (record.outcome, record.reason_code, record.runner) == ("oom", "no_memory_for_kv", None)
    assert record.advice[0].startswith("raise --mem-fraction")
    assert record.ledger["weights_gib"] is not None
    assert (record.oom_bucket, record.kv_cache_tokens, record.free_before_gib) == (None, None, None)
    assert record.mem_fraction_static == 0.001


def test_a_device_too_small_for_the_weights_is_out_of_memory_before_the_capture(wide_model: str) -> None:
    record = run(wide_model, device_memory_gib=1 / 1024, mem_fraction=0.9)
    assert (record.outcome, record.reason_code) == ("oom", "out_of_memory_before_capture")
    assert record.reason.startswith("before the capture: cpu (accounted) out of memory")
    assert (record.oom_bucket, record.log, record.buckets) == (None, [], [])


# --- cancelled and failed -----------------------------------------------------------------------------------


def test_a_capture_is_cancelled_between_two_buckets(model: str) -> None:
    events: Events = []
    record = run(model, events, lambda: sum(event["event"] == "bucket" for event in events) == 2)
    assert (record.outcome, record.runner, record.exit_code) == ("cancelled", None, 1)
    assert record.reason == "cancelled before bucket 4, 2 captured"
    assert record.capture_order == [16, 8]
    assert record.free_after_gib == record.free_before_gib
    assert names(events)[-1] != "bucket_begin"
    before = run(model, cancelled=lambda: True)
    assert (before.outcome, before.capture_order) == ("cancelled", [])


def test_a_replay_that_does_nothing_is_a_failure(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuGraph, "replay", lambda self: None)
    record = run(model)
    assert (record.outcome, record.reason_code, record.runner) == ("failed", "replay_mismatch", None)
    assert "differs from eager on the same padded batch" in record.reason
    assert record.replay_check is not None and not record.replay_check.bit_equal
    assert record.replay_check.max_abs_diff is None  # not a number
    assert record.speed == []
    assert record.advice[0].startswith("do not serve")


def test_a_replay_that_raises_is_a_failure(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CpuGraph) -> None:
        raise RuntimeError("a graph\nthat cannot be launched")

    monkeypatch.setattr(CpuGraph, "replay", broken)
    record = run(model)
    assert (record.outcome, record.reason_code, record.runner) == ("failed", "replay_error", None)
    assert record.reason.endswith("RuntimeError: a graph that cannot be launched")


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "error", "says"),
    [
        ({"policy": "sometimes"}, InvalidInput, "policy 'sometimes'"),
        ({"device": "cuda:99"}, DeviceUnavailable, "cuda:99"),
        ({"mem_fraction": "auto"}, InvalidInput, "--mem-fraction"),
        ({"free_memory_gib": 1.0}, InvalidInput, "at most 0."),
    ],
)
def test_what_cannot_be_used_is_refused_and_leaves_no_record(
    model: str, choices: dict[str, Any], error: type[InvalidInput], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        run(model, **choices)
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_without_weights_is_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "config.json").write_text((Path(model) / "config.json").read_text())
    with pytest.raises(ModelUnavailable, match="no weights"):
        run(str(tmp_path), weights="real")
