"""Advice of a plan is followed: every value it names is planned again, and fits with what comes later counted."""

from __future__ import annotations

import re
from typing import Any

import pytest

import toolkit
from toolkit.errors import InvalidInput
from toolkit.forecast.plan import Plan
from toolkit.policies import get_policy

DECODE_GIB = 0.83
"""Decode graphs, see assumptions."""
GRID: list[tuple[str, dict[str, Any]]] = [
    ("qwen3-0.6b", {}),
    ("qwen3-8b", {}),
    ("qwen3-30b-a3b", {}),
    ("llama-3.1-8b", {}),
    ("llama-3.1-8b", {"gpu": "l40s"}),
    ("gpt-oss-120b", {}),
    ("deepseek-v3", {"tp": 8, "gpu": "h200-141gb"}),
    ("kimi-k2", {"tp": 8, "gpu": "h100-80gb"}),
]
SHORT: list[dict[str, Any]] = [
    {"mem_fraction": 0.97},
    {"mem_fraction": 0.98},
    {"mem_fraction": 0.99},
    {"mem_fraction": 0.94, "post_capture_gib": 5.0},
    {"free_memory_gib": 1.0},
]


def short(plan: Plan) -> list[str]:
    return [name for name, one in plan.policies.items() if one.outcome == "oom" or one.starved_gib]


def fits(plan: Plan, policy: str) -> None:
    """By hand: captured, at its peak within what is free, and decode graphs and the declared need beside it."""
    one = plan.policies[policy]
    assert one.outcome == ("skipped" if one.code == "gate_low_memory" else "captured")
    assert one.starved_gib == 0
    declared = plan.settings.post_capture_need_gib
    assert one.free_after_gib is not None and one.free_after_gib >= DECODE_GIB + declared - 1e-6
    assert one.kv_cache_tokens is not None and one.kv_cache_tokens >= max(plan.buckets)
    if get_policy(policy).kv_first and one.outcome == "captured" and not one.trimmed:
        assert plan.forecast is not None and plan.forecast.peak.mid / 1024 <= plan.free_before_gib


def named(line: str) -> list[dict[str, Any]]:
    """What a line of advice says to set, one dict for each remedy."""
    found = []
    for part in line.split(": ", 1)[-1].split("; or "):
        option = part.partition("(")[2].partition(";")[0] if "(--" in part else ""
        values = dict(re.findall(r"--(mem-fraction|max-tokens|buckets) ([\d.,]+)", option))
        if values:
            types: dict[str, Any] = {"mem-fraction": float, "max-tokens": int, "buckets": toolkit_buckets}
            found.append({name.replace("-", "_"): types[name](value) for name, value in values.items()})
    return found


def toolkit_buckets(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@pytest.mark.parametrize("wanted", SHORT, ids=str)
@pytest.mark.parametrize(("model", "server"), GRID, ids=str)
def test_every_value_that_is_named_fits(model: str, server: dict[str, Any], wanted: dict[str, Any]) -> None:
    plan = toolkit.plan(model=model, **server, **wanted)
    wrong = short(plan)
    if not wrong:
        return
    line = next(line for line in plan.advice if " under " in line)
    values = named(line)
    assert values or "--policy" in line or "no fraction and no shorter ladder" in line
    for changes in values:
        kept = {name: value for name, value in wanted.items() if "mem_fraction" not in changes or "free" not in name}
        again = toolkit.plan(model=model, **server, **(kept | changes))
        for policy in wrong:
            fits(again, policy)
        if "mem_fraction" in changes and len(changes) == 1:  # the largest: the next leaves less than the reserve
            more = toolkit.plan(
                model=model, **server, **(kept | {"mem_fraction": round(changes["mem_fraction"] + 0.001, 3)})
            )
            assert more.left_gib < more.reserve_gib
    for policy in re.findall(r"--policy (\w+)", line):
        assert policy not in wrong
        fits(toolkit.plan(model=model, **server, **wanted, policy=policy), policy)


def test_a_ceiling_is_named_only_where_one_works() -> None:
    # At 0.98 1.48 GiB are free: decode graphs take 0.83, and the smallest ladder leaves too little of the reserve.
    assert not any("--max-tokens" in line for line in toolkit.plan(mem_fraction=0.98).advice)
    assert any("--max-tokens 3840" in line for line in toolkit.plan(mem_fraction=0.97).advice)


def test_what_starves_is_told_the_fraction_and_the_policy_that_does_not() -> None:
    plan = toolkit.plan(mem_fraction=0.94, post_capture_gib=5)
    assert short(plan) == ["gated", "ungated", "budgeted"]
    (line,) = [line for line in plan.advice if "lacks 2.97 GiB" in line]
    assert "--mem-fraction-static 0.895 on the server" in line and "--policy capture_first" in line
    assert "--policy budgeted" not in line  # it starves too


def test_a_ladder_of_ones_own_is_cut_and_not_replaced() -> None:
    plan = toolkit.plan(buckets=(64, 512, 8192), mem_fraction=0.965, reserve_gib=0.5)
    line = next(line for line in plan.advice if "lower the ceiling" in line)
    assert "--buckets 64,512;" in line and "--cuda-graph-bs-prefill 64 512" in line


def test_a_plan_works_out_its_advice_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.forecast import advice

    asked = []
    monkeypatch.setattr(advice, "find_remedies", lambda *arguments: asked.append(1))
    plan = toolkit.plan(mem_fraction=0.98)
    toolkit.policy_map(fractions=[0.97, 0.98])
    assert not asked
    assert plan.advice and len(asked) == 1


def test_where_no_value_works_it_says_so_and_names_none() -> None:
    plan = toolkit.plan(model="qwen3-8b", gpu="rtx-4090", mem_fraction=0.9, post_capture_gib=20.0)
    line = next(line for line in plan.advice if "lacks" in line)
    assert "no fraction and no shorter ladder is enough: raise --tp" in line and not named(line)
    with pytest.raises(InvalidInput):
        toolkit.plan(model="qwen3-8b", gpu="rtx-4090", solve="mem-fraction", post_capture_gib=20.0)


def test_a_pool_of_less_than_one_bucket_is_in_the_headline_and_its_advice_raises_the_fraction() -> None:
    plan = toolkit.plan(model="llama-3.1-8b", gpu="l4", mem_fraction=0.72, max_tokens=8192)
    assert plan.ledger.kv_cache_tokens < 8192
    assert "the KV pool holds less than one bucket" in plan.summary
    line = next(line for line in plan.advice if "KV pool" in line)
    (raised, *_) = named(line)
    assert "raise the fraction" in line and raised["mem_fraction"] > 0.72
    fits(toolkit.plan(model="llama-3.1-8b", gpu="l4", max_tokens=8192, **raised), "ungated")
