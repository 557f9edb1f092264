"""What `--solve` finds: it leaves the reserve beside everything that comes later, and passes the gate of its release.

That releases 0.5.16 and 0.5.17 skip an automatic prefill capture below 4.00 GiB is public (sgl-project/sglang#31204).
"""

from __future__ import annotations

from typing import Any

import pytest

import toolkit
from toolkit.cli import main
from toolkit.errors import InvalidInput
from toolkit.forecast.plan_settings import PlanSettings
from toolkit.forecast.solve import solution

GATE_GIB = 4.0


def free_in_the_end(plan: Any, declared: float) -> float:
    """GiB by hand: free before the capture less graphs, decode graphs (0.83, see assumptions) and the declared need."""
    assert plan.forecast is not None
    return float(plan.free_before_gib - plan.forecast.total.mid / 1024 - 0.83 - declared)


@pytest.mark.parametrize("what", ["mem-fraction", "max-tokens"])
@pytest.mark.parametrize(("declared", "reserve"), [(1.0, 0.01), (1.0, 0.5), (2.0, 0.2)])
def test_an_answer_leaves_the_reserve_beside_what_comes_later(what: str, declared: float, reserve: float) -> None:
    need: dict[str, Any] = {"post_capture_gib": declared, "reserve_gib": reserve}
    if what == "max-tokens":
        need["mem_fraction"] = 0.949  # 3.89 GiB free: too little for all of it
    plan = toolkit.plan(solve=what, **need)
    assert free_in_the_end(plan, declared) >= reserve - 1e-9
    assert not any(one.starved_gib for one in plan.policies.values())


def test_what_grows_with_the_prompt_counts_too() -> None:
    # 96 times 20 MiB are 1.875 GiB.
    plan = toolkit.plan(solve="mem-fraction", reserve_gib=0.1, post_capture_mib_per_1k=20.0, longest_prompt=96 * 1024)
    assert free_in_the_end(plan, 1.875) >= 0.1 - 1e-9


def test_more_declared_is_never_a_larger_fraction() -> None:
    found = [
        toolkit.plan(solve="mem-fraction", reserve_gib=0.5, post_capture_gib=gib).mem_fraction for gib in (0, 2, 4)
    ]
    assert found[0] > found[1] > found[2]  # type: ignore[operator]


@pytest.mark.parametrize("version", ["0.5.16", "0.5.17"])
def test_a_release_with_the_gate_is_left_what_it_asks_for(version: str) -> None:
    found = solution(PlanSettings.create(sglang_version=version, reserve_gib=1.0), "mem-fraction")
    plan = found.plan
    assert plan.free_before_gib >= GATE_GIB and plan.policies["gated"].outcome == "captured"
    assert plan.mem_fraction is not None
    more = toolkit.plan(sglang_version=version, mem_fraction=round(plan.mem_fraction + 0.001, 3))
    assert more.free_before_gib < GATE_GIB, "the largest that passes"
    assert found.without_gate.mem_fraction > plan.mem_fraction  # type: ignore[operator]
    words = str(found.gate_words)
    for figure in (f"{plan.free_before_gib:.2f}", f"{found.without_gate.free_before_gib:.2f}", "4.00 GiB"):
        assert figure in words
    assert "--cuda-graph-backend-prefill breakable" in words


@pytest.mark.parametrize(
    "settings", [{"sglang_version": "0.5.18"}, {"sglang_version": "0.5.17", "backend": "breakable"}]
)
def test_no_gate_is_asked_without_one_or_with_the_backend_named(settings: dict[str, Any]) -> None:
    found = solution(PlanSettings.create(reserve_gib=0.5, **settings), "mem-fraction")
    assert found.plan.free_before_gib < GATE_GIB and found.gate_words is None


def test_a_gate_that_no_ceiling_passes_is_said_beside_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --sglang-version 0.5.17 --mem-fraction 0.96 --solve max-tokens"
    assert main(command.split()) == 0
    second = capsys.readouterr().out.splitlines()[1]
    assert "asks for 4.00 GiB" in second and "3.03 GiB are free whatever the max-tokens" in second


def test_the_answer_says_what_is_left_at_the_peak_and_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--solve", "mem-fraction", "--post-capture", "1", "--reserve", "1"]) == 0
    plan = toolkit.plan(solve="mem-fraction", post_capture_gib=1.0, reserve_gib=1.0)
    assert plan.forecast is not None
    first, later = (
        capsys.readouterr().out.splitlines()[0],
        "decode graph reserve 0.83 GiB and declared for later 1.00 GiB",
    )
    at_peak = plan.free_before_gib - plan.forecast.peak.mid / 1024
    assert f"{at_peak:.2f} GiB stay free at the capture's peak" in first
    assert f"{free_in_the_end(plan, 1.0):.2f} GiB in the end, after {later}" in first


def test_no_ceiling_is_sought_where_nothing_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--backend", "disabled", "--solve", "max-tokens"]) == 2
    assert "disabled by hand" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--buckets 8,16,8192", "--max-tokens 512"])
def test_a_ladder_that_is_given_is_not_sought(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--solve", "max-tokens", *given.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert given.split()[0] in error and "\n" not in error


def test_an_answer_holds_one_bucket_of_kv_tokens() -> None:
    """At 0.93 Kimi's KV pool on eight H100 has 2,777 tokens, a third of its largest bucket."""
    kimi = {"model": "kimi-k2.7-code", "gpu": "h100-80gb", "tp": 8}
    with pytest.raises(InvalidInput, match=r"no mem-fraction leaves 1\.60 GiB: even the smallest with 8,192 KV tokens"):
        toolkit.plan(**kimi, solve="mem-fraction", reserve_gib=1.6)
    plan = toolkit.plan(**kimi, solve="mem-fraction", reserve_gib=0.1)
    assert plan.ledger.kv_cache_tokens >= max(plan.buckets)
    with pytest.raises(InvalidInput, match="no fraction leaves a KV pool of one bucket"):
        toolkit.plan(model="llama-3.1-8b", gpu="rtx-4090", solve="mem-fraction", max_tokens=65536, weights="bf16")
