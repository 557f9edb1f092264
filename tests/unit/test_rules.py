"""What every SGLang version decides before weights are loaded, against tables of executed releases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_facts import every_fact, facts

from toolkit.errors import InvalidInput
from toolkit.ladder import generate_prefill_buckets
from toolkit.memory.release import rule_table
from toolkit.memory.rules import (
    Reason,
    Resolution,
    ServerFacts,
    feature_names,
    get_release,
    hf_traits,
    resolve,
    sglang_versions,
)
from toolkit.policies import MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB
from toolkit.settings import Backend

VERSIONS = [f"0.5.{number}" for number in range(15, 24)]
H100_MIB = 81559


def codes(got: Resolution, standing: str) -> list[str]:
    return [reason.code for reason in got.reasons if reason.standing == standing]


# --- against releases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_every_row_of_the_resolution_table(version: str) -> None:
    wrong = []
    for row in facts("resolution", version):
        asked = row["chunked_prefill_size_in"]
        chunk = None if asked == "default" else int(asked)
        mib, tp, mla = float(row["gpu_mem_mib"]), int(row["tp"]), row["mla"] == "1"
        got = resolve(version, mib, tp, mla, chunk, row["prefill_backend_in"])
        ours = {
            "chunked_prefill_size": got.chunked_prefill_size,
            "decode_max_bs": got.decode_max_bs,
            "decode_backend": "full" if got.decode_on else "disabled",
            "prefill_max_bs": got.prefill_ceiling,
            "n_prefill_buckets": len(got.buckets),
            "largest_prefill_bucket": max(got.buckets),
            "mem_fraction_static": got.mem_fraction_static,
            "effective_prefill_backend": got.backend.value,
        }
        theirs = {name: type(value)(row[name]) for name, value in ours.items()}
        if theirs != ours:
            wrong.append((theirs, ours))
    assert not wrong


def test_the_resolution_table_is_whole() -> None:
    assert len(every_fact("resolution")) == 2160
    assert {row["version"] for row in every_fact("resolution")} == set(VERSIONS)


def test_versions_are_those_of_the_tables_and_none_is_the_newest() -> None:
    assert list(sglang_versions()) == VERSIONS
    assert get_release(None) is get_release("0.5.23")
    assert resolve(None, H100_MIB, 1, False).sglang_version == "0.5.23"


def test_an_h100_by_default_gets_58_buckets() -> None:
    # The public smoke run: Qwen3-8B on an H100, all defaults, breakable, 58 buckets.
    got = resolve(None, H100_MIB, 1, False, architecture="Qwen3ForCausalLM")
    assert (got.backend, got.explicit, got.reasons) == (Backend.BREAKABLE, False, ())
    assert got.buckets == tuple(generate_prefill_buckets(8192))
    assert len(got.buckets) == 58


def test_the_gate_stood_in_two_releases() -> None:
    gates = {version: get_release(version).gate_gib for version in VERSIONS}
    assert {version for version, limit in gates.items() if limit} == {"0.5.16", "0.5.17"}
    assert gates["0.5.16"] == gates["0.5.17"] == MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB


@pytest.mark.parametrize(("version", "fraction"), [("0.5.19", 0.88), ("0.5.20", 0.95)])
def test_a_card_nobody_can_read_gets_fixed_defaults(version: str, fraction: float) -> None:
    got = resolve(version, None, 1, False)
    assert (got.chunked_prefill_size, got.decode_max_bs) == (4096, 160)
    assert (got.mem_fraction_static, got.reserve_mib) == (fraction, None)


# --- backends and their reasons -----------------------------------------------------------------------------


def model_stub() -> SimpleNamespace:
    """A multimodal MLA model, validated on tc_piecewise alone; its text config is MLA but not DSA (sglang#34100)."""
    return SimpleNamespace(
        architectures=["MiniMaxM3SparseForConditionalGeneration"],
        text_config=SimpleNamespace(architectures=["DeepseekV2ForCausalLM"], kv_lora_rank=512, index_topk=None),
    )


@pytest.mark.parametrize("version", ["0.5.18", "0.5.19", "0.5.20", "0.5.21"])
def test_trtllm_mla_stays_on_breakable_and_is_disabled_by_compatibility(version: str) -> None:
    """sglang#32785, in releases since 0.5.18."""
    traits = hf_traits(model_stub())
    assert traits == {"architecture": "MiniMaxM3SparseForConditionalGeneration", "mla": True, "dsa": False}

    got = resolve(version, H100_MIB, 8, attention_backend="trtllm_mla", **traits)
    assert got.backend is Backend.DISABLED
    assert not [reason for reason in got.reasons if reason.effect == "tc_piecewise"]
    (reason,) = got.reasons
    assert (reason.code, reason.standing, reason.bypassed_by_explicit) == ("multimodal", "decided", True)
    assert reason.log_line is not None
    assert reason.log_line.startswith("WARNING Breakable CUDA graph is incompatible with multimodal model")

    moved = resolve(version, H100_MIB, 8, attention_backend="fa3", **traits)
    assert (moved.backend, codes(moved, "decided")) == (Backend.TC_PIECEWISE, ["validated_multimodal"])

    honoured = resolve(version, H100_MIB, 8, prefill_backend="tc_piecewise", attention_backend="trtllm_mla", **traits)
    assert (honoured.backend, honoured.explicit) == (Backend.TC_PIECEWISE, True)
    assert codes(honoured, "bypassed") == ["multimodal"]


def test_before_that_exception_trtllm_mla_was_moved_as_any_other() -> None:
    got = resolve("0.5.17", H100_MIB, 8, attention_backend="trtllm_mla", **hf_traits(model_stub()))
    assert (got.backend, codes(got, "decided")) == (Backend.TC_PIECEWISE, ["validated_multimodal"])


def test_mla_is_disabled_by_breakables_rule_unless_it_is_dsa() -> None:
    plain = hf_traits(SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], kv_lora_rank=512))
    sparse = hf_traits(SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], kv_lora_rank=512, index_topk=2048))
    assert (plain["dsa"], sparse["dsa"]) == (False, True)
    backends = {
        version: tuple(resolve(version, H100_MIB, 8, **traits).backend.value for traits in (plain, sparse))
        for version in ("0.5.16", "0.5.17", "0.5.18")
    }
    assert backends == {
        "0.5.16": ("disabled", "disabled"),
        "0.5.17": ("disabled", "breakable"),
        "0.5.18": ("breakable", "breakable"),
    }


@pytest.mark.parametrize(
    ("version", "backend"),
    [("0.5.15", "disabled"), ("0.5.16", "tc_piecewise"), ("0.5.17", "tc_piecewise"), ("0.5.18", "breakable")],
)
def test_kimi_k2_7_code_is_served_by_the_backend_of_its_time(version: str, backend: str) -> None:
    # The public case of 0.5.16 ran tc_piecewise, chosen automatically.
    got = resolve(version, H100_MIB, 8, True, architecture="KimiK25ForConditionalGeneration")
    assert got.backend.value == backend


@pytest.mark.parametrize(
    ("features", "name", "disabled_in"),
    [
        ({"nemotron_h"}, "NemotronH (hybrid Mamba2 prefill)", VERSIONS[2:3]),
        ({"kda"}, "KDA hybrid linear attention", VERSIONS[5:]),
        ({"kda", "glm5_3"}, "KDA hybrid linear attention", VERSIONS[5:7]),
        ({"deepseek_v4"}, "DeepSeek-V4 (heavy capture-pool memory pressure)", VERSIONS),
        ({"context_parallel"}, "context parallel (attn_cp_size > 1)", VERSIONS),
        ({"context_parallel", "supported_context_parallel"}, "context parallel (attn_cp_size > 1)", VERSIONS[:2]),
    ],
)
def test_rules_that_were_read_not_executed_hold_in_their_versions(
    features: set[str], name: str, disabled_in: list[str]
) -> None:
    for version in VERSIONS:
        got = resolve(version, H100_MIB, 8, False, features=frozenset(features))
        assert (got.backend is Backend.DISABLED) == (version in disabled_in), version
        line = f"WARNING Breakable CUDA graph is incompatible with {name}; disabling prefill CUDA graph."
        assert [reason.log_line for reason in got.reasons] == ([line] if version in disabled_in else [])


@pytest.mark.parametrize(
    "settings",
    [
        *({"features": frozenset({name})} for name in ("torch_compile", "lora", "gguf", "dllm", "cpu_offload")),
        *({"features": frozenset({name})} for name in ("hierarchical_cache", "deterministic", "symmetric_memory")),
        *({"features": frozenset({name})} for name in ("expert_recorder", "context_parallel", "debug_cuda_graph")),
        *({"dp": 8}, {"pp": 2}, {"moe_a2a": "deepep"}, {"role": "prefill"}),
        {"features": frozenset({"decode_context_parallel"})},
    ],
    ids=str,
)
def test_what_tc_piecewise_cannot_do_disables_it_without_a_word(settings: dict[str, Any]) -> None:
    off = ("prefill", "disabled")
    kimi = {"architecture": "KimiK25ForConditionalGeneration", "mla": True}
    for version in ("0.5.16", "0.5.17"):
        got = resolve(version, H100_MIB, 8, **kimi, **settings)
        assert got.backend is Backend.DISABLED
        assert [reason.log_line for reason in got.reasons if (reason.phase, reason.effect) == off] == [None]


def test_every_reason_that_applied_is_given_and_only_the_first_is_logged() -> None:
    features = frozenset({"lora"})
    got = resolve("0.5.16", H100_MIB, 8, True, dp=8, features=features, architecture="DeepseekV2ForCausalLM")
    assert [(reason.code, reason.standing) for reason in got.reasons] == [
        ("mla", "decided"),
        ("lora", "also"),
        ("dp_attention", "also"),
    ]
    assert [reason.code for reason in got.reasons if reason.log_line] == ["mla"]
    assert all(reason.bypassed_by_explicit for reason in got.reasons)


def test_an_explicit_backend_bypasses_what_is_only_a_default() -> None:
    asked: dict[str, Any] = {"prefill_backend": "breakable", "attention_backend": "torch_native"}
    got = resolve("0.5.16", H100_MIB, 1, True, **asked)
    assert got.explicit
    assert got.backend is Backend.DISABLED
    assert (codes(got, "bypassed"), codes(got, "decided")) == (["mla"], ["torch_native"])
    last = got.reasons[-1]
    line = "WARNING Cuda graph is disabled because of using torch native attention backend"
    assert last == Reason("torch_native", "torch native attention", "both", "disabled", False, "decided", line)
    assert not got.decode_on


def test_a_backend_by_name_outranks_a_switch() -> None:
    switch = frozenset({"disable_cuda_graph"})
    assert resolve(None, H100_MIB, 1, False, features=switch).backend is Backend.DISABLED
    named = resolve(None, H100_MIB, 1, False, prefill_backend=Backend.FULL, features=switch)
    assert (named.backend, named.explicit, named.decode_on) == (Backend.FULL, True, False)


# --- what makes no sense ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"sglang_version": "0.5.14"}, ["0.5.14", "0.5.15", "0.5.23"]),
        ({"sglang_version": ""}, ["''", "--sglang-version"]),
        ({"prefill_backend": "tc_piecewise"}, ["tc_piecewise", "0.5.23", "0.5.21", "breakable"]),
        ({"prefill_backend": "piecewise"}, ["piecewise", "full, breakable, disabled"]),
        ({"tp": 0}, ["tp 0"]),
        ({"gpu_mem_mib": 0}, ["GPU memory 0"]),
        ({"gpu_mem_mib": float("nan")}, ["GPU memory nan"]),
        ({"chunked_prefill_size": 0}, ["chunked prefill size 0", "-1"]),
        ({"mem_fraction": 1.2}, ["1.2"]),
        ({"features": frozenset({"warp_drive"})}, ["warp_drive", "lora"]),
    ],
)
def test_nonsense_is_refused_in_one_line_that_names_it(settings: dict[str, Any], names: list[str]) -> None:
    given = {"sglang_version": None, "gpu_mem_mib": H100_MIB, "tp": 1, "mla": False} | settings
    with pytest.raises(InvalidInput) as error:
        resolve(**given)
    assert len(str(error.value).splitlines()) == 1
    assert all(name in str(error.value) for name in names)


# --- the table itself ---------------------------------------------------------------------------------------


def test_rules_name_versions_in_order_and_every_value_starts_at_the_oldest() -> None:
    table = rule_table()
    assert [next(iter(changes)) for changes in table.by_version.values()] == ["0.5.15"] * len(table.by_version)
    for changes in table.by_version.values():
        assert list(changes) == sorted(changes, key=VERSIONS.index)
    for rule in table.rules:
        assert VERSIONS.index(rule.since or VERSIONS[0]) <= VERSIONS.index(rule.until or VERSIONS[-1]), rule
        assert not set(rule.all) & set(rule.none), rule
        assert (rule.line is None) == (rule.level is None), rule


def test_every_feature_is_told_apart_from_what_follows_from_other_settings() -> None:
    assert {"lora", "mis", "disable_cuda_graph", "decode_context_parallel"} <= feature_names()
    assert not feature_names() & {"mla", "pd_prefill", "multimodal", "prefill_off"}
    assert not any(":" in name for name in feature_names())


@given(
    st.sampled_from(VERSIONS),
    st.integers(1024, 300_000),
    st.sampled_from([1, 2, 4, 8, 64]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 65536)),
    st.sampled_from(["auto", "full", "breakable", "disabled"]),
    st.sets(st.sampled_from(sorted(feature_names()))),
)
def test_whatever_is_asked_the_answer_hangs_together(
    version: str, mib: int, tp: int, mla: bool, chunk: int | None, backend: str, features: set[str]
) -> None:
    got = resolve(version, mib, tp, mla, chunk, backend, features=frozenset(features))
    assert list(got.buckets) == sorted(set(got.buckets))
    assert all(bucket <= got.prefill_ceiling for bucket in got.buckets)
    decided = [reason for reason in got.reasons if reason.standing == "decided"]
    if backend in ("full", "breakable") and got.backend.value != backend:
        assert any(not reason.bypassed_by_explicit for reason in decided)
    if not got.explicit:
        assert got.backend is Backend.BREAKABLE or decided
        assert not codes(got, "bypassed")
    assert ServerFacts(mib).gpu_mem_mib == mib
    # M * fraction is what the reserve leaves, to the third decimal.
    assert got.reserve_mib is not None
    assert abs((mib - got.reserve_mib) / mib - got.mem_fraction_static) <= 0.0005 + 1e-9
