"""KV sizing after the capture as a checklist: it says what the executed releases decided, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sglang_facts import every_fact, facts

import toolkit
from toolkit.memory.post_capture import Condition, apply
from toolkit.memory.rules import Resolution, resolve, sglang_versions
from toolkit.views.plan_tables import prose

# What a case of tests/data/rules/post_capture was given beside the card, for cases that need no more than this.
CASES: dict[str, dict[str, Any]] = {
    "llama_tp1": {},
    "llama_tp8": {"tp": 8},
    "chunk5000": {"chunked_prefill_size": 5000},
    "chunk4096": {"chunked_prefill_size": 4096},
    "chunk_-1": {"chunked_prefill_size": -1},
    "max_bs_2048": {"max_tokens": 2048},
    "mla": {"mla": True, "architecture": "DeepseekV2ForCausalLM"},
    "prefill_off": {"features": frozenset({"disable_prefill_cuda_graph"})},
    "decode_off": {"features": frozenset({"disable_decode_cuda_graph"})},
    "dp_attention": {"tp": 8, "dp": 8},
    "memory_saver": {"features": frozenset({"memory_saver"})},
    "pd_prefill": {"role": "prefill"},
    "pd_decode": {"role": "decode"},
    "torch_native": {"attention_backend": "torch_native"},
    "fp4kv": {"features": frozenset({"kv_fp4"})},
}


def switched_on(version: str, mib: str = "81559", **settings: Any) -> Resolution:
    return resolve(version, float(mib), **({"tp": 1, "mla": False, "post_capture_kv": True} | settings))


def failing(checklist: tuple[Condition, ...]) -> list[str]:
    return [one.name for one in checklist if one.holds is False]


def executed_rows(version: str) -> Iterator[dict[str, str]]:
    for row in facts("post_capture", version):
        if row["case"] in CASES and not row["mem_fraction_static"].startswith("ERR"):
            yield row


@pytest.mark.parametrize("version", sglang_versions())
def test_nothing_on_the_list_fails_exactly_where_the_release_sized_last(version: str) -> None:
    checked = 0
    for row in executed_rows(version):
        got = switched_on(version, row["gpu_mem_mib"], **CASES[row["case"]]).post_capture_checklist
        assert apply(got) is (row["planned_after_resolution"] == "True"), row["case"]
        assert apply(got) is (not failing(got))
        checked += 1
    assert checked >= len(CASES) - 1


def test_both_answers_were_executed() -> None:
    planned = {row["planned_after_resolution"] for row in every_fact("post_capture")}
    assert {"True", "False"} <= planned


@pytest.mark.parametrize(
    ("version", "case", "names"),
    [
        ("0.5.15", "llama_tp1", ["release"]),
        ("0.5.16", "chunk5000", []),
        ("0.5.17", "chunk5000", ["ladder_reaches_chunk"]),
        ("0.5.23", "chunk_-1", ["ladder_reaches_chunk"]),
        ("0.5.23", "mla", ["mla"]),
        ("0.5.16", "dp_attention", ["prefill_off", "dp_attention"]),
        ("0.5.23", "prefill_off", ["prefill_off"]),
        ("0.5.23", "memory_saver", ["memory_saver"]),
        ("0.5.23", "llama_tp8", []),
    ],
)
def test_the_list_names_what_fails(version: str, case: str, names: list[str]) -> None:
    assert failing(switched_on(version, **CASES[case]).post_capture_checklist) == names


def test_it_is_off_unless_switched_on() -> None:
    got = resolve("0.5.23", 81559.0, 1, False)
    assert not got.post_capture
    assert failing(got.post_capture_checklist) == ["switch"]


def test_every_condition_explains_itself() -> None:
    for version in sglang_versions():
        for one in switched_on(version).post_capture_checklist:
            assert len(one.words) > 15 and one.source
            assert one.sign == {True: "yes", False: "no", None: "n/a"}[one.holds]
    ladder = next(one for one in switched_on("0.5.23").post_capture_checklist if one.name == "ladder_reaches_chunk")
    assert "chunk 8192, largest bucket 8192" in ladder.words


def test_a_plan_explains_why_its_kv_pool_comes_first() -> None:
    plan = toolkit.plan(model="kimi-k2", gpu="h100-80gb", tp=8, mem_fraction=0.97)
    assert failing(plan.post_capture_checklist)[:1] == ["switch"]
    assert "mla" in failing(plan.post_capture_checklist)
    told = list(prose(plan))
    assert any(line.startswith("KV pool sized after the capture, SGLang's opt-in: no [executed") for line in told)
    assert any(line.startswith("- no: SGLANG_ENABLE_POST_CAPTURE_KV_SIZING") for line in told)
