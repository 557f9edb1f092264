"""The map of policies: what counts as a wrong skip or a wrong capture, and which cells were measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import toolkit
from toolkit.errors import InvalidInput
from toolkit.forecast.cells import cell_key
from toolkit.forecast.judged import COLUMNS
from toolkit.forecast.outcomes import PolicyOutcome
from toolkit.forecast.policy_map import PolicyMap, policy_map
from toolkit.forecast.terms import Range
from toolkit.forecast.verdicts import Fits, Room, Verdict, mark, verdict, would_fit
from toolkit.policies import POLICIES
from toolkit.runs.executed import executed
from toolkit.runs.record import RunRecord
from toolkit.settings import CaptureSettings

TIGHT = Range(2048, 1024, 3072)
"""A need of 2 GiB, between 1 and 3."""
KIMI: dict[str, Any] = {"model": "kimi-k2", "gpu": "h100-80gb", "tp": 8, "sglang_version": "0.5.16"}


# --- what would have fitted -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "later", "fits", "by_middle"),
    [
        ((3.0, 3.0, 3.0), 0.0, Fits.YES, True),
        ((2.99, 2.99, 2.99), 0.0, Fits.UNCERTAIN, True),
        ((2.0, 2.0, 2.0), 0.0, Fits.UNCERTAIN, True),
        ((1.99, 1.99, 1.99), 0.0, Fits.UNCERTAIN, False),
        ((1.0, 1.0, 1.0), 0.0, Fits.UNCERTAIN, False),
        ((0.99, 0.99, 0.99), 0.0, Fits.NO, False),
        # The need of later comes on top when the ladder is done.
        ((3.0, 3.0, 3.0), 0.01, Fits.UNCERTAIN, True),
        ((3.0, 3.0, 3.0), 2.01, Fits.NO, False),
        # What may be free counts with both its ends.
        ((3.5, 2.9, 3.6), 0.0, Fits.UNCERTAIN, True),
        ((0.5, 0.0, 1.1), 0.0, Fits.UNCERTAIN, False),
    ],
)
def test_a_ladder_fits_when_the_most_it_needs_fits_the_least_there_is(
    free: tuple[float, float, float], later: float, fits: Fits, by_middle: bool
) -> None:
    got = would_fit(TIGHT, TIGHT, Room(*free, later))
    assert (got.fits, got.by_middle) == (fits, by_middle)


def test_what_stays_may_be_less_than_the_worst_moment_took() -> None:
    stays = Range.exact(512)
    assert would_fit(Range.exact(2048), stays, Room(2.0, 2.0, 2.0, 1.5)).fits is Fits.YES
    assert would_fit(Range.exact(2048), stays, Room(2.0, 2.0, 2.0, 1.6)).fits is Fits.NO


def test_an_unknown_need_is_uncertain() -> None:
    got = would_fit(Range.exact(math.nan), Range.exact(math.nan), Room(80, 80, 80))
    assert (got.fits, got.by_middle, got.middle) == (Fits.UNCERTAIN, None, Fits.UNCERTAIN)


@given(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), st.floats(0, 3))
def test_what_surely_fits_fits_by_the_middle(low: float, more: float, free: float, spread: float, later: float) -> None:
    need = Range(1024 * (low + more / 2), 1024 * low, 1024 * (low + more))
    got = would_fit(need, need, Room(free, free - spread, free + spread, later))
    if got.fits is not Fits.UNCERTAIN:
        assert got.by_middle is (got.fits is Fits.YES)


@pytest.mark.parametrize(
    ("captures", "fits", "expected"),
    [
        (True, Fits.YES, Verdict.RIGHT_CAPTURE),
        (True, Fits.NO, Verdict.WRONG_CAPTURE),
        (False, Fits.YES, Verdict.WRONG_SKIP),
        (False, Fits.NO, Verdict.RIGHT_SKIP),
        (True, Fits.UNCERTAIN, Verdict.UNCERTAIN),
        (False, Fits.UNCERTAIN, Verdict.UNCERTAIN),
    ],
)
def test_the_verdict_on_a_decision(captures: bool, fits: Fits, expected: Verdict) -> None:
    assert verdict(captures, fits) is expected


def outcome(name: str, code: str = "", **more: Any) -> PolicyOutcome:
    return PolicyOutcome(None, name, code, "", (), None, 0, **more)


def test_every_outcome_has_its_letter() -> None:
    assert mark(None) == "-"
    assert mark(outcome("oom", "out_of_memory_before_capture")) == "-"
    assert mark(outcome("oom", "out_of_memory")) == "X"
    assert mark(outcome("skipped", "gate_low_memory", trimmed=(8,))) == "S"
    assert mark(outcome("skipped", "disabled")) == "D"
    assert mark(outcome("captured")) == "C"
    assert mark(outcome("captured", trimmed=(8,))) == "T"
    assert mark(outcome("captured", starved_gib=0.1)) == "L"


# --- maps -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_free_memory() -> PolicyMap:
    return policy_map(model="qwen3-8b", free_memory=[1, 2, 3.5, 3.99, 4, 8], ceilings=[512, 8192])


def test_the_gate_is_wrong_below_four_gib_wherever_the_ladder_fits(by_free_memory: PolicyMap) -> None:
    assert list(by_free_memory.grid("gated").loc[512]) == ["S", "S", "S", "S", "C", "C"]
    skips = ["right skip", "wrong skip", "wrong skip", "wrong skip", "right capture", "right capture"]
    assert list(by_free_memory.grid("gated", "verdict").loc[512]) == skips
    assert by_free_memory.counts.loc["gated", "wrong capture"] == 0


def test_no_gate_is_wrong_wherever_the_ladder_does_not_fit(by_free_memory: PolicyMap) -> None:
    # 58 buckets of Qwen3-8B take 1.74 GiB on an H100 (public PR 33352) and more on the way there.
    assert by_free_memory.cell("ungated", 1, 8192).verdict is Verdict.WRONG_CAPTURE
    assert by_free_memory.cell("ungated", 1, 8192).mark == "X"
    assert by_free_memory.cell("ungated", 3.99, 8192).verdict is Verdict.RIGHT_CAPTURE
    assert by_free_memory.counts.loc["ungated", "wrong skip"] == 0


def test_a_trimmed_ladder_is_right_and_its_price_is_said(by_free_memory: PolicyMap) -> None:
    one = by_free_memory.cell("budgeted", 2, 8192)
    assert (one.mark, one.verdict) == ("T", Verdict.RIGHT_CAPTURE)
    assert one.lost_replay is not None and 0 < one.lost_replay < 1
    assert by_free_memory.counts.loc["budgeted", "replay lost, mean (%)"] > 0


def test_the_kv_pool_last_skips_nothing_and_pays_in_tokens(by_free_memory: PolicyMap) -> None:
    assert by_free_memory.counts.loc["capture_first", "wrong skip"] == 0
    assert by_free_memory.cell("capture_first", 1, 8192).kv_tokens_change < 0  # type: ignore[operator]
    assert by_free_memory.counts.loc["ungated", "KV tokens, median (%)"] == 0


def test_the_counts_are_those_of_the_cells(by_free_memory: PolicyMap) -> None:
    frame, counts = by_free_memory.frame, by_free_memory.counts
    assert list(counts.index) == list(POLICIES)
    for name, row in counts.iterrows():
        own = frame[frame["policy"] == name]["verdict"]
        for word in ("right capture", "right skip", "wrong skip", "wrong capture", "uncertain"):
            assert row[word] == (own == word).sum()
        assert row["cells"] == 12
        assert row["decided"] + row["no decision"] == 12
        assert row["out of memory"] == (frame[frame["policy"] == name]["outcome"] == "oom").sum()
    # 1 GiB free is too little for the 1.74 GiB of public PR 33352, and the policy was asked: a decision, a wrong one.
    assert counts.loc["ungated", "out of memory"] > 0 and counts.loc["ungated", "no decision"] == 0


def test_a_change_of_the_kv_pool_is_in_percent_everywhere(by_free_memory: PolicyMap) -> None:
    own = by_free_memory.frame[by_free_memory.frame["policy"] == "capture_first"]
    first = by_free_memory.frame[by_free_memory.frame["policy"] == "ungated"]["kv_cache_tokens"].to_numpy()
    by_hand = 100 * (own["kv_cache_tokens"].to_numpy().astype(float) / first.astype(float) - 1)
    assert own["kv_tokens_change_percent"].tolist() == pytest.approx(by_hand.tolist())
    assert by_free_memory.counts.loc["capture_first", "KV tokens, least (%)"] == pytest.approx(by_hand.min())


def test_every_column_of_the_frame_is_explained(by_free_memory: PolicyMap) -> None:
    said = str(PolicyMap.__dict__["frame"].__doc__)
    for column in COLUMNS:
        bound = column.endswith(("_low_gib", "_high_gib"))
        assert bound or f"`{column}`" in said, column


def test_what_is_needed_later_turns_captures_wrong() -> None:
    # Public issue 40094: a workspace of about 0.31 GiB and 5.3 MiB for each 1K tokens of the prompt, after the capture.
    need = {"post_capture_gib": 0.31, "post_capture_mib_per_1k": 5.3, "longest_prompt": 98304}
    free, settings = [2.9, 3.2, 3.4, 6.0], {"model": "qwen3-8b", "policy": "ungated"}
    plain, needy = policy_map(free_memory=free, **settings), policy_map(free_memory=free, **settings, **need)
    assert plain.counts.loc["ungated", "starved"] == 0
    assert needy.counts.loc["ungated", "starved"] == 2
    assert [needy.cell("ungated", gib).mark for gib in free] == ["L", "L", "C", "C"]


def test_july_by_the_middle_is_a_wrong_skip_and_by_the_range_it_is_open() -> None:
    july = policy_map(fractions=[0.92, 0.97, 0.98], **KIMI)
    gate = july.cell("gated", 0.97)
    assert (gate.mark, gate.verdict, gate.verdict_by_middle) == ("S", Verdict.UNCERTAIN, Verdict.WRONG_SKIP)
    # At 0.92 the weights alone are too large: no error, a cell with its reason and nothing made up.
    none = july.frame[july.frame["mem_fraction"] == 0.92]
    assert set(none["verdict"]) == {"no start"} and none["free_before_gib"].isna().all()
    assert none["reason"].str.contains("leave no KV pool").all()


def test_models_and_cards_are_axes_too() -> None:
    found = policy_map(models=["qwen3-0.6b", "llama-3.3-70b"], gpus=["l4", "h100-80gb"])
    assert list(found.grid("ungated").loc["qwen3-0.6b"]) == ["C", "C"]
    assert list(found.grid("ungated").loc["llama-3.3-70b"]) == ["-", "-"]
    assert found.rows is not None and (found.rows.name, found.columns.name) == ("model", "gpu")


def test_any_two_settings_are_axes() -> None:
    found = policy_map(rows={"reserve_gib": [0.0, 1.0]}, columns={"tp": [1, 2]}, policy="budgeted", mem_fraction=0.9)
    assert list(found.frame.columns[:3]) == ["reserve_gib", "tp", "policy"]
    assert len(found.frame) == 4


def test_a_release_that_rules_graphs_out_is_no_decision_of_a_policy() -> None:
    off = policy_map(model="qwen3-8b", fractions=[0.9], backend="disabled")
    assert set(off.frame["mark"]) == {"D"} and set(off.frame["verdict"]) == {"no graph"}
    assert (off.counts["decided"] == 0).all()


@pytest.mark.parametrize(
    ("choices", "word"),
    [
        ({}, "0 axes"),
        ({"fractions": [0.9], "gpus": ["l4"], "models": ["qwen3-8b"]}, "3 axes"),
        ({"fractions": []}, "empty"),
        ({"models": "qwen3-8b"}, "one text"),
        ({"fractions": [0.9], "mem_fraction": 0.9}, "axis and a setting"),
        ({"columns": {"tp": [1], "gpu": ["l4"]}}, "2 settings"),
        ({"fractions": [0.9], "policy": "careful"}, "careful"),
        ({"fractions": [0.9], "nonsense": 1}, "nonsense"),
        ({"fractions": [0.9], "gpu": "h1000"}, "h1000"),
        ({"fractions": [0.9], "free_memory": [1.0]}, "exclude each other"),
        ({"fractions": [step / 3001 for step in range(1, 3000)]}, "too large"),
    ],
)
def test_maps_that_cannot_be_drawn_are_refused(choices: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        policy_map(**choices)


def test_a_map_shows_itself(by_free_memory: PolicyMap) -> None:
    assert "gated" in repr(by_free_memory) and "forecast (sglang engine)" in repr(by_free_memory)
    page = by_free_memory._repr_html_()
    assert "wrong skip" in page and "captures a trimmed ladder" in page


# --- measured cells -------------------------------------------------------------------------------------------


def record(policy: str, outcome: str, **more: Any) -> RunRecord:
    settings = CaptureSettings.create(
        policy=policy, buckets=(16, 64), device="cpu", device_memory_gib=1.0, free_memory_gib=0.5
    )
    return RunRecord(
        id=f"20261129-120000-00000{list(POLICIES).index(policy)}",
        created="2026-11-29T12:00:00Z",
        settings=settings.model_dump(mode="json"),
        device={"kind": "cpu", "label": "cpu (accounted)", "total_gib": 1.0},
        software={},
        outcome=outcome,  # type: ignore[arg-type]
        runner={"captured": "PrefillCudaGraphRunner", "skipped": "EagerRunner"}.get(outcome),
        reason="as measured",
        **more,
    )


def test_a_record_is_found_by_the_settings_it_was_measured_under() -> None:
    (one,) = executed([record("gated", "skipped", reason_code="gate_low_memory", free_before_gib=0.5)])
    same = CaptureSettings.create(buckets=(16, 64), device_memory_gib=1.0, free_memory_gib=0.5)
    assert one.key == cell_key(same, "cpu (accounted), 1 GiB declared", (16, 64), None)
    other = same.with_changes(free_memory_gib=0.4)
    assert one.key != cell_key(other, "cpu (accounted), 1 GiB declared", (16, 64), None)
    assert (one.policy, one.outcome.code, one.free_before_gib) == ("gated", "gate_low_memory", 0.5)


def test_runs_that_say_nothing_of_a_policy_are_left_out() -> None:
    assert not executed([record("ungated", "cancelled"), record("gated", "crashed"), record("budgeted", "failed")])


def test_of_two_records_the_later_counts() -> None:
    early = record("ungated", "oom").model_copy(update={"created": "2026-11-28T12:00:00Z"})
    late = record("ungated", "captured", buckets=[])
    assert [one.outcome.outcome for one in executed([late, early])] == ["oom", "captured"]


def test_the_public_face_takes_records() -> None:
    found = toolkit.policy_map(model="qwen3-8b", fractions=[0.9], records=[record("gated", "skipped")])
    assert (found.counts["measured"] == 0).all()  # of another model and device


# --- odd axes -------------------------------------------------------------------------------------------------


def test_ladders_and_numpy_numbers_are_values_of_an_axis() -> None:
    found = policy_map(
        rows={"buckets": [[8, 16], [8, 16, 8192]]}, fractions=np.linspace(0.9, 0.98, 3), policy="ungated"
    )
    assert found.columns.values == (0.9, 0.94, 0.98)
    assert found.grid("ungated", "asked").iloc[1].tolist() == [3, 3, 3]
    assert "(8, 16)" in found._repr_html_() and found.cell("ungated", 0.94, (8, 16)).mark == "C"


def test_a_value_that_is_wrong_alone_is_a_cell_with_its_reason() -> None:
    found = policy_map(model="qwen3-8b", gpus=["h100-80gb", "h1000"], policy="gated")
    assert found.cell("gated", "h1000").verdict is Verdict.NO_START
    assert "unknown GPU" in str(found.cell("gated", "h1000").cell.problem)
    with pytest.raises(KeyError):
        found.cell("gated", "l4")


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"fractions": 5}, "mem_fraction"),
        ({"fractions": None}, "mem_fraction"),
        ({"rows": {"tp": [{}]}}, "axis tp"),
        ({"rows": [1, 2]}, "rows is list"),
        ({"rows": {"policy": ["gated"]}, "fractions": [0.9]}, "policy is no axis"),
        ({"rows": {"bogus": [1]}, "fractions": [0.9]}, "axis 'bogus' is no setting"),
        ({"fractions": [0.9], "records": 5}, "int is no run"),
        ({"fractions": [0.9], "records": ["x"]}, "str is no run"),
    ],
)
def test_what_makes_no_axis_is_refused_in_one_line(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        toolkit.policy_map(**choices)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_policies_may_be_a_list() -> None:
    assert toolkit.policy_map(fractions=[0.9], policy=["gated", "budgeted"]).policies == ("gated", "budgeted")


# --- a KV pool of one bucket ----------------------------------------------------------------------------------


def test_every_policy_is_asked_for_one_bucket_of_kv_tokens() -> None:
    """Free at 0.928: B x 0.072 less static buffers; 72 kB a token leave 411 of the 8192 that a bucket has."""
    kimi: dict[str, Any] = {"model": "kimi-k2.7-code", "gpu": "h100-80gb", "tp": 8, "reserve_gib": 1.6}
    frame = policy_map(fractions=[0.928, 0.93], **kimi).frame
    assert set(frame["code"]) == {"no_memory_for_kv"} and set(frame["mark"]) == {"X"}
    first = frame[frame["policy"] != "capture_first"]
    assert set(first["verdict"]) == {"no start"} and first["kv_cache_tokens"].max() < 8192
    assert frame["starved_gib"].isna().all()
    small = policy_map(model="llama-3.1-8b", gpu="l4", fractions=[0.72], max_tokens=8192)
    assert [small.cell(name, 0.72).mark for name in POLICIES] == ["X", "X", "X", "C"]
    assert small.cell("capture_first", 0.72).outcome.kv_cache_tokens >= 8192  # type: ignore[union-attr]


def test_no_captured_cell_has_a_pool_that_no_prompt_of_a_bucket_fits() -> None:
    found = policy_map(models=["llama-3.1-8b", "qwen3-8b"], columns={"mem_fraction": [0.7, 0.72, 0.75, 0.8]}, gpu="l4")
    captured = found.frame[found.frame["outcome"] == "captured"]
    assert len(captured)
    assert (captured["kv_cache_tokens"] >= captured["captured_buckets"].map(max)).all()


def test_what_memory_ran_out_for_lacks_nothing_later_that_is_known() -> None:
    frame = policy_map(free_memory=[1.0, 8.0], post_capture_gib=1.0, policy="ungated").frame
    assert list(frame["outcome"]) == ["oom", "captured"]
    assert frame["starved_gib"].isna().tolist() == [True, False]
