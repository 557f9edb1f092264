"""Ranks with different free memory: alone they may disagree and hang; for all, the smallest one decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit
from toolkit.errors import InvalidInput
from toolkit.forecast.plan import Plan
from toolkit.forecast.ranks import between, decide_on_ranks

AT_THE_GATE = (4.02, 3.98, 4.00, 3.99, 4.01, 4.02, 4.00, 4.01)


@pytest.fixture(scope="module")
def kimi() -> Plan:
    return toolkit.plan(model="kimi-k2", gpu="h100-80gb", tp=8, sglang_version="0.5.16", mem_fraction=0.97)


def test_at_the_gate_ranks_alone_would_hang(kimi: Plan) -> None:
    got = decide_on_ranks(kimi, AT_THE_GATE)
    gated = got.policies["gated"]
    assert [one.capture for one in gated.alone] == [True, False, True, False, True, True, True, True]
    assert gated.would_hang and "gated" in got.would_hang
    assert gated.smallest == 1 and gated.together.code == "gate_low_memory"


def test_without_a_gate_there_is_nothing_to_disagree_on(kimi: Plan) -> None:
    got = decide_on_ranks(kimi, AT_THE_GATE)
    assert not got.policies["ungated"].would_hang
    assert not got.policies["capture_first"].would_hang


def test_the_published_ranks_of_july_are_skipped_alike(kimi: Plan) -> None:
    # 2.05 and 2.28 GiB are published (public PR 31204); what lies between is not.
    free = between(2.05, 2.28, 8)
    assert (free[0], free[-1], len(free)) == (2.05, 2.28, 8)
    got = decide_on_ranks(kimi, free)
    assert {one.code for one in got.policies["gated"].alone} == {"gate_low_memory"}


def test_a_budget_may_trim_ranks_differently_and_takes_the_shortest_for_all(kimi: Plan) -> None:
    got = decide_on_ranks(kimi, between(2.05, 2.28, 8), ["budgeted"]).policies["budgeted"]
    counts = [len(one.buckets) for one in got.alone]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert got.would_hang
    assert len(got.together.buckets) == counts[0]


@given(free=st.lists(st.floats(0, 9), min_size=1, max_size=8))
def test_what_is_decided_for_all_is_what_the_smallest_rank_decides(kimi: Plan, free: list[float]) -> None:
    got = decide_on_ranks(kimi, free, ["gated", "ungated"])
    for one in got.policies.values():
        assert one.free_gib[one.smallest] == min(free)
        assert one.together == one.alone[one.smallest]


@settings(deadline=None, max_examples=25)  # each example makes forecasts
@given(free=st.lists(st.floats(0.5, 6), min_size=2, max_size=4))
def test_no_rank_is_given_a_longer_ladder_than_it_would_take_itself(kimi: Plan, free: list[float]) -> None:
    got = decide_on_ranks(kimi, free, ["budgeted"]).policies["budgeted"]
    assert all(set(got.together.buckets) <= set(one.buckets) for one in got.alone)


def test_the_table_has_a_row_for_each_rank_and_policy(kimi: Plan) -> None:
    got = decide_on_ranks(kimi, AT_THE_GATE)
    assert len(got.frame) == 8 * len(kimi.policies)
    assert got.frame.query("policy == 'gated'")["decides"].tolist() == [rank == 1 for rank in range(8)]
    assert "gated" in repr(got) and "gate_low_memory" in got._repr_html_()


@pytest.mark.parametrize("free", [(), (-0.1, 2.0)])
def test_ranks_without_memory_are_refused(kimi: Plan, free: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput):
        decide_on_ranks(kimi, free)


def test_a_server_without_graphs_has_nothing_to_decide() -> None:
    off = toolkit.plan(model="qwen3-8b", gpu="h100-80gb", backend="disabled")
    with pytest.raises(InvalidInput, match="no prefill graph"):
        decide_on_ranks(off, (2.0,))


@pytest.mark.parametrize("free", ["12", 5, None, [None], ["a"], [float("nan"), 1], [float("inf")], [10**400], [], [-1]])
def test_free_memory_that_is_none_is_refused(free: Any) -> None:
    with pytest.raises(InvalidInput, match="free memory"):
        decide_on_ranks(toolkit.plan(), free)


def test_ranks_may_come_as_an_array_and_policies_as_a_text() -> None:
    found = decide_on_ranks(toolkit.plan(), np.array([2.0, 3.0]), policies="gated")  # type: ignore[arg-type]
    assert (found.free_gib, list(found.policies)) == ((2.0, 3.0), ["gated"])
    with pytest.raises(InvalidInput, match="no plan"):
        decide_on_ranks(None, [1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("free", [[True, 2.1], [2.0, "2.1"], [2.0, b"3"], {0: 2.0, 2: 3.0}, {"a": 2.0}, {2.0, 3.0}])
def test_what_is_no_figure_of_a_rank_is_refused(free: Any) -> None:
    with pytest.raises(InvalidInput, match="free memory"):
        decide_on_ranks(toolkit.plan(), free)


def test_ranks_may_come_by_their_number() -> None:
    found = decide_on_ranks(toolkit.plan(), {1: 3.0, 0: 2.0}, policies="gated")
    assert found.free_gib == (2.0, 3.0)


def test_figures_of_another_number_of_ranks_are_said(kimi: Plan) -> None:
    assert "figures of 3 for the 8 of the plan" in repr(decide_on_ranks(kimi, (2.0, 2.1, 2.2), "gated"))
    assert "of the plan" not in repr(decide_on_ranks(kimi, AT_THE_GATE, "gated"))
