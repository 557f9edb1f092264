"""Who decides: the old 4 GiB gate with its exact boundary and exemption, and what replaced it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_facts import guard_case, log_lines

from toolkit.errors import InvalidInput
from toolkit.policies import (
    POLICIES,
    Decision,
    PolicyFacts,
    gate_log_line,
    gated,
    get_policy,
    should_skip_auto_prefill_cuda_graph_for_memory,
    ungated,
)
from toolkit.settings import Backend, CaptureSettings

BACKEND = frozenset({("prefill", "backend")})
SIZES = frozenset({("prefill", "max_bs"), ("prefill", "bs"), ("decode", "backend"), ("decode", "max_bs")})
LADDER = (4, 8, 2048)
GATE_RELEASES = ("0.5.16", "0.5.17")
# What a guard case of tests/data/rules was given: free GiB and whether the backend was locked.
GATE_CASES = {
    "free_3.99_auto_target": (3.99, frozenset()),
    "free_4.00_auto_target": (4.00, frozenset()),
    "free_3.99_locked": (3.99, BACKEND),
    "free_0.00_locked": (0.00, BACKEND),
    "free_3.99_auto_draft": (3.99, frozenset()),
    "free_3.99_auto_full": (3.99, frozenset()),
}
free_memory = st.floats(0, 200, allow_nan=False)
locked_keys = st.frozensets(st.tuples(st.sampled_from(["prefill", "decode"]), st.sampled_from(["backend", "bs"])))


def facts(free_gib: float, locked: frozenset[tuple[str, str]] = frozenset()) -> PolicyFacts:
    return PolicyFacts(free_gib, locked, LADDER)


# --- the gate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free_gb", "locked", "skips"),
    [
        (3.99, frozenset(), True),
        (4.00, frozenset(), False),
        (math.nextafter(4.0, 0), frozenset(), True),
        (0.0, frozenset(), True),
        (3.99, BACKEND, False),
        (0.00, BACKEND, False),
        (3.99, SIZES, True),
        (3.99, SIZES | BACKEND, False),
        (12.59, frozenset(), False),
    ],
)
def test_auto_prefill_cuda_graph_memory_gate(free_gb: float, locked: frozenset[tuple[str, str]], skips: bool) -> None:
    """SGLang 0.5.16 and 0.5.17: 4.00 GiB captures, anything less is skipped unless the backend is locked."""
    assert should_skip_auto_prefill_cuda_graph_for_memory(free_gb, locked) is skips
    assert gated(facts(free_gb, locked)).capture is not skips


@pytest.mark.parametrize("free_gb", [3.99, 0.0])
@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_explicit_prefill_backend_bypasses_memory_gate(free_gb: float, backend: str) -> None:
    """Only a backend that was named counts as explicit; the sizes that were named beside it do not matter."""
    chosen = CaptureSettings.create(backend=backend, max_tokens=512).locked_keys
    assert not should_skip_auto_prefill_cuda_graph_for_memory(free_gb, chosen)
    decision = gated(facts(free_gb, chosen))
    assert (decision.capture, decision.code, decision.buckets) == (True, "gate_bypassed", LADDER)
    automatic = CaptureSettings.create(max_tokens=512, policy="gated")
    assert automatic.resolved_backend is Backend.BREAKABLE
    assert should_skip_auto_prefill_cuda_graph_for_memory(free_gb, automatic.locked_keys)


@pytest.mark.parametrize("version", GATE_RELEASES)
@pytest.mark.parametrize("case", sorted(GATE_CASES))
def test_the_gate_decides_and_speaks_as_the_releases_did(version: str, case: str) -> None:
    row = guard_case(case, version)
    free_gib, locked = GATE_CASES[case]
    decision = gated(facts(free_gib, locked))
    assert decision.capture == ("GRAPH_RUNNER" in row["return_value"])
    if not decision.capture:
        assert [decision.log_line] == log_lines(row)


@pytest.mark.parametrize("case", sorted(GATE_CASES))
def test_without_the_gate_every_start_is_captured_as_in_the_newest_release(case: str) -> None:
    assert "GRAPH_RUNNER" in guard_case(case)["return_value"]
    decision = ungated(facts(*GATE_CASES[case]))
    assert decision == Decision(True, "ungated", decision.reason, LADDER)
    assert "always attempted" in decision.reason


def test_the_gate_prints_two_decimals_of_what_it_read() -> None:
    assert gate_log_line(2.0547) == (
        "Disabling auto-selected prefill CUDA graph: only 2.05 GiB is free after model/KV/eager-buffer allocation; "
        "at least 4.00 GiB is required for capture. Set an explicit prefill CUDA graph backend to override this "
        "safety gate."
    )
    # It printed 4.00 for a reading just under its limit, and skipped all the same.
    assert "only 4.00 GiB is free" in str(gated(facts(3.999)).log_line)


@pytest.mark.parametrize(
    ("decision", "code", "says"),
    [
        (gated(facts(3.99)), "gate_low_memory", "3.99 GiB free, under 4.00 GiB"),
        (gated(facts(4.00)), "gate_passed", "4.00 GiB free, at least 4.00 GiB required"),
        (gated(facts(0.5, BACKEND)), "gate_bypassed", "chosen by hand"),
        (ungated(facts(0.5)), "ungated", "always attempted; 0.50 GiB free"),
    ],
)
def test_a_decision_says_why_in_one_line(decision: Decision, code: str, says: str) -> None:
    assert decision.code == code
    assert says in decision.reason
    assert "\n" not in decision.reason


@given(free_memory, locked_keys)
def test_the_gate_only_ever_asks_for_memory_and_the_backend_lock(
    free_gb: float, locked: frozenset[tuple[str, str]]
) -> None:
    decision = gated(facts(free_gb, locked))
    assert decision.capture == (free_gb >= 4 or ("prefill", "backend") in locked)
    assert decision.buckets == (LADDER if decision.capture else ())
    assert (decision.log_line is None) == decision.capture
    assert ungated(facts(free_gb, locked)).capture


@given(free_memory, st.floats(0, 50), locked_keys)
def test_more_free_memory_never_turns_a_capture_into_a_skip(
    free_gb: float, more: float, locked: frozenset[tuple[str, str]]
) -> None:
    assert gated(facts(free_gb + more, locked)).capture >= gated(facts(free_gb, locked)).capture


# --- by name ------------------------------------------------------------------------------------------------


def test_policies_are_found_by_name() -> None:
    assert get_policy("gated").decide is gated
    assert get_policy("ungated").decide is ungated
    assert CaptureSettings.create().policy == "ungated"


@pytest.mark.parametrize("name", ["", "GATED", "strict", "gated,ungated"])
def test_an_unknown_policy_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(InvalidInput) as error:
        get_policy(name)
    assert repr(name) in str(error.value)
    assert all(known in str(error.value) for known in POLICIES)
