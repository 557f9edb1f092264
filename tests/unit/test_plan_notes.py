"""What a plan says beside its figures: what is uncertain, what comes later, which flags a server takes."""

from __future__ import annotations

import io
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

import toolkit
from toolkit.cli import main
from toolkit.forecast.plan import Plan
from toolkit.memory.rules import resolve
from toolkit.views.plan_tables import plan_view

H100_MIB = 81559.0
SHORT: dict[str, Any] = {"mem_fraction": 0.962, "post_capture_gib": 1.0}
"""Qwen3-8B on an H100: 2.87 GiB free, graphs 1.74, decode graphs 0.83 and 1.00 declared: 0.70 GiB too little."""


def shown(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(*plan_view(plan))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


# --- what comes later -------------------------------------------------------------------------------------------


def test_a_need_that_lacks_memory_is_in_headline_ledger_table_and_advice() -> None:
    plan = toolkit.plan(**SHORT)
    assert "what comes later (declared 1.00 GiB, decode graphs 0.83 GiB) lacks 0.70 GiB" in plan.summary
    declared = next(line for line in plan.lines if line.key == "declared")
    assert declared.gib == 1.0 and plan.lines[-1].gib == pytest.approx(-0.70, abs=0.01)
    owned = [line.gib for line in plan.lines if line.kind == "owner"]
    assert sum(owned) + plan.lines[-1].gib == pytest.approx(plan.lines[0].gib)
    assert any("lacks 0.70 GiB under ungated" in line for line in plan.advice)
    row = next(line for line in shown(plan).splitlines() if line.startswith(" ungated"))
    assert "0.70 GiB" in row and "1.13 GiB" in row
    starved = plan.policies_frame.set_index("policy")["starved_gib"]
    assert starved["ungated"] == pytest.approx(0.70, abs=0.01) and starved["budgeted"] == 0


def test_what_a_server_lacks_that_does_not_start_is_not_known() -> None:
    plan = toolkit.plan(free_memory_gib=1.0, post_capture_gib=1.0, policy="ungated")
    assert plan.policies["ungated"].outcome == "oom"
    assert (
        plan.policies_frame["starved_gib"].isna().all() and plan.to_dict()["policies"]["ungated"]["starved_gib"] is None
    )
    row = next(line for line in shown(plan).splitlines() if line.startswith(" ungated"))
    assert row.count("n/a") == 3  # runner, free after, lacks


def test_a_need_that_fits_is_a_line_of_the_ledger_and_nothing_declared_is_none() -> None:
    plan = toolkit.plan(mem_fraction=0.9, post_capture_gib=1.0)
    assert "lacks" not in plan.summary and not any("comes later" in line for line in plan.advice)
    assert [line.key for line in plan.lines].count("declared") == 1
    assert all(line.key != "declared" for line in toolkit.plan(mem_fraction=0.9).lines)


# --- what is uncertain ------------------------------------------------------------------------------------------


def test_certainty_is_in_the_frame_and_in_json() -> None:
    plan = toolkit.plan(mem_fraction=0.95, sglang_version="0.5.18")
    frame = plan.policies_frame.set_index("policy")
    for name, one in plan.policies.items():
        certain = frame.loc[name, "certain"]
        in_json = plan.to_dict()["policies"][name]["certain"]
        assert in_json is None if certain is pd.NA else certain == in_json
        word = f"{one.outcome}, uncertain" if in_json is False else one.outcome
        assert any(line.startswith(f" {name} ") and f" {word} " in line for line in shown(plan).splitlines())
    assert not frame.loc["ungated", "certain"]
    assert frame.loc["gated", "certain"] is pd.NA  # 3.8 GiB free: skipped
    assert any(line.startswith("uncertain: the prefill capture") for line in plan.notes)


def test_a_low_end_below_nothing_names_its_cause() -> None:
    # 23 public decode captures took 0.04 to 6.27 GiB.
    plan = toolkit.plan(sglang_version="0.5.18", mem_fraction=0.93, reserve_gib=1.0)
    assert plan.lines[-1].low_gib < 0 and plan.policies["ungated"].certain
    (note,) = [line for line in plan.notes if "at the low end" in line]
    assert f"{plan.lines[-1].low_gib:.2f} GiB" in note and "decode graph reserve (0.83 GiB, 0.04 to 6.27" in note
    roomy = toolkit.plan(mem_fraction=0.8)
    assert roomy.lines[-1].low_gib >= 0 and not any("at the low end" in line for line in roomy.notes)


def test_what_the_free_figures_leave_out_is_said_below_them() -> None:
    # 4096 requests x (40,960 + 4) tokens x 4 bytes.
    words = "not counted in the free figures above (but in `low`): the request table, 0.63 GiB"
    assert words in shown(toolkit.plan())
    assert "not counted" not in shown(toolkit.plan(max_running_requests=256))


# --- a server's flags -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.962, 0.966, 0.97])
def test_the_flags_of_a_trimmed_ladder_give_a_server_that_ladder(fraction: float) -> None:
    plan = toolkit.plan(mem_fraction=fraction, reserve_gib=0.5, sglang_version="0.5.18")
    one = plan.policies["budgeted"]
    assert one.trimmed
    (line,) = [line for line in plan.advice if "ladder of budgeted" in line]
    words = line.split()
    ceiling = int(words[words.index("--cuda-graph-max-bs-prefill") + 1])
    assert "--cuda-graph-bs-prefill" not in words
    assert float(words[words.index("--mem-fraction-static") + 1]) == fraction
    server = resolve("0.5.18", H100_MIB, 1, False, max_tokens=ceiling, mem_fraction=fraction)
    assert server.buckets == tuple(sorted(one.captured_buckets)) and server.mem_fraction_static == fraction


def test_a_ladder_of_ones_own_is_given_as_a_list() -> None:
    plan = toolkit.plan(buckets=(64, 512, 8192), free_memory_gib=2.2, policy="budgeted")
    assert plan.policies["budgeted"].trimmed == (8192,)
    said = " ".join(plan.advice)
    assert "--cuda-graph-max-bs-prefill 512 --cuda-graph-bs-prefill 64 512" in said
    assert "--mem-fraction-static" not in said.split("ladder of budgeted")[1]  # nobody knows the fraction


def test_advice_names_the_servers_flags_beside_our_own() -> None:
    said = " ".join(toolkit.plan(sglang_version="0.5.17", mem_fraction=0.965).advice)
    for own, server in (
        ("--backend breakable", "--cuda-graph-backend-prefill breakable"),
        ("--max-tokens 6144", "--cuda-graph-max-bs-prefill 6144"),
        ("--mem-fraction 0.947", "--mem-fraction-static 0.947"),
    ):
        assert own in said and server in said


# --- what a plan does not know ----------------------------------------------------------------------------------


def test_a_capture_that_is_planned_says_where_to_look_if_a_server_runs_eager() -> None:
    assert any("prefill-lab diagnose server.log" in line for line in toolkit.plan().notes)
    assert not any("diagnose" in line for line in toolkit.plan(backend="disabled").notes)


def test_a_gain_that_nobody_measured_is_not_there() -> None:
    (note,) = [line for line in toolkit.plan().notes if line.startswith("what the graphs save in time: n/a")]
    assert "prefill-lab compare --model qwen3-8b" in note and "prefill-lab ladder" in note


def test_rules_that_ask_for_an_attention_backend_name_it() -> None:
    # Executed releases: torch_native, flex_attention and, for DeepSeek-V3, trtllm_mla change what is captured.
    known = "flex_attention, torch_native, trtllm_mla"
    assert any(known in line for line in toolkit.plan().assumptions)
    (said,) = [line for line in toolkit.plan(attention_backend="xyz").assumptions if "attention backend" in line]
    assert said == f"attention backend xyz: no rule of SGLang 0.5.23 names it (they name {known})"
    off = toolkit.plan(attention_backend="torch_native")
    assert off.forecast is None and not any("attention backend" in line for line in off.assumptions)


def test_a_short_name_says_which_model_it_was_taken_for() -> None:
    kimi: dict[str, Any] = {"tp": 8, "gpu": "h100-80gb", "mem_fraction": 0.97}
    notes = toolkit.plan(model="Kimi-K2", **kimi).notes
    assert notes[0].startswith("kimi-k2 is taken for kimi-k2.7-code") and "kimi-k2-instruct" in notes[0]
    assert not any("taken for" in line for line in toolkit.plan(model="kimi-k2.7-code", **kimi).notes)


def test_without_a_graph_there_is_neither_ladder_nor_gate() -> None:
    plan = toolkit.plan(backend="disabled", sglang_version="0.5.17")
    assert plan.buckets == () and plan.to_dict()["buckets"] == []
    head = [line.split(None, 1) for line in shown(plan).splitlines() if line.startswith(("buckets", "gate  "))]
    assert [words[1].strip() for words in head] == ["none", "not asked: no prefill graph"]
    named = shown(toolkit.plan(backend="breakable", sglang_version="0.5.17"))
    assert "4.00 GiB, bypassed: the backend is named" in named


@pytest.mark.parametrize("command", ["plan", "capture", "compare"])
def test_help_tells_a_margin_from_a_need(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Margin" in words and "Need" in words and words.count("on top of") == 2


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_table_of_policies_has_whole_words_at_every_width(columns: int) -> None:
    plan = toolkit.plan(
        model="qwen3-8b", gpu="h100-80gb", mem_fraction=0.95, post_capture_gib=1, sglang_version="0.5.17"
    )
    text = io.StringIO()
    for part in plan_view(plan):
        Console(file=text, width=columns).print(part)
    lines = text.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines if "GiB  " in line) <= columns
    for words in (*plan.policies, "PrefillCudaGraphRunner", "EagerRunner", "uncertain", "431,806"):
        assert any(words in line for line in lines), words
