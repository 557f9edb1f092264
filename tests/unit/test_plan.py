"""A plan against what servers logged and against the executed rules of their releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import toolkit
from toolkit.catalogue import get_model
from toolkit.errors import InvalidInput
from toolkit.forecast import engines
from toolkit.forecast.assumptions import default_requests, request_table_gib
from toolkit.forecast.engines import ForecastRequest
from toolkit.forecast.plan import Plan
from toolkit.forecast.solve import last_that_holds, leaves_reserve
from toolkit.forecast.terms import DRIVER, GRAPH_POOL, BucketForecast, Forecast, Range, Term
from toolkit.policies import POLICIES

KIMI: dict[str, Any] = {"model": "kimi-k2", "tp": 8, "gpu": "h100-80gb", "sglang_version": "0.5.16"}


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine by hand: 256 KiB a token of the largest bucket, 4 MiB for each bucket, the range half and double."""

    def engine(request: ForecastRequest) -> Forecast:
        pool, ladder = max(request.buckets) / 4, sorted(request.buckets, reverse=True)
        gone = [Range(mib, mib / 2, 2 * mib) for mib in (pool + 4 * (n + 1) for n in range(len(ladder)))]
        first = [gone[0], *[Range(4, 2, 8)] * (len(ladder) - 1)]
        buckets = [BucketForecast(*each) for each in zip(ladder, first, gone, gone, strict=True)]
        rest = 4.0 * len(ladder)
        terms = (Term(GRAPH_POOL, Range(pool, pool / 2, 2 * pool), "by hand"),)
        return Forecast("flat", (*terms, Term(DRIVER, Range(rest, rest / 2, 2 * rest), "by hand")), tuple(buckets))

    monkeypatch.setitem(engines.ENGINES, "flat", engine)


# --- the ledger -----------------------------------------------------------------------------------------------


def test_the_ledger_of_a_public_log() -> None:
    """Qwen3-30B-A3B-FP8 on an H100, SGLang of 2026-08-27: every line of its start-up log."""
    plan = toolkit.plan(model="qwen3-30b-a3b", weights="fp8", sglang_version="0.5.18", max_running_requests=4096)
    assert plan.mem_fraction == 0.83
    assert plan.lines[0].gib - plan.ledger.line("context").gib == pytest.approx(78.48, abs=0.005)
    assert plan.ledger.line("weights").gib == pytest.approx(29.15, rel=0.005)
    assert plan.ledger.kv_cache_tokens == pytest.approx(392_920, rel=0.005)
    assert plan.ledger.line("kv_cache").gib == pytest.approx(17.99 * 2, rel=0.005)
    assert plan.free_before_gib == pytest.approx(12.59, abs=0.03)


def test_without_a_limit_of_requests_their_table_is_in_the_range() -> None:
    plan = toolkit.plan(model="qwen3-30b-a3b", weights="fp8")
    before = plan.ledger.line("free_before_capture")
    assert before.low_gib < 12.59 < before.gib
    assert any("--max-running-requests" in line for line in plan.assumptions)


def test_the_request_table_of_kimi_on_eight_ranks() -> None:
    # Kimi-K2.5, 2,454,421 KV tokens: between the KV pool and `Memory pool end` 209.98 - 160.63 - 45.25 GiB are gone.
    requests = default_requests(2_454_421, 262_144)
    assert requests == 4096
    assert request_table_gib(requests, 262_144) == pytest.approx(4.1, abs=0.11)


@pytest.mark.parametrize(
    ("model", "tp", "cell"),
    # kv_bytes.csv: executed.
    [("llama-3-8b", 1, 131072), ("llama-3-8b", 8, 16384), ("deepseek-v3", 8, 70272), ("gpt-oss-120b", 1, 66355.2)],
)
def test_bytes_a_token(model: str, tp: int, cell: float) -> None:
    plan = toolkit.plan(model=model, tp=tp, gpu="b300-288gb")
    assert plan.cell.bytes_per_token == cell
    assert toolkit.plan(model=model, tp=tp, gpu="b300-288gb", kv_dtype="fp8").cell.bytes_per_token == cell / 2


def test_owners_and_free_add_up_to_the_total() -> None:
    for settings in ({}, KIMI | {"mem_fraction": 0.97}, {"backend": "disabled", "gpu": "l40s"}):
        plan = toolkit.plan(**settings)
        owned = [line.gib for line in plan.lines if line.kind == "owner"]
        assert sum(owned) + plan.lines[-1].gib == pytest.approx(plan.lines[0].gib)
        assert all(line.formula and line.source for line in plan.lines)
        assert all(line.low_gib <= line.gib <= line.high_gib for line in plan.lines)


def test_free_memory_instead_of_a_fraction() -> None:
    plan = toolkit.plan(free_memory_gib=3.99)
    assert plan.mem_fraction is None
    assert plan.free_before_gib == pytest.approx(3.99, abs=1e-3)
    assert plan.policies["gated"].outcome == "skipped"


def test_a_memory_figure_that_nobody_published_is_called_an_estimate() -> None:
    plan = toolkit.plan(gpu="h800-80gb")
    assert plan.to_dict()["gpu"]["estimated"] and any("estimated" in line for line in plan.assumptions)


# --- what the issue must show ---------------------------------------------------------------------------------


def test_qwen3_8b_with_all_defaults() -> None:
    """Smoke of public PR #33352: breakable, 58 buckets, 1.74 GiB."""
    plan = toolkit.plan(model="qwen3-8b", gpu="h100-80gb").to_dict()
    assert plan["backend"] | {"reasons": 0, "rules": 0} == {
        "requested": "auto", "resolved": "breakable", "explicit": False, "reasons": 0, "rules": 0,
    }  # fmt: skip
    assert (len(plan["buckets"]), max(plan["buckets"])) == (58, 8192)
    assert plan["forecast"]["low_gib"] <= 1.74 <= plan["forecast"]["high_gib"]
    assert plan["forecast"]["total_gib"] == pytest.approx(1.74, rel=0.15)
    assert {one["outcome"] for one in plan["policies"].values()} == {"captured"}


def test_the_public_case_of_july() -> None:
    """Public PR #31204: eight H100, fraction 0.97, 2.05 to 2.28 GiB free; tc_piecewise chosen automatically."""
    plan = toolkit.plan(**KIMI, mem_fraction=0.97)
    assert plan.model.architecture == "KimiK25ForConditionalGeneration"
    assert 2.05 <= plan.free_before_gib <= 2.28
    assert plan.to_dict()["backend"]["resolved"] == "tc_piecewise" and not plan.resolved.explicit
    gated = plan.policies["gated"]
    assert (gated.outcome, gated.runner) == ("skipped", "EagerRunner")
    assert "4.00 GiB" in gated.reason and "at least 4.00 GiB" in (gated.log_line or "")
    assert plan.policies["ungated"].tight, "the upper bound of the forecast does not fit: the open risk of August"
    assert any("int4" in line for line in plan.assumptions)
    assert any("would skip" in line for line in plan.advice)


def test_the_public_case_at_a_lower_fraction() -> None:
    plan = toolkit.plan(**KIMI, mem_fraction=0.945)
    assert plan.free_before_gib == pytest.approx(4, abs=0.25)
    assert plan.policies["ungated"].outcome == "captured"
    assert any("on the edge" in line for line in plan.advice)


def test_a_named_backend_bypasses_the_gate() -> None:
    plan = toolkit.plan(**KIMI, mem_fraction=0.97, backend="tc_piecewise")
    assert plan.policies["gated"].code == "gate_bypassed"


def test_today_runs_without_a_gate() -> None:
    assert toolkit.plan(sglang_version="0.5.17").release.gate_gib == 4.0
    assert toolkit.plan(sglang_version="0.5.18").release.gate_gib is None


# --- policies and forecasts -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("flat")
def test_out_of_memory_at_the_bucket_that_no_longer_fits() -> None:
    # 2048 MiB for 8192 tokens and 4 for each bucket: with 2066 MiB the fifth is the first that does not fit.
    plan = toolkit.plan(engine="flat", free_memory_gib=2066 / 1024, policy="ungated")
    one = plan.policies["ungated"]
    assert (one.outcome, one.runner, one.oom_bucket, one.free_after_gib) == ("oom", None, 6144, None)
    assert one.captured_buckets == (8192, 7680, 7168, 6656)
    assert "--max-tokens" in " ".join(plan.advice)


@pytest.mark.usefixtures("flat")
def test_a_disabled_graph_costs_nothing_and_says_why() -> None:
    asked = toolkit.plan(engine="flat", backend="disabled")
    assert asked.forecast is None and asked.policies["ungated"].reason == "the prefill graph was disabled by hand"
    ruled = toolkit.plan(engine="flat", model="deepseek-v3", tp=16, gpu="h200-141gb", sglang_version="0.5.16")
    assert (ruled.backend.value, ruled.policies["gated"].outcome) == ("disabled", "skipped")
    assert "MLA" in ruled.policies["gated"].reason
    assert ruled.to_dict()["forecast"]["total_gib"] == 0 and ruled.to_dict()["forecast"]["per_bucket"] == []


@pytest.mark.usefixtures("flat")
def test_every_policy_of_the_registry_is_planned() -> None:
    assert list(toolkit.plan(engine="flat").policies) == list(POLICIES)
    assert list(toolkit.plan(engine="flat", policy="ungated").policies) == ["ungated"]


def test_the_legacy_backend_belongs_to_old_servers_and_to_our_own_runner(flat: None) -> None:
    with pytest.raises(InvalidInput, match=r"0\.5\.21"):
        toolkit.plan(backend="tc_piecewise", sglang_version="0.5.22")
    assert toolkit.plan(engine="flat", backend="tc_piecewise").backend == "tc_piecewise"


@pytest.mark.usefixtures("flat")
def test_our_own_runner_keeps_expanded_keys_and_values() -> None:
    plan = toolkit.plan(engine="flat", model="deepseek-v3", tp=8, gpu="b200-180gb")
    assert plan.cell.bytes_per_token == 16 * (128 + 64 + 128) * 61 * 2


# --- solving --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("flat")
@pytest.mark.parametrize("settings", [{}, {"reserve_gib": 3.0}, {"gpu": "l40s", "max_tokens": 512}])
def test_the_largest_fraction_leaves_the_reserve_and_the_next_does_not(settings: dict[str, Any]) -> None:
    best = toolkit.plan(engine="flat", solve="mem-fraction", **settings)
    assert best.mem_fraction is not None and leaves_reserve(best)
    assert best.left_gib >= settings.get("reserve_gib", 0)
    assert not leaves_reserve(toolkit.plan(engine="flat", **settings, mem_fraction=round(best.mem_fraction + 0.001, 3)))


@pytest.mark.usefixtures("flat")
def test_the_largest_ceiling_leaves_the_reserve_and_the_next_does_not() -> None:
    best = toolkit.plan(engine="flat", solve="max-tokens", mem_fraction=0.97)
    ceiling = max(best.buckets)
    assert leaves_reserve(best) and 4 <= ceiling < 8192
    next_bucket = toolkit.generate_prefill_buckets(8192)[len(best.buckets)]
    assert not leaves_reserve(toolkit.plan(engine="flat", mem_fraction=0.97, max_tokens=next_bucket))


@pytest.mark.usefixtures("flat")
def test_no_answer_is_one_line() -> None:
    with pytest.raises(InvalidInput, match="no max-tokens leaves"):
        toolkit.plan(engine="flat", solve="max-tokens", mem_fraction=0.97, reserve_gib=50.0)
    with pytest.raises(InvalidInput, match="solve"):
        toolkit.plan(engine="flat", solve="speed")


@given(st.integers(0, 40), st.integers(0, 40))
def test_bisection(count: int, edge: int) -> None:
    expected = min(count, edge) - 1
    assert last_that_holds(count, lambda at: at < edge) == (expected if expected >= 0 else None)


# --- the object -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("flat")
def test_what_a_notebook_shows() -> None:
    plan = toolkit.plan(engine="flat", max_tokens=32)
    assert isinstance(plan, Plan) and repr(plan).startswith("<Plan qwen3-8b tp 1 on h100-80gb")
    assert list(plan.ledger_frame["key"])[-1] == "free_after"
    assert list(plan.buckets_frame["num_tokens"]) == [32, 28, 24, 20, 16, 12, 8, 4]
    assert list(plan.policies_frame["policy"]) == list(POLICIES)
    assert list(plan.terms_frame["term"]) == [GRAPH_POOL, DRIVER]
    assert "KV pool" in plan._repr_html_() and "<script" not in plan._repr_html_()
    with pytest.raises(AttributeError):
        plan.backend = "full"  # type: ignore[misc, assignment]


def test_a_config_file_is_planned_like_the_catalogue(tmp_path: Path, flat: None) -> None:
    known = toolkit.plan(engine="flat")
    published = dict(known.model.entry.config) if known.model.entry else {}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published | {"architectures": ["Qwen3ForCausalLM"]}))
    local = toolkit.plan(engine="flat", model=str(file))
    assert (local.model.id, local.model.parameters) == ("config.json", known.model.parameters)
    assert local.ledger.kv_cache_tokens == known.ledger.kv_cache_tokens
    packed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    file.write_text(json.dumps(published | {"quantization_config": packed}))
    assert toolkit.plan(engine="flat", model=str(file)).model.published_weights == "int4"


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.1-8b", {"architectures": 65536}),
    ("llama-3.1-8b", {"text_config": {"a": 1}}),
    ("llama-3.1-8b", {"text_config": 0, "quantization_config": [1]}),
    ("llama-3.1-8b", {"kv_lora_rank": 1}),
    ("llama-3.1-8b", {"num_experts": float("nan")}),
    ("llama-3.1-8b", {"num_experts": 1e308}),
    ("qwen3-30b-a3b", {"hidden_size": -1}),
    ("qwen3-30b-a3b", {"moe_intermediate_size": -1}),
    ("qwen3-30b-a3b", {"kv_lora_rank": 1}),
]


@pytest.mark.parametrize("engine", ["sglang", "transformers"])
@pytest.mark.parametrize(("model", "change"), BROKEN, ids=[f"{model}-{change}" for model, change in BROKEN])
def test_a_broken_config_file_is_refused_on_one_line(
    tmp_path: Path, model: str, change: dict[str, Any], engine: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**get_model(model).config, **change}))
    with pytest.raises(InvalidInput) as caught:
        toolkit.plan(model=str(file), engine=engine)
    message = str(caught.value)
    assert "\n" not in message and str(tmp_path) not in message
    assert "the config of 'config.json' cannot be planned (" in message or "cannot be loaded: " in message


def test_a_bug_that_a_catalogue_model_meets_is_not_taken_for_a_broken_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(request: ForecastRequest) -> Forecast:
        raise AttributeError("a bug of ours")

    monkeypatch.setitem(engines.ENGINES, "buggy", bug)
    with pytest.raises(AttributeError, match="a bug of ours"):
        toolkit.plan(engine="buggy")
