"""What a forecast costs, side by side in one run. Prints seconds and ratios; asserts no absolute time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import toolkit
from toolkit.forecast.plan import make_plan
from toolkit.forecast.plan_settings import PlanSettings

CASES: dict[str, dict[str, Any]] = {
    "Qwen3-8B, H100": {"model": "qwen3-8b", "gpu": "h100-80gb"},
    "Kimi-K2.7-Code, tp 8, H200": {"model": "kimi-k2", "gpu": "h200-141gb", "tp": 8, "mem_fraction": 0.9},
}


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("engine", ["sglang", "transformers"])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_and_the_next_one(case: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = PlanSettings.create(**CASES[case], engine=engine)
    first = seconds(lambda: make_plan(settings))
    moved = seconds(lambda: make_plan(settings.with_changes(mem_fraction=0.91)))
    shorter = seconds(lambda: make_plan(settings.with_changes(max_tokens=1024)))
    with capsys.disabled():
        print(
            f"\nplan, engine {engine}, {case}, {len(make_plan(settings).buckets)} buckets: first {first:.3f} s, "
            f"another fraction {moved:.4f} s, another ceiling {shorter:.4f} s"
        )


def test_a_ladder_is_forecast_from_few_traces(capsys: pytest.CaptureFixture[str]) -> None:
    from toolkit.catalogue import load_config, resolve_model
    from toolkit.forecast.own_engine import forecast_transformers
    from toolkit.forecast.own_traces import capture_traces
    from toolkit.settings import CaptureSettings

    config = load_config(resolve_model("qwen3-14b"))  # no other test has its traces
    ladder = toolkit.generate_prefill_buckets(8192)
    traces = capture_traces(config, CaptureSettings.create(backend="breakable"))
    recording = seconds(lambda: traces.at(ladder[-1]))
    forecast = seconds(lambda: forecast_transformers(config, ladder))
    with capsys.disabled():
        print(
            f"\nforecast of {len(ladder)} buckets / recording the few traces it needs, Qwen3-14B: "
            f"{forecast / recording:.2f} ({forecast:.3f} s / {recording:.3f} s)"
        )
    # Recorded bucket by bucket, the ladder would cost many times what its few traces did.
    assert forecast < len(ladder) * recording


def test_the_whole_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        sys.executable,
        "-c",
        "from toolkit.cli import main; main()",
        "plan",
        "--model",
        "qwen3-8b",
        "--gpu",
        "h100-80gb",
        "--json",
    ]
    took = seconds(lambda: subprocess.run(command, check=True, capture_output=True))
    nothing = seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
    with capsys.disabled():
        print(f"\nprefill-lab plan, Qwen3-8B, H100: {took:.2f} s as a command (an empty Python: {nothing:.2f} s)")


def test_maps_of_both_public_cases(capsys: pytest.CaptureFixture[str]) -> None:
    kimi = {"model": "kimi-k2", "gpu": "h100-80gb", "tp": 8, "sglang_version": "0.5.16"}
    fractions = [step / 100 for step in range(80, 99)]
    common = seconds(lambda: toolkit.policy_map(model="qwen3-8b", gpu="h100-80gb", fractions=fractions).counts)
    july = seconds(lambda: toolkit.policy_map(fractions=fractions[10:], **kimi).counts)
    again = seconds(lambda: toolkit.policy_map(fractions=fractions[10:], **kimi).counts)
    with capsys.disabled():
        print(
            f"\npolicy maps: Qwen3-8B, H100, {len(fractions)} fractions {common:.2f} s; Kimi-K2.7, tp 8, "
            f"{len(fractions[10:])} fractions {july:.2f} s, once more {again:.2f} s"
        )
