"""The compatibility rules: their order, their codes, and the words servers print."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_facts import FINE, guard_case, log_lines

from toolkit.prefill.guards import (
    GUARDS,
    check_cuda_graph_backend,
    first_blocked,
    fitting_buckets,
)
from toolkit.settings import Backend, Phase

CODES = [
    "disabled",
    "draft_not_forced",
    "eagle_target",
    "lora_unsupported",
    "not_a_language_model",
    "no_capture_sizes",
    "no_size_fits",
    "no_layers",
    "non_standard_gqa",
]
# What sets off each guard, alone. The EAGLE guard asks for a backend of its own.
CAUSES: dict[str, dict[str, Any]] = {
    "disabled": {"backend": Backend.DISABLED},
    "draft_not_forced": {"role": "draft", "draft_forced": False},
    "eagle_target": {"eagle_target": True, "backend": Backend.TC_PIECEWISE},
    "lora_unsupported": {"lora_unsupported": True},
    "not_a_language_model": {"is_language_model": False},
    "no_capture_sizes": {"buckets": ()},
    "no_size_fits": {"capture_tokens": 2, "capture_requests": 1, "context_length": 2},
    "no_layers": {"has_layers": False},
    "non_standard_gqa": {"num_attention_layers": 3},
}
# The case of tests/data/rules that has the same cause, by code. `bs_none` is a ladder that was never set.
FACTS = {
    "disabled_target": "disabled",
    "draft_noforce": "draft_not_forced",
    "eagle_target_tc": "eagle_target",
    "lora_unsupported": "lora_unsupported",
    "not_language_model": "not_a_language_model",
    "bs_empty": "no_capture_sizes",
    "bs_none": "no_capture_sizes",
    "none_fits": "no_size_fits",
    "no_layers": "no_layers",
    "non_gqa": "non_standard_gqa",
}


def test_nothing_blocks_a_plain_model() -> None:
    assert first_blocked(FINE) is None


@pytest.mark.parametrize(("case", "code"), FACTS.items())
def test_code_and_words_are_those_of_the_release(case: str, code: str) -> None:
    blocked = first_blocked(replace(FINE, **CAUSES[code]))
    assert blocked is not None
    assert blocked.code == code
    assert ([blocked.log_line] if blocked.log_line is not None else []) == log_lines(guard_case(case))
    assert blocked.reason and "\n" not in blocked.reason


@pytest.mark.parametrize(
    ("case", "changes", "code"),
    [
        ("disabled_draft", {"backend": Backend.DISABLED, "role": "draft"}, "disabled"),
        ("no_layers_draft", {"has_layers": False, "role": "draft"}, "no_layers"),
    ],
)
def test_a_draft_worker_is_named_as_such(case: str, changes: dict[str, Any], code: str) -> None:
    blocked = first_blocked(replace(FINE, **changes))
    assert blocked is not None
    assert (blocked.code, [blocked.log_line]) == (code, log_lines(guard_case(case)))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("eagle_target_breakable", {"eagle_target": True}),
        ("eagle_target_full", {"eagle_target": True, "backend": Backend.FULL}),
        ("lora_supported", {"lora_unsupported": False}),
        ("ok_draft", {"role": "draft"}),
        ("ok_target", {}),
    ],
)
def test_what_the_release_captures_no_guard_stops(case: str, changes: dict[str, Any]) -> None:
    assert "GRAPH_RUNNER" in guard_case(case)["return_value"]
    assert first_blocked(replace(FINE, **changes)) is None


# --- the order ----------------------------------------------------------------------------------------------


def test_the_guards_stand_in_the_documented_order() -> None:
    assert [code for code, _, _ in GUARDS] == CODES == list(CAUSES)


# One asks for `disabled`, the other for `tc_piecewise`: they cannot meet.
@pytest.mark.parametrize(
    ("first", "second"), [pair for pair in combinations(CODES, 2) if pair != ("disabled", "eagle_target")]
)
def test_of_two_causes_the_earlier_guard_answers(first: str, second: str) -> None:
    blocked = first_blocked(replace(FINE, **{**CAUSES[second], **CAUSES[first]}))
    assert blocked is not None
    assert blocked.code == first


@given(st.sets(st.sampled_from([code for code in CODES if code != "eagle_target"])))
def test_whatever_is_wrong_the_first_cause_in_order_is_named(causes: set[str]) -> None:
    changes: dict[str, Any] = {}
    for code in reversed(CODES):  # what an earlier guard asks for wins
        changes.update(CAUSES[code] if code in causes else {})
    blocked = first_blocked(replace(FINE, **changes))
    expected = next((code for code in CODES if code in causes), None)
    assert (blocked.code if blocked else None) == expected


# --- single guards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [Backend.FULL, Backend.BREAKABLE, Backend.TC_PIECEWISE])
def test_no_backend_that_captures_counts_as_disabled(backend: Backend) -> None:
    assert first_blocked(replace(FINE, backend=backend)) is None


def test_the_backend_of_a_phase_is_asked_for_by_phase() -> None:
    resolved = {Phase.PREFILL: Backend.DISABLED, Phase.DECODE: Backend.FULL}
    assert check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED, resolved)
    assert not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED, resolved)
    assert not check_cuda_graph_backend(Phase.DECODE, Backend.FULL, {})


def test_more_attention_modules_than_layers_are_fine() -> None:
    assert first_blocked(replace(FINE, num_attention_layers=5)) is None


def test_a_draft_worker_of_a_model_without_layers_that_is_not_forced_stays_silent() -> None:
    blocked = first_blocked(replace(FINE, role="draft", draft_forced=False, has_layers=False))
    assert blocked is not None
    assert (blocked.code, blocked.log_line) == ("draft_not_forced", None)


# --- which buckets fit --------------------------------------------------------------------------------------


def test_buckets_that_do_not_fit_are_dropped_as_in_the_release() -> None:
    # some_dropped: slots x context is less than 2048, the third bucket.
    assert guard_case("some_dropped")["prefill_bs_after"] == "[4, 8]"
    assert fitting_buckets(replace(FINE, capture_tokens=2047)) == (4, 8)
    assert fitting_buckets(replace(FINE, capture_tokens=2048)) == (4, 8, 2048)


@given(st.lists(st.integers(1, 5000), max_size=20), st.integers(0, 5000))
def test_a_bucket_fits_when_it_is_no_larger_than_what_can_be_served(buckets: list[int], tokens: int) -> None:
    facts = replace(FINE, buckets=tuple(buckets), capture_tokens=tokens)
    fitting = fitting_buckets(facts)
    assert all(bucket <= tokens for bucket in fitting)
    assert [bucket for bucket in buckets if bucket <= tokens] == list(fitting)
    blocked = first_blocked(facts)
    if fitting:
        assert blocked is None
    else:
        assert blocked is not None
        assert blocked.code == ("no_size_fits" if buckets else "no_capture_sizes")


def test_the_words_of_a_ladder_that_does_not_fit_name_the_limits_and_the_backend() -> None:
    facts = replace(FINE, backend=Backend.FULL, capture_tokens=3, capture_requests=3, context_length=1)
    blocked = first_blocked(facts)
    assert blocked is not None
    assert blocked.log_line == (
        "Disable prefill CUDA graph capture because no configured capture size fits backend=full with "
        "max_capture_tokens=3 (max_capture_requests=3, context_length=1, request-pool size=3)."
    )
