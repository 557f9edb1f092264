"""Advice: what to do next after each outcome, and that what it says can be done."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InvalidInput
from toolkit.ladder import generate_prefill_buckets
from toolkit.policies import BucketNeed, LadderNeed, PolicyFacts
from toolkit.runs.advice import Known, Shortfall, advise, shortfall
from toolkit.settings import CaptureSettings


def advice(outcome: str, code: str | None = None, *, settings: dict[str, Any] | None = None, **facts: Any) -> list[str]:
    fields = {"outcome": outcome, "reason_code": code, **facts}
    return advise(fields, CaptureSettings.create(**(settings or {})))


def options(lines: list[str]) -> dict[str, str]:
    """Options that the advice names with a value, by name."""
    return dict(re.findall(r"--([a-z-]+) ([\w.]+)", " ".join(lines)))


def test_success_needs_no_advice() -> None:
    assert advice("captured") == []
    assert advice("cancelled", "cancelled") == []
    assert advice("crashed") == []


def test_out_of_memory_names_every_way_out() -> None:
    lines = advice("oom", "out_of_memory", oom_bucket=8192, mem_fraction_static=0.97, ledger={"total_gib": 5.0})
    assert options(lines) == {
        "max-tokens": "4096",
        "mem-fraction": "0.920",
        "policy": "budgeted",
        "backend": "disabled",
    }
    assert "small buckets does not help" in lines[0]


def test_out_of_memory_at_a_later_bucket_drops_the_larger_ones() -> None:
    # Measured on the accounted CPU: 512 captured, out of memory at 256; the ladder 128, 256 then fits.
    facts = {"oom_bucket": 256, "buckets": [{"num_tokens": 512}]}
    lines = advice("oom", "out_of_memory", settings={"buckets": (128, 256, 512)}, **facts)
    assert "--buckets 128,256 " in lines[0]
    assert options(advice("oom", "out_of_memory", **facts))["max-tokens"] == "256"


def test_with_free_memory_given_more_of_it_is_advised() -> None:
    lines = advice("oom", "out_of_memory", settings={"free_memory_gib": 0.5}, oom_bucket=64)
    assert options(lines) == {"max-tokens": "32", "free-memory": "1", "policy": "budgeted", "backend": "disabled"}


def test_out_of_memory_before_the_capture_says_which_part_was_too_large() -> None:
    code = "out_of_memory_before_capture"
    (line,) = advice("oom", code, oom_bucket=None, mem_fraction_static=0.9, ledger={"total_gib": 8.0})
    assert line.startswith("the weights do not fit") and "--mem-fraction" not in line
    fields = {"outcome": "oom", "reason_code": code, "mem_fraction_static": 0.997}
    fields["ledger"] = {"total_gib": 8.0, "weights_gib": 0.25}
    (line,) = advise(fields, CaptureSettings.create(), Known(auto_fraction=0.525))
    assert "weights take 0.25 of 8.00 GiB" in line and "computes 0.525 here" in line and "0.997" in line
    assert "--max-tokens" not in line and "--device-memory" in line
    (line,) = advise(fields, CaptureSettings.create())  # too small a device for the heuristic
    assert "under 0.997" in line


def test_weights_that_exceed_the_fraction_need_a_higher_one_not_a_lower() -> None:
    (line,) = advice("oom", "no_memory_for_kv", mem_fraction_static=0.1)
    assert line.startswith("raise --mem-fraction") and "weights alone exceed" in line


def test_a_pool_of_less_than_one_bucket_needs_a_higher_fraction_or_a_lower_ceiling() -> None:
    # 0.5 of 10 GiB are 5: weights of 4 leave 1, weights of 6 nothing.
    for weights, helps in ((4.0, True), (6.0, False)):
        ledger = {"total_gib": 11.0, "context_gib": 1.0, "weights_gib": weights}
        (line,) = advice("oom", "no_memory_for_kv", mem_fraction_static=0.5, ledger=ledger)
        assert line.startswith("raise --mem-fraction") and ("--max-tokens" in line) is helps


@given(st.integers(1, 1 << 20), st.none() | st.floats(0.05, 0.99), st.none() | st.floats(0.01, 100))
def test_whatever_ran_out_the_advice_can_be_followed(bucket: int, fraction: float | None, free: float | None) -> None:
    given_free = {} if free is None else {"free_memory_gib": free}
    lines = advice("oom", "out_of_memory", settings=given_free, oom_bucket=bucket, mem_fraction_static=fraction)
    named = options(lines)
    assert lines
    if bucket > 7:
        ceiling = int(named["max-tokens"])
        assert ceiling <= bucket // 2
        assert generate_prefill_buckets(ceiling)[-1] == ceiling  # a bucket, so that nothing is cut silently
    if fraction is not None and "mem-fraction" in named:
        assert 0 < float(named["mem-fraction"]) < fraction
    if free is not None:
        assert float(named["free-memory"]) > free


def test_the_gate_s_skip_names_both_ways_around_it() -> None:
    lines = advice("skipped", "gate_low_memory", settings={"policy": "gated"})
    assert options(lines) == {"backend": "breakable", "policy": "ungated"}


@pytest.mark.parametrize("code", ["disabled", "no_layers", "non_standard_gqa"])
def test_a_skip_that_was_asked_for_or_cannot_be_helped_gives_no_advice(code: str) -> None:
    assert advice("skipped", code) == []


def test_a_replay_that_disagrees_is_not_to_be_served() -> None:
    (line,) = advice("failed", "replay_mismatch")
    assert line.startswith("do not serve with these graphs")
    assert advice("failed", "unexpected_error") == []


@pytest.mark.parametrize(
    ("buckets", "oom_bucket", "advised"),
    [((8, 16, 2048, 4096), 4096, "8,16,2048"), ((8, 16, 2048, 4096), 2048, "8,16"), ((4096,), 4096, "2048")],
)
def test_a_ladder_given_bucket_by_bucket_is_lowered_the_same_way(
    buckets: tuple[int, ...], oom_bucket: int, advised: str
) -> None:
    with pytest.raises(InvalidInput):  # so a ceiling would be bad advice
        CaptureSettings.create(buckets=buckets, max_tokens=2048)
    lines = advice("oom", "out_of_memory", settings={"buckets": buckets}, oom_bucket=oom_bucket)
    assert f"--buckets {advised} " in lines[0]
    assert "max-tokens" not in options(lines)


@pytest.mark.parametrize(("settings", "bucket"), [({"buckets": (1, 4)}, 1), ({"max_tokens": 4}, 4)])
def test_when_the_smallest_bucket_does_not_fit_no_smaller_one_is_advised(settings: dict[str, Any], bucket: int) -> None:
    named = options(advice("oom", "out_of_memory", settings=settings, oom_bucket=bucket))
    assert named == {"policy": "budgeted", "backend": "disabled"}


# --- computed from a forecast -------------------------------------------------------------------------------


def ladder_need(buckets: tuple[int, ...], peak_gib: float) -> LadderNeed:
    largest_first = sorted(buckets, reverse=True)
    return LadderNeed(tuple(BucketNeed(one, peak_gib, peak_gib) for one in largest_first), peak_gib, peak_gib)


NEEDS = (ladder_need((8, 16, 32, 64), 2.0), ladder_need((8, 16, 32), 1.5), ladder_need((8, 16), 0.75))


def test_what_is_missing_is_the_forecast_and_the_reserve_less_what_is_free() -> None:
    facts = PolicyFacts(1.0, frozenset(), (8, 16, 32, 64), reserve_gib=0.25)
    assert shortfall(NEEDS, facts) == Shortfall(1.25, (8, 16))
    assert shortfall(NEEDS, dataclasses.replace(facts, free_gib=2.25)) is None
    assert shortfall(NEEDS, dataclasses.replace(facts, free_gib=2.25, post_capture_gib=0.5)) == Shortfall(
        0.5, (8, 16, 32)
    )
    assert shortfall((), facts) is None


def test_with_a_forecast_the_values_are_computed() -> None:
    fields = {"outcome": "oom", "reason_code": "out_of_memory", "oom_bucket": 64, "mem_fraction_static": 0.9}
    fields["ledger"] = {"total_gib": 11.0, "context_gib": 1.0}
    lines = advise(fields, CaptureSettings.create(), Known(Shortfall(1.25, (8, 16))))
    # 1.25 GiB of the 10 that the fraction multiplies.
    assert options(lines) == {
        "max-tokens": "16", "mem-fraction": "0.775", "policy": "budgeted", "backend": "disabled"
    }  # fmt: skip
    lines = advise(fields, CaptureSettings.create(free_memory_gib=1.0), Known(Shortfall(1.2555, ())))
    assert options(lines) == {"free-memory": "2.28", "policy": "budgeted", "backend": "disabled"}


def test_a_trimmed_ladder_says_what_the_whole_one_would_take() -> None:
    fields = {"outcome": "captured", "reason_code": "budget_trimmed", "trimmed": [64], "mem_fraction_static": 0.9}
    fields["ledger"] = {"total_gib": 10.0}
    (line,) = advise(fields, CaptureSettings.create(policy="budgeted"), Known(Shortfall(0.5, (8, 16, 32))))
    assert line.startswith("for the whole ladder lower the fraction: --mem-fraction 0.850")
    assert advise({**fields, "trimmed": []}, CaptureSettings.create(policy="budgeted"), None) == []


def test_what_starves_is_said_whatever_the_outcome() -> None:
    (line,) = advise({"outcome": "captured", "starved_gib": 0.25}, CaptureSettings.create())
    assert line.startswith("0.25 GiB are missing")
    assert advise({"outcome": "captured", "starved_gib": 0.0}, CaptureSettings.create()) == []
    # Where the later need is more than was free, no shorter ladder helps.
    fields = {"outcome": "oom", "reason_code": "out_of_memory", "oom_bucket": 64, "free_before_gib": 0.2}
    for need, policies in ((0.1, {"budgeted"}), (0.25, set())):
        lines = advise(fields, CaptureSettings.create(free_memory_gib=0.2, post_capture_gib=need))
        assert {options([line]).get("policy") for line in lines} - {None} == policies


def test_what_starves_names_what_would_help() -> None:
    ledger = {"total_gib": 11.0, "context_gib": 1.0}
    fields = {"outcome": "captured", "starved_gib": 0.25, "mem_fraction_static": 0.9, "ledger": ledger}
    # 0.25 of the 10 GiB that the fraction multiplies; 0.5 where the pool's tensors give back whole steps.
    assert options(advise(fields, CaptureSettings.create())) == {"mem-fraction": "0.875", "policy": "capture_first"}
    known = Known(later_pool_gib=0.5)
    (line,) = advise({**fields, "mem_usage_gib": 0.3}, CaptureSettings.create(), known)
    assert "--mem-fraction 0.850" in line and "(the graphs take 0.30 GiB)" in line
    assert "a lower --max-tokens" in line and "--policy budgeted" in line
    # Graphs that take less than what is missing are not what it is missing for.
    (line,) = advise({**fields, "mem_usage_gib": 0.2}, CaptureSettings.create(), known)
    assert "--max-tokens" not in line and "budgeted" not in line
    (line,) = advise(fields, CaptureSettings.create(free_memory_gib=0.5))
    assert float(options([line])["free-memory"]) >= 0.75


def test_graphs_that_leave_no_kv_pool_need_a_lower_ceiling() -> None:
    (line,) = advice("oom", "no_memory_for_kv", settings={"policy": "capture_first"})
    assert line.startswith("lower the ceiling")


def test_more_than_the_device_has_is_not_advised() -> None:
    fields = {"outcome": "oom", "reason_code": "out_of_memory", "oom_bucket": 64, "ledger": {"total_gib": 1.0}}
    lines = advise(fields, CaptureSettings.create(free_memory_gib=0.5), Known(Shortfall(4096.0, ())))
    assert "free-memory" not in options(lines) and lines[0].startswith("use a device with more memory")


@pytest.mark.parametrize("policy", ["budgeted", "capture_first"])
def test_a_policy_that_is_in_use_is_not_advised(policy: str) -> None:
    settings = CaptureSettings.create(policy=policy, free_memory_gib=0.5, buckets=(8, 16))
    (line,) = advise({"outcome": "captured", "starved_gib": 0.25}, settings)
    assert f"--policy {policy}" not in line and "--free-memory 0.77" in line


def test_a_reserve_that_leaves_no_kv_pool_is_named_as_the_cause() -> None:
    (line,) = advice("oom", "no_memory_for_kv", settings={"policy": "capture_first", "reserve_gib": 64})
    assert line.startswith("lower --reserve")
