"""The parts of the replay check that need no model: how a batch is cut, and when a capture counts as failed."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.prefill.check import TOLERANCE, BucketCheck, CheckResult, _relative_difference, _split
from toolkit.prefill.speed import spread
from toolkit.runs.record import ReplayCheck, RunRecord

NAN = math.nan
GOOD = {"requests": 1, "prefix_tokens": 0, "bit_equal": True, "padded_diff": 0.0, "argmax_agrees": True}


def check(num_tokens: int = 8, *, unpadded_diff: float = 0.0, **changes: Any) -> BucketCheck:
    values = {**GOOD, "num_tokens": num_tokens, "tokens": num_tokens - 1, **changes}
    return BucketCheck(unpadded_diff=unpadded_diff, **values)


def result(*checks: BucketCheck, tolerance: float = 0.05, bit_exact: bool = True) -> CheckResult:
    return CheckResult(checks, tolerance, bit_exact)


# --- when a capture counts as failed ------------------------------------------------------------------------


def test_agreement_is_no_problem() -> None:
    good = result(check(8, unpadded_diff=0.01), check(16, unpadded_diff=0.05))
    assert good.problem is None
    assert good.bit_equal
    assert (good.max_abs_diff, good.tokens_checked) == (0.05, 7 + 15)


def test_no_bucket_is_no_problem() -> None:
    assert (result().problem, result().max_abs_diff, result().tokens_checked) == (None, 0.0, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bit_equal": False, "padded_diff": 0.001}, "same padded batch by 0.10%"),
        ({"bit_equal": False, "padded_diff": NAN}, "same padded batch by nan%"),
        ({"unpadded_diff": 0.0501}, "differs from eager by 5.01%, over 5.00%"),
        ({"unpadded_diff": NAN}, "differs from eager by nan%"),
        ({"unpadded_diff": math.inf}, "differs from eager by inf%"),
        ({"argmax_agrees": False}, "another next token"),
    ],
)
def test_a_disagreement_names_its_bucket(changes: dict[str, Any], says: str) -> None:
    bad = result(check(8), check(32, **changes), check(16))
    assert bad.problem is not None
    assert bad.problem.startswith("replay of bucket 32 (31 tokens) ")
    assert says in bad.problem


@pytest.mark.parametrize("padded_diff", [0.0, 0.05])
def test_a_device_that_cannot_promise_bits_is_judged_by_the_tolerance(padded_diff: float) -> None:
    unequal = check(bit_equal=False, padded_diff=padded_diff)
    assert result(unequal, bit_exact=False).problem is None
    assert not result(unequal, bit_exact=False).bit_equal
    assert result(unequal).problem is not None
    for diff in (0.06, NAN):
        assert result(check(bit_equal=False, padded_diff=diff), bit_exact=False).problem is not None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_never_lost_among_numbers(place: int) -> None:
    diffs = [0.01, 0.02]
    diffs.insert(place, NAN)
    bad = result(*(check(unpadded_diff=diff) for diff in diffs))
    assert bad.problem is not None
    assert bad.max_abs_diff is None
    for padded, unpadded in ((NAN, 0.01), (0.01, NAN)):
        one = result(check(padded_diff=padded, unpadded_diff=unpadded), bit_exact=False)
        assert "nan%" in str(one.problem)


def test_a_record_of_a_replay_that_gave_no_number_can_be_read_again() -> None:
    bad = result(check(unpadded_diff=NAN))
    seen = ReplayCheck(bit_equal=False, max_abs_diff=bad.max_abs_diff, tokens_checked=7)
    record = RunRecord(
        **{"id": "x", "created": "x", "settings": {}, "device": {}, "software": {}, "outcome": "failed"},
        **{"runner": None, "reason": "x", "replay_check": seen},
    )
    assert RunRecord.from_json(record.to_json()) == record


@given(st.lists(st.tuples(st.booleans(), st.floats(), st.floats(), st.booleans()), max_size=5), st.booleans())
def test_only_what_agrees_in_everything_passes(checks: list[tuple[bool, float, float, bool]], bit_exact: bool) -> None:
    made = [
        check(bit_equal=equal, padded_diff=padded, unpadded_diff=unpadded, argmax_agrees=agrees)
        for equal, padded, unpadded, agrees in checks
    ]
    fine = all(
        (equal or not bit_exact) and padded <= 0.05 and unpadded <= 0.05 and agrees
        for equal, padded, unpadded, agrees in checks
    )
    problem = result(*made, bit_exact=bit_exact).problem
    assert (problem is None) == fine
    assert problem is None or len(problem.splitlines()) == 1


def test_tolerances_are_below_what_a_wrong_graph_does() -> None:
    # Stale or swapped memory differs by the magnitude itself. bf16 keeps 8 bits, fp16 11, fp32 24.
    eps = {dtype: torch.finfo(dtype).eps for dtype in TOLERANCE}
    assert all(2 * eps[dtype] < tolerance < 0.1 for dtype, tolerance in TOLERANCE.items())


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 4.0], 0.25),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.5, 0.0], [0.0, 0.0], 0.5),
        ([-8.0, 1.0], [8.0, 1.0], 2.0),
    ],
)
def test_differences_are_shares_of_the_largest_magnitude(one: list[float], other: list[float], expected: float) -> None:
    assert _relative_difference(torch.tensor(one), torch.tensor(other)) == expected


def test_a_nan_makes_the_difference_a_nan() -> None:
    for one, other in (([NAN, 1.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, NAN])):
        assert math.isnan(_relative_difference(torch.tensor(one), torch.tensor(other)))


# --- how a batch is cut -------------------------------------------------------------------------------------


@given(st.integers(1, 600), st.integers(1, 6), st.integers(0, 300), st.integers(0, 10_000))
def test_a_split_adds_up_within_its_bounds(total: int, parts: int, slack: int, seed: int) -> None:
    parts = min(parts, total)
    longest = -(-total // parts) + slack
    lengths = _split(total, parts, longest, random.Random(seed))
    assert len(lengths) == parts
    assert sum(lengths) == total
    assert all(1 <= length <= longest for length in lengths)


def test_splits_differ_from_seed_to_seed() -> None:
    assert len({tuple(_split(100, 3, 100, random.Random(seed))) for seed in range(20)}) > 10


# --- which buckets are timed --------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=80, unique=True), st.integers(2, 20))
def test_timed_buckets_are_spread_and_include_both_ends(buckets: list[int], count: int) -> None:
    ladder = sorted(buckets)
    chosen = spread(ladder, count)
    assert len(chosen) == min(count, len(ladder))
    assert chosen == sorted(set(chosen))
    assert {ladder[0], ladder[-1]} <= set(chosen) <= set(ladder)
