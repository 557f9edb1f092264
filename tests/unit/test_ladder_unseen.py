"""What a ladder design says beyond its own prefills: few of them, longer ones, held-out ones, and why there is none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import InvalidInput
from toolkit.ladder import choose_bucket, exceeds_replay_limit, generate_prefill_buckets
from toolkit.ladder_choice import MAX_CANDIDATES, Limits, candidate_buckets
from toolkit.ladder_design import design
from toolkit.ladder_models import CostModel, Curve, LadderLaw
from toolkit.views.ladder_tables import choice_words

SAVES = CostModel.assumed()

# --- what was not seen -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(1, 300), st.integers(1, 99), min_size=1, max_size=8),
    st.sets(st.integers(1, 400), min_size=1, max_size=12),
    st.sampled_from([None, 2, 3]),
)
def test_who_keeps_the_ceiling_replays_every_longer_prefill_that_the_default_ladder_does(
    histogram: dict[int, int], default: set[int], replay_limit: int | None
) -> None:
    def replays(ladder: Sequence[int], tokens: int) -> bool:
        bucket = choose_bucket(ladder, tokens)
        return bucket is not None and not exceeds_replay_limit(bucket, tokens, replay_limit)

    buckets = sorted(default)
    made = design(histogram, buckets, SAVES, replay_limit, Limits(), sglang_version="", traffic="", keep_ceiling=True)
    assert buckets[-1] in made.ladder
    longer = range(max(histogram) + 1, 402)
    assert all(replays(made.ladder, tokens) for tokens in longer if replays(buckets, tokens))
    assert not any("--keep-ceiling" in note for note in made.notes)


def test_a_kept_ceiling_is_rounded_up_to_the_step() -> None:
    made = design({100: 300}, [64, 8192], SAVES, 2, Limits(), sglang_version="", traffic="", step=24, keep_ceiling=True)
    assert made.ladder == (120, 8208)
    with pytest.raises(InvalidInput, match="step 0"):
        design({100: 300}, [64], SAVES, 2, Limits(), sglang_version="", traffic="", step=0, keep_ceiling=True)


def test_counts_beyond_any_traffic_are_held_out_too() -> None:
    made = design({5: 1 << 70, 9: 1 << 53}, [8, 16], SAVES, 2, Limits(), sglang_version="", traffic="")
    assert made.held_out is not None
    assert made.held_out.fitted.ladder == (5, 9)


def test_a_default_ladder_of_thousands_is_thinned_too() -> None:
    default = list(range(1, 6000))
    histogram = {size: 1 for size in range(1, 6000)}
    for limits in (Limits(len(default)), Limits(memory_gib=50, memory=LadderLaw(Curve.line(0, 0), 0.1, 1e-5, ""))):
        made = design(histogram, default, SAVES, 2, limits, sglang_version="", traffic="")
        assert made.ladder
        assert not made.exact
    assert len(candidate_buckets(histogram, default, most=MAX_CANDIDATES)) <= MAX_CANDIDATES


def test_few_lengths_are_said_to_be_few_and_the_ceiling_can_be_kept() -> None:
    """A ladder cut to seven lengths ends at 900 tokens, though the server prefills up to 8192 at once."""
    lengths = {12: 1, 40: 1, 77: 1, 130: 1, 333: 1, 512: 1, 900: 1}
    default = generate_prefill_buckets(8192)
    made = design(lengths, default, SAVES, 2, Limits(58), sglang_version="", traffic="")
    assert made.ladder == tuple(lengths)
    assert any("7 prefills are few for 7 buckets" in note for note in made.notes)
    assert any("over 900 tokens" in note and "8192" in note and "--keep-ceiling" in note for note in made.notes)
    kept = design(lengths, default, SAVES, 2, Limits(58), sglang_version="", traffic="", keep_ceiling=True)
    assert kept.ladder == (*lengths, 1024, 2048, 4096, 8192)
    assert "the buckets 1024, 2048, 4096, 8192 kept" in choice_words(kept)
    assert kept.to_dict()["kept"] == [1024, 2048, 4096, 8192]
    assert kept.proposal.mean_cost == pytest.approx(made.proposal.mean_cost)


def test_much_traffic_of_the_whole_range_needs_no_such_note() -> None:
    lengths = {100: 4000, 8192: 4000}
    made = design(lengths, generate_prefill_buckets(8192), SAVES, 2, Limits(58), sglang_version="", traffic="")
    assert made.notes == ()


@pytest.mark.parametrize(
    "limits", [Limits(3), Limits(memory_gib=1.0, memory=LadderLaw(Curve.line(0, 0.001), 0, 0, ""))]
)
def test_a_ceiling_that_no_limit_allows_is_refused(limits: Limits) -> None:
    with pytest.raises(InvalidInput, match="keeps the ceiling"):
        design({900: 9}, [1024, 2048, 4096, 8192], SAVES, 2, limits, sglang_version="", traffic="", keep_ceiling=True)


def test_lengths_that_never_come_twice_are_found_out_by_holding_some_out() -> None:
    """Each length once: no bucket of one half is a length of the other, and its gaps are wide."""
    once = {round(3 * 1.2**power): 1 for power in range(8, 44)} | {9000 + size: 1 for size in range(9)}
    made = design(once, generate_prefill_buckets(8192), SAVES, 2, Limits(58), sglang_version="", traffic="")
    found = made.held_out
    assert found is not None
    assert found.fitted_on + found.fitted.prefills == len(once)
    assert set(found.fitted.ladder) <= set(once)
    assert found.gain < 0
    assert any("held out" in note for note in made.notes)


def test_a_traffic_of_two_sizes_is_the_same_held_out() -> None:
    made = design({1: 4000, 8: 6000}, [4, 8], SAVES, 2, Limits(2), sglang_version="", traffic="")
    assert made.held_out is not None
    assert made.held_out.fitted.ladder == made.ladder == (1, 8)
    assert made.held_out.fitted.eager_share == 0
    assert made.held_out.default.eager_share == pytest.approx(0.4, abs=0.03)
    assert made.held_out.gain == pytest.approx(made.gain, abs=0.03)
    assert made.to_dict()["held_out"]["fitted_on"] == made.held_out.fitted_on
    again = design({8: 6000, 1: 4000}, [4, 8], SAVES, 2, Limits(2), sglang_version="", traffic="")
    assert again.held_out == made.held_out


def test_too_few_prefills_are_not_held_out() -> None:
    made = design({1: 20, 8: 19}, [4, 8], SAVES, 2, Limits(2), sglang_version="", traffic="")
    assert made.held_out is None
    assert made.to_dict()["held_out"] is None
    assert "n/a" in made.held_out_words()


# --- why there is none, and what it is worth ---------------------------------------------------------------------

_FLAT = LadderLaw(Curve.line(0.5, 0.001), 0.0, 0.0, "drawn")


@pytest.mark.parametrize(
    ("cost", "limits", "reason"),
    [
        (CostModel(Curve.line(0, 1), Curve.line(9, 1), "ms", "dear"), Limits(), "by these costs eager is cheapest"),
        (SAVES, Limits(0), "no bucket is allowed"),
        (SAVES, Limits(None, 0.2, memory=_FLAT), "bucket 100 alone takes 0.60 GiB, the memory budget is 0.2 GiB"),
        (SAVES, Limits(None, None, 0.2, time=_FLAT), "bucket 100 alone takes 0.60 s, the time budget is 0.2 s"),
    ],
)
def test_why_there_is_no_bucket_is_said(cost: CostModel, limits: Limits, reason: str) -> None:
    made = design({100: 300, 200: 300}, [128, 256], cost, 2, limits, sglang_version="", traffic="")
    assert made.ladder == ()
    assert reason in made.empty_because
    assert made.held_out is None
    assert made.to_dict()["empty_because"] == made.empty_because
    assert not any("that is cheaper" in note for note in made.notes if made.gain < 0)


def test_a_tight_budget_is_not_called_cheaper() -> None:
    made = design({100: 300, 200: 300}, [128, 256], SAVES, 2, Limits(0), sglang_version="", traffic="")
    dearer = made.proposal.mean_cost / made.default.mean_cost - 1
    assert any(f"the limits leave room for no more, and a prefill costs {dearer:.1%} more" in n for n in made.notes)


def test_the_headline_has_memory_and_time_and_leaves_out_what_stays() -> None:
    limits = Limits(58, memory=LadderLaw(Curve.line(1, 0), 0.01, 0, ""), time=LadderLaw(Curve.line(0, 0), 1, 0, ""))
    made = design({512: 900, 1024: 900}, [256, 512, 1024], SAVES, 2, limits, sglang_version="", traffic="")
    assert made.sentence() == (
        "2 buckets instead of 3: memory 1.02 GiB instead of 1.03 GiB, capture 2.0 s instead of 3.0 s"
    )
