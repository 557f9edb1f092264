"""`budgeted` and `capture_first` as pure decisions: what is trimmed, what is watched, what is said of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from toolkit.ladder import choose_bucket, exceeds_replay_limit, replay_share
from toolkit.policies import (
    POLICIES,
    BucketNeed,
    Decision,
    LadderNeed,
    OnOutOfMemory,
    PolicyFacts,
    budgeted,
    capture_first,
    later_words,
    measured_over_forecast,
    mib_or_gib,
    reserve_gib,
    same_on_all_ranks,
    scaled,
    starved_gib,
    trim_words,
    watch,
)

LADDER = (8, 64, 512)
ladders = st.lists(st.integers(1, 600), min_size=1, max_size=12, unique=True).map(sorted)
amounts = st.floats(0, 20, allow_nan=False)


def dyadic(most: int) -> st.SearchStrategy[float]:
    """GiB in whole MiB: sums and differences of them are exact."""
    return st.integers(0, most * 1024).map(lambda mib: mib / 1024)


def need(*steps: tuple[int, float, float]) -> LadderNeed:
    """From (tokens, cumulative GiB, peak GiB) in order of capture."""
    made = tuple(BucketNeed(*step) for step in steps)
    return LadderNeed(made, max(step.peak_gib for step in made), made[-1].cumulative_gib)


WHOLE = need((512, 2.0, 2.5), (64, 2.25, 2.25), (8, 2.375, 2.375))
SHORTER = need((64, 0.5, 0.75), (8, 0.625, 0.625))
SHORTEST = need((8, 0.125, 0.1875))


def facts(
    free: float, reserve: float = 0.5, later: float = 0.0, needs: Sequence[LadderNeed] | None = None
) -> PolicyFacts:
    shown = (WHOLE, SHORTER, SHORTEST) if needs is None else tuple(needs)
    return PolicyFacts(free, frozenset(), LADDER, reserve, later, needs=shown)


# --- the reserve --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "asked", "kept"),
    [
        *((10, None, 0.5), (5, None, 0.5), (4, None, 0.4), (0.02, None, 0.002), (0, None, 0), (-3, None, 0)),
        *((10, 0.0, 0.0), (1, 2.5, 2.5), (-1, 0.25, 0.25)),
    ],
)
def test_the_reserve_is_as_asked_or_the_smaller_of_half_a_gib_and_a_tenth(
    free: float, asked: float | None, kept: float
) -> None:
    assert reserve_gib(free, asked) == pytest.approx(kept)


# --- what budgeted decides ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "later", "buckets", "trimmed", "code"),
    [
        (3.0, 0.0, LADDER, (), "budget_fits"),
        (math.nextafter(3.0, 0), 0.0, (8, 64), (512,), "budget_trimmed"),
        (3.0, 0.125, LADDER, (), "budget_fits"),  # later memory is needed when the peak is over
        (3.0, 0.126, (8, 64), (512,), "budget_trimmed"),
        (1.25, 0.0, (8, 64), (512,), "budget_trimmed"),
        (1.24, 0.0, (8,), (64, 512), "budget_trimmed"),
        (0.6875, 0.0, (8,), (64, 512), "budget_trimmed"),
        (0.68, 0.0, (), LADDER, "over_budget"),
        (0.0, 0.0, (), LADDER, "over_budget"),
        (-1.0, 0.0, (), LADDER, "over_budget"),
    ],
)
def test_the_ladder_is_trimmed_from_the_top_until_it_fits(
    free: float, later: float, buckets: tuple[int, ...], trimmed: tuple[int, ...], code: str
) -> None:
    decision = budgeted(facts(free, later=later))
    assert (decision.capture, decision.code) == (bool(buckets), code)
    assert (decision.buckets, decision.trimmed) == (buckets, trimmed)
    # Silent only where nothing is left out.
    assert (decision.log_line is None) == (not trimmed)
    if decision.log_line is not None:
        assert decision.log_line == f"budgeted: {decision.reason}"
    if decision.capture:
        assert decision.on_oom is OnOutOfMemory.KEEP_OR_EAGER
        assert (decision.floor_gib, decision.kept_gib) == (0.5, 0.5 + later)
        assert [step.num_tokens for step in decision.steps] == sorted(buckets, reverse=True)


def test_a_decision_says_what_is_kept_what_is_needed_and_what_it_costs() -> None:
    whole, cut, none = (budgeted(facts(free, later=0.0)) for free in (3.0, 1.25, 0.5))
    assert whole.reason == (
        "the whole ladder fits: forecast to need 2.50 GiB at its worst moment and 2.38 GiB in the end of "
        "3.00 GiB free, 0.50 GiB kept as reserve"
    )
    # Of 512 counts, 8 and 64 replay 4-8 and 32-64: 38, which is 7 %; 512 adds 256-512, 257 more: 58 %.
    assert cut.reason.startswith(
        "1 of 3 buckets left out (512 tokens), so that 7 % instead of 58 % of the token counts up to 512 replay: "
    )
    assert none.reason.startswith("no ladder fits: 0.50 GiB free, 0.50 GiB kept as reserve, and even buckets up to 8 ")
    assert none.reason.endswith("prefill runs eager")
    assert "0.25 GiB needed later" in budgeted(facts(1.25, later=0.25)).reason


@pytest.mark.parametrize("broken", ["peak_gib", "total_gib", "steps"])
def test_a_forecast_that_is_no_number_is_no_forecast(broken: str) -> None:
    steps = (BucketNeed(512, math.nan, math.nan), *WHOLE.steps[1:])
    spoiled = replace(WHOLE, **{broken: steps if broken == "steps" else math.nan})
    assert not spoiled.known
    assert not LadderNeed((), 0.0, 0.0).known
    for needs in ((), (spoiled,)):
        decision = budgeted(facts(1.0, needs=needs))
        assert (decision.capture, decision.code) == (True, "budget_unforeseen")
        assert (decision.buckets, decision.steps, decision.trimmed) == (LADDER, (), ())
        assert decision.log_line == f"budgeted: {decision.reason}"
    assert budgeted(facts(1.25, needs=(spoiled, SHORTER))).buckets == (8, 64)


@given(st.floats(-1, 6), amounts, amounts, st.floats(0, 6))
def test_more_memory_never_trims_more(free: float, reserve: float, later: float, more: float) -> None:
    less, rich = (budgeted(facts(each, reserve, later)) for each in (free, free + more))
    assert set(less.buckets) <= set(rich.buckets)
    assert set(rich.trimmed) <= set(less.trimmed)
    for decision in (less, rich):
        assert sorted((*decision.buckets, *decision.trimmed)) == list(LADDER)


def test_capture_first_takes_all_and_says_what_it_may_use() -> None:
    decision = capture_first(PolicyFacts(0.02, frozenset(), LADDER, 0.002, 1.0, kv_room_gib=7.5))
    assert (decision.capture, decision.buckets, decision.floor_gib) == (True, LADDER, None)
    assert decision.on_oom is OnOutOfMemory.FAIL
    assert "20 MiB and the 7.50 GiB of a KV pool sized first" in decision.reason
    assert "2 MiB kept as reserve and 1.00 GiB needed later" in decision.reason
    assert not POLICIES["capture_first"].kv_first
    assert [name for name, policy in POLICIES.items() if policy.foresees] == ["budgeted"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("free", [0.5, 1.25, 5.0])
def test_a_decision_is_json_and_the_same_once_read(name: str, free: float) -> None:
    plain = POLICIES[name].decide(facts(free)).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["order"] == "largest first"
    assert set(plain) > {"capture", "code", "reason", "buckets", "trimmed", "floor_gib", "kept_gib", "steps", "on_oom"}


# --- watching -----------------------------------------------------------------------------------------------


def test_a_capture_that_goes_as_forecast_is_never_stopped() -> None:
    decision = budgeted(facts(3.0))
    for captured, step in enumerate(decision.steps, 1):
        assert watch(decision, captured, 3.0, 3.0 - step.cumulative_gib) is None


def test_what_was_taken_beyond_the_forecast_moves_the_next_peak() -> None:
    decision = budgeted(facts(3.0))
    assert watch(decision, 1, 3.0, 3.0 - 2.25) is None  # 0.25 more: the next peak leaves exactly the reserve
    halt = watch(decision, 1, 3.0, 3.0 - 2.26)
    assert halt is not None and not halt.exceeded
    assert "bucket 64 would leave" in halt.reason
    assert watch(decision, 1, 3.0, 3.0 - 1.0) is None  # less than forecast is no excess


def test_a_reserve_that_is_touched_is_exceeded_whatever_comes_next() -> None:
    decision = budgeted(facts(3.0, later=0.125))
    for captured in (1, 2, 3):
        halt = watch(decision, captured, 3.0, 0.62)
        assert halt is not None and halt.exceeded
        assert halt.reason == "0.62 GiB are free, 0.62 GiB have to stay free"
    assert watch(decision, 3, 3.0, 0.625) is None


def test_without_a_forecast_only_the_reserve_is_watched() -> None:
    decision = budgeted(facts(3.0, needs=()))
    assert watch(decision, 1, 3.0, 0.51) is None
    halt = watch(decision, 1, 3.0, 0.49)
    assert halt is not None and halt.exceeded


@pytest.mark.parametrize("name", ["gated", "ungated", "capture_first"])
def test_other_policies_do_not_watch(name: str) -> None:
    assert watch(POLICIES[name].decide(facts(5.0)), 1, 5.0, -1.0) is None


@given(
    ladders,
    st.lists(st.tuples(dyadic(2), dyadic(1)), min_size=12, max_size=12),
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.25, 2.0, 3.0]),
    dyadic(8),
    dyadic(1),
    dyadic(1),
)
def test_a_watched_capture_ends_with_the_reserve_or_says_that_it_is_gone(
    ladder: list[int], costs: list[tuple[float, float]], factor: float, free: float, reserve: float, later: float
) -> None:
    """A pretended capture that takes `factor` times its forecast, bucket by bucket."""
    gone, steps = 0.0, []
    for bucket, (added, warm_up) in zip(reversed(ladder), costs, strict=False):
        gone += added
        steps.append((bucket, gone, gone + warm_up))
    decision = budgeted(PolicyFacts(free, frozenset(), tuple(ladder), reserve, later, needs=(need(*steps),)))
    assume(decision.capture)
    for captured, step in enumerate(decision.steps, 1):
        taken = step.cumulative_gib * factor
        halt = watch(decision, captured, free, free - taken)
        if halt is not None:
            assert factor > 1
            assert halt.exceeded == (free - taken < reserve + later)
            break
        assert free - taken >= reserve + later
        if captured < len(decision.steps):
            # The next bucket may go on: by what is known now, it leaves the reserve.
            excess = max(0.0, taken - step.cumulative_gib)
            assert free - decision.steps[captured].peak_gib - excess >= reserve


def test_how_far_off_a_forecast_was() -> None:
    decision = budgeted(facts(3.0))
    assert measured_over_forecast(decision, 1, 3.0) == 1.5
    assert measured_over_forecast(decision, 3, 2.375) == 1.0
    assert measured_over_forecast(decision, 0, 1.0) is None
    assert measured_over_forecast(decision, 4, 1.0) is None
    assert measured_over_forecast(budgeted(facts(3.0, needs=())), 1, 1.0) is None
    free_of_charge = budgeted(facts(3.0, needs=(need((512, 0.0, 0.0)),)))
    assert measured_over_forecast(free_of_charge, 1, 1.0) is None


@given(st.floats(1.001, 50))
def test_a_corrected_forecast_no_longer_offers_what_was_too_much(factor: float) -> None:
    """Why the next try ends: a ladder that took more than there is does not fit any more."""
    free = 3.0
    decision = budgeted(facts(free))
    taken = WHOLE.total_gib * factor
    assume(free - taken < decision.kept_gib)
    measured = measured_over_forecast(decision, 3, taken)
    assert measured is not None
    again = budgeted(facts(free, needs=[scaled(each, measured) for each in (WHOLE, SHORTER, SHORTEST)]))
    assert len(again.buckets) < len(decision.buckets)


# --- words --------------------------------------------------------------------------------------------------


@given(ladders, st.data())
def test_the_share_of_counts_that_replay_is_that_of_counting_them(ladder: list[int], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.sampled_from(ladder), unique=True).map(sorted))
    ceiling = max(ladder)

    def replays(tokens: int) -> bool:
        bucket = choose_bucket(kept, tokens)
        return bucket is not None and not exceeds_replay_limit(bucket, tokens)

    counted = sum(replays(tokens) for tokens in range(1, ceiling + 1))
    assert replay_share(kept, ceiling) == counted / ceiling
    fits = sum(choose_bucket(kept, tokens) is not None for tokens in range(1, ceiling + 1))
    assert replay_share(kept, ceiling, factor=None) == fits / ceiling


@given(ladders, st.data())
def test_words_about_a_trim_name_what_is_gone_and_never_praise_it(ladder: list[int], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.sampled_from(ladder), unique=True, max_size=len(ladder) - 1).map(sorted))
    assume(len(kept) < len(ladder))
    words = trim_words(ladder, kept)
    gone = sorted(set(ladder) - set(kept))
    assert words.startswith(f"{len(gone)} of {len(ladder)} buckets left out ({gone[0]}")
    assert f"{gone[-1]} tokens)" in words
    after, before = shares(words)
    assert 0 <= after <= before <= 100
    assert words.endswith(f"of the token counts up to {max(ladder)} replay")


def shares(words: str) -> tuple[int, int]:
    after, before = words.split("so that ")[1].split(" % of")[0].split(" % instead of ")
    return int(after), int(before)


@pytest.mark.parametrize(
    ("gib", "words"),
    [(0, "0 MiB"), (0.0004, "0.4 MiB"), (0.02, "20 MiB"), (0.0999, "102 MiB"), (0.1, "0.10 GiB"), (-0.05, "-51 MiB")],
)
def test_small_amounts_are_said_in_mib(gib: float, words: str) -> None:
    assert mib_or_gib(gib) == words


# --- what comes later ---------------------------------------------------------------------------------------


def test_the_published_case_of_a_workspace_that_starved() -> None:
    """sgl-project/sglang#40094: 337 MB and 5.58 MB more for each 1K tokens, after graphs of 1.81 GiB."""
    need_gib = (337e6 + 5.58e6 * 96) / 2**30
    assert starved_gib(2.34 - 1.81, need_gib) == pytest.approx(need_gib - 0.53)
    assert starved_gib(2.34, need_gib) == 0.0
    assert "starves by" in later_words(0.53, need_gib)
    assert later_words(2.34, need_gib).endswith("it fits")


@given(st.one_of(st.none(), st.floats(-5, 50)), amounts)
def test_what_is_lacking_is_never_negative_and_nothing_without_a_figure(free: float | None, later: float) -> None:
    lacking = starved_gib(free, later)
    assert lacking >= 0
    assert lacking == (0 if free is None else max(0, later - free))


# --- ranks --------------------------------------------------------------------------------------------------


def test_the_smallest_rank_decides_for_all() -> None:
    decision, alone, smallest = same_on_all_ranks(POLICIES["budgeted"], [facts(3.0), facts(1.25), facts(2.0)])
    assert smallest == 1
    assert decision is alone[1]
    assert decision.buckets == (8, 64)
    assert [each.buckets for each in alone] == [LADDER, (8, 64), (8, 64)]
    assert isinstance(decision, Decision)
