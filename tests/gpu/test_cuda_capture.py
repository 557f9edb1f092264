"""Real captures on a real GPU: what only a GPU can show. Skipped without one; `--require-gpu` makes that a failure."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.runs.record import RunRecord
from toolkit.runs.worker import run_capture
from toolkit.settings import CaptureSettings

pytestmark = pytest.mark.gpu
BUCKETS = (8, 32, 128, 512)


def capture(**changes: Any) -> RunRecord:
    """One capture of the SmolLM2 geometry with random weights in a child process."""
    choices = {"model": "smollm2-135m", "weights": "random", "device": "cuda", "buckets": BUCKETS, **changes}
    return run_capture(CaptureSettings.create(**choices))


@pytest.mark.parametrize(("backend", "segments"), [("full", 1), ("breakable", 31), ("tc_piecewise", 31)])
def test_every_backend_captures_and_its_replays_agree(backend: str, segments: int) -> None:
    record = capture(backend=backend)
    assert record.outcome == "captured", record.reason
    assert {bucket.segments for bucket in record.buckets} == {segments}
    assert record.capture_order == sorted(BUCKETS, reverse=True)
    assert record.replay_check is not None and record.replay_check.tolerance is not None
    assert record.replay_check.max_abs_diff <= record.replay_check.tolerance
    assert record.mem_usage_gib is not None and record.peak_usage_gib is not None
    assert record.peak_usage_gib >= record.mem_usage_gib - 0.01
    assert record.device["kind"] == "cuda" and "accounted" not in record.device_label


@pytest.mark.parametrize(
    ("policy", "backend", "free_gib", "outcome"),
    [
        ("gated", "auto", 3.99, "skipped"),
        ("gated", "auto", 4.0, "captured"),
        ("gated", "breakable", 3.99, "captured"),
        ("ungated", "auto", 3.99, "captured"),
    ],
)
def test_the_gate_with_ballast(policy: str, backend: str, free_gib: float, outcome: str) -> None:
    record = capture(policy=policy, backend=backend, free_memory_gib=free_gib, buckets=(8, 32))
    assert record.outcome == outcome, record.reason
    assert record.free_before_gib is not None
    assert free_gib <= record.free_before_gib < free_gib + 0.01


def test_running_out_of_memory_is_an_outcome_and_the_next_capture_works() -> None:
    short = capture(buckets=None, max_tokens=2048, free_memory_gib=0.03)
    assert short.outcome == "oom" and short.oom_bucket is not None and short.advice
    assert capture(buckets=(8, 32)).outcome == "captured"


def test_a_budget_keeps_its_reserve() -> None:
    record = capture(policy="budgeted", buckets=None, max_tokens=2048, free_memory_gib=0.25, reserve_gib=0.05)
    assert record.outcome in ("captured", "skipped"), record.reason
    assert record.free_after_gib is not None and record.free_after_gib >= 0.05
    assert record.decision is not None and record.decision["code"].startswith(("budget", "over_budget"))


def test_a_kv_pool_that_comes_last_grows_behind_its_addresses() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed; ends after pip install cuda-bindings")
    record = capture(policy="capture_first", free_memory_gib=1.0, reserve_gib=0.5)
    assert record.outcome == "captured", record.reason
    assert record.replay_check is not None and record.replay_check.tolerance is not None
    assert record.replay_check.max_abs_diff <= record.replay_check.tolerance
    assert record.kv_cache_tokens is not None and record.kv_cache_tokens > max(BUCKETS)
    assert record.free_after_gib is not None and record.free_after_gib >= 0.45
