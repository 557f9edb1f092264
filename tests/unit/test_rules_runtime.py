"""Guards, gate, replay and KV cells of nine releases, as far as the toolkit knows the concept."""

from __future__ import annotations

import ast
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_facts import FINE, every_fact, facts

from toolkit.catalogue import load_config, resolve_model
from toolkit.errors import InvalidInput
from toolkit.ladder import REPLAY_LIMIT_FACTOR, choose_bucket, exceeds_replay_limit, generate_prefill_buckets
from toolkit.memory.kv_cells import kv_cell
from toolkit.memory.rules import get_release, sglang_versions
from toolkit.policies import PREFILL_BACKEND_KEY, PolicyFacts, gated, ungated
from toolkit.prefill.guards import GUARDS, first_blocked, fitting_buckets
from toolkit.settings import Backend

VERSIONS = sglang_versions()
GIB = 1 << 30

# --- guards and gate ----------------------------------------------------------------------------------------

GUARD_CASES: dict[str, dict[str, Any]] = {
    "disabled_target": {"backend": Backend.DISABLED},
    "disabled_draft": {"backend": Backend.DISABLED, "role": "draft"},
    "draft_noforce": {"role": "draft", "draft_forced": False},
    "eagle_target_breakable": {"eagle_target": True},
    "eagle_target_full": {"eagle_target": True, "backend": Backend.FULL},
    "eagle_target_tc": {"eagle_target": True, "backend": Backend.TC_PIECEWISE},
    "lora_unsupported": {"lora_unsupported": True},
    "lora_supported": {},
    "not_language_model": {"is_language_model": False},
    "bs_empty": {"buckets": ()},
    "bs_none": {"buckets": ()},
    "none_fits": {"capture_tokens": 2, "capture_requests": 1, "context_length": 2},
    "some_dropped": {"capture_tokens": 1000},
    "no_layers": {"has_layers": False},
    "no_layers_draft": {"has_layers": False, "role": "draft"},
    "non_gqa": {"num_attention_layers": 3},
    "ok_draft": {"role": "draft"},
    "ok_target": {},
    "free_3.99_auto_target": {},
    "free_4.00_auto_target": {},
    "free_3.99_locked": {},
    "free_0.00_locked": {},
    "free_3.99_auto_draft": {"role": "draft"},
    "free_3.99_auto_full": {"backend": Backend.FULL},
}
# Context parallelism has no place in the toolkit, and `full` counts its request slots otherwise there.
OUT_OF_SCOPE = {"cp_and_pp", "full_default_req", "full_req_capped_by_pool"}


def outcome(row: dict[str, str]) -> tuple[bool, list[str]]:
    """(whether a graph runner came back, what was logged beside the lines of the capture itself)."""
    lines = [line for line in row["log"].split(" | ") if line and " prefill CUDA graph begin." not in line]
    plain = [line.partition(" ")[2] for line in lines if " prefill CUDA graph end." not in line]
    return "GRAPH_RUNNER" in row["return_value"], plain


def decided(case: str, version: str) -> tuple[bool, list[str]]:
    """The same by guards and gate."""
    release = get_release(version)
    blocked = first_blocked(replace(FINE, **GUARD_CASES[case]), release)
    if blocked is not None:
        return False, [blocked.log_line] if blocked.log_line else []
    free = float(case.split("_")[1]) if case.startswith("free_") else 10.0
    locked = frozenset({PREFILL_BACKEND_KEY}) if case.endswith("locked") else frozenset()
    decision = (gated if release.gate_gib else ungated)(PolicyFacts(free, locked, FINE.buckets))
    return decision.capture, [decision.log_line] if decision.log_line else []


@pytest.mark.parametrize("version", VERSIONS)
def test_guards_and_gate_end_as_in_the_release(version: str) -> None:
    rows = [row for row in facts("guards", version) if row["case"] not in OUT_OF_SCOPE]
    assert {row["case"]: outcome(row) for row in rows} == {case: decided(case, version) for case in GUARD_CASES}
    for row in rows:
        if outcome(row)[0]:
            left = fitting_buckets(replace(FINE, **GUARD_CASES[row["case"]]), get_release(version))
            assert list(left) == ast.literal_eval(row["prefill_bs_after"])


def test_how_many_guard_rows_are_looked_at() -> None:
    rows = every_fact("guards")
    assert (len(rows), sum(row["case"] in OUT_OF_SCOPE for row in rows)) == (243, 27)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_names_its_guards_in_their_order(version: str) -> None:
    order = [code for code, _, _ in GUARDS]
    assert list(get_release(version).guards) == [code for code in order if code in get_release(version).guards]


# --- replay -------------------------------------------------------------------------------------------------

REPLAY_LADDERS = {
    "default_ladder_8192_eager_token_counts": generate_prefill_buckets(8192),
    "buckets_512_1024_4096_eager_ranges": [512, 1024, 4096],
}
# 27 cases a version: the others turn on logprobs, hidden states, embeddings, DP votes, images and speculation,
# none of which the toolkit's engine has. full_bs_over_slots and multi_request_bs8 are tested on the engine.
REPLAY_CASES = {*REPLAY_LADDERS, "buckets_8192_only_3208_tokens", "over_ceiling"}


def runs_eager(ladder: list[int], tokens: int, version: str) -> bool:
    bucket = choose_bucket(ladder, tokens)
    return bucket is None or exceeds_replay_limit(bucket, tokens, get_release(version).replay_limit_factor)


def ranges(tokens: list[int]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for count in tokens:
        follows = bool(joined) and joined[-1][1] + 1 == count
        joined[-1:] = [(joined[-1][0], count)] if follows else [*joined[-1:], (count, count)]
    return joined


@pytest.mark.parametrize("version", VERSIONS)
def test_token_counts_run_eager_as_in_the_release(version: str) -> None:
    rows = {row["case"]: row["decision"] for row in facts("replay", version)}
    assert rows.keys() >= REPLAY_CASES
    eager = {
        case: [count for count in range(1, ladder[-1] + 2) if runs_eager(ladder, count, version)]
        for case, ladder in REPLAY_LADDERS.items()
    }
    counts = eager["default_ladder_8192_eager_token_counts"]
    assert rows["default_ladder_8192_eager_token_counts"] == f"{counts} n={len(counts)}"
    assert rows["buckets_512_1024_4096_eager_ranges"] == str(ranges(eager["buckets_512_1024_4096_eager_ranges"]))
    only_large = "eager" if runs_eager([8192], 3208, version) else "graph"
    assert rows["buckets_8192_only_3208_tokens"] == only_large
    assert (rows["over_ceiling"] == "eager") == runs_eager([8192], 8193, version)


def test_the_engine_pads_as_the_newest_release() -> None:
    assert get_release().replay_limit_factor == REPLAY_LIMIT_FACTOR


# --- KV cells -----------------------------------------------------------------------------------------------

IN_CATALOGUE = {"llama": "llama-3-8b", "dsv3": "deepseek-v3", "qwen3moe": "qwen3-30b-a3b", "gptoss": "gpt-oss-120b"}
OTHERS = {
    # deepseek-ai/DeepSeek-V2-Lite and Qwen/Qwen3-Next-80B-A3B-Instruct, config.json.
    "dsv2": SimpleNamespace(num_hidden_layers=27, kv_lora_rank=512, qk_rope_head_dim=64),
    "qwen3next": SimpleNamespace(
        num_hidden_layers=48,
        num_key_value_heads=2,
        head_dim=256,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
    ),
}


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    return OTHERS | {name: load_config(resolve_model(model)) for name, model in IN_CATALOGUE.items()}


def test_kv_cells_and_tokens_are_those_of_the_releases(configs: dict[str, Any]) -> None:
    rows = every_fact("kv_bytes")
    assert len(rows) == 252
    for row in rows:
        cell = kv_cell(configs[row["model_config"]], {"bf16": 2, "fp8": 1}[row["kv_dtype"]], int(row["attn_tp"]))
        assert cell.bytes_per_token == pytest.approx(float(row["cell_bytes_per_token"]), rel=1e-12), row
        assert cell.tokens(20 * GIB) == int(row["tokens_in_20GiB"]), row
        assert cell.windowed_tokens(20 * GIB) == (int(row["swa_tokens"]) if row["swa_tokens"] else None), row


def test_ranks_that_do_not_fit_the_heads_are_refused(configs: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="tp 3 does not divide the model's 8 KV heads"):
        kv_cell(configs["llama"], 2, 3)
    assert kv_cell(configs["llama"], 2, 16).bytes_per_token == kv_cell(configs["llama"], 2, 8).bytes_per_token


def test_a_model_without_attention_has_no_cell() -> None:
    with pytest.raises(InvalidInput, match="no attention layer"):
        kv_cell(SimpleNamespace(num_hidden_layers=1, layer_types=["linear_attention"]), 2)


def test_an_empty_pool_holds_no_token(configs: dict[str, Any]) -> None:
    assert kv_cell(configs["llama"], 2).tokens(-5.0) == 0
