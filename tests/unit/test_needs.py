"""Which ladders a policy is shown: the whole, and those around the longest that fits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.forecast.needs import ladder_need, ladder_needs
from toolkit.forecast.terms import GRAPH_POOL, BucketForecast, Forecast, Range, Term
from toolkit.policies import LadderNeed, PolicyFacts, budgeted

ladders = st.lists(st.integers(1, 4096), min_size=1, max_size=60, unique=True).map(sorted)
UNKNOWN = Range(math.nan, math.nan, math.nan)


def forecast(ladder: tuple[int, ...], mib_per_token: float = 1.0) -> Forecast:
    """The largest bucket pays a MiB a token, each further one 2 MiB; peaks a quarter higher; a tenth of doubt."""
    steps, gone = [], 0.0
    for number, bucket in enumerate(sorted(ladder, reverse=True)):
        added = bucket * mib_per_token if number == 0 else 2.0
        gone += added
        steps.append(BucketForecast(bucket, doubtful(added), doubtful(gone), doubtful(gone * 1.25)))
    return Forecast("test", (Term(GRAPH_POOL, doubtful(gone), "made up"),), tuple(steps))


def doubtful(mib: float) -> Range:
    return Range(mib, mib * 0.9, mib * 1.1)


def need_of(ladder: tuple[int, ...]) -> LadderNeed:
    need = ladder_need(forecast(ladder))
    assert need is not None
    return need


# --- one ladder ---------------------------------------------------------------------------------------------


def test_a_need_is_the_middle_of_a_forecast_in_gib() -> None:
    need = need_of((8, 512, 1024))
    assert [step.num_tokens for step in need.steps] == [1024, 512, 8]
    assert [step.cumulative_gib for step in need.steps] == pytest.approx([1.0, 1026 / 1024, 1028 / 1024])
    assert need.total_gib == need.steps[-1].cumulative_gib
    assert need.peak_gib == max(step.peak_gib for step in need.steps) == pytest.approx(1.25 * 1028 / 1024)
    assert need.buckets == (8, 512, 1024)


@pytest.mark.parametrize("where", ["peak", "cumulative", "total"])
def test_a_forecast_that_is_not_available_anywhere_is_no_need(where: str) -> None:
    known = forecast((8, 16))
    steps = list(known.buckets)
    if where != "total":
        changed = {"added": steps[1].added, "cumulative": steps[1].cumulative, "peak": steps[1].peak, where: UNKNOWN}
        steps[1] = BucketForecast(8, **changed)
    terms = (Term(GRAPH_POOL, UNKNOWN, "n/a"),) if where == "total" else known.terms
    assert ladder_need(Forecast("test", terms, tuple(steps))) is None


def test_a_forecast_without_buckets_is_no_need() -> None:
    assert ladder_need(Forecast("test", (), ())) is None


# --- the longest that fits ----------------------------------------------------------------------------------


@given(ladders, st.floats(0, 6))
def test_the_longest_ladder_that_fits_is_always_among_them(ladder: list[int], free_gib: float) -> None:
    asked: list[tuple[int, ...]] = []

    def ask(buckets: tuple[int, ...]) -> Forecast:
        asked.append(buckets)
        return forecast(buckets)

    needs = ladder_needs(ask, tuple(ladder), lambda need: need.peak_gib <= free_gib)
    fitting = [count for count in range(1, len(ladder) + 1) if need_of(tuple(ladder[:count])).peak_gib <= free_gib]
    found = [need for need in needs if need.peak_gib <= free_gib]
    assert max((len(need.steps) for need in found), default=0) == max(fitting, default=0)
    assert needs[0].buckets == tuple(ladder)  # what the whole would need is always told
    assert all(need.buckets == tuple(ladder[: len(need.steps)]) for need in needs)
    assert len(asked) == len(set(asked)) <= 2 + math.ceil(math.log2(len(ladder) + 1))
    if fitting and len(fitting) < len(ladder):
        assert len(fitting) + 1 in [len(need.steps) for need in needs]  # the next longer was looked at and is too long
    if not fitting:
        assert needs[-1].buckets == (ladder[0],)  # the least there is


def test_a_ladder_is_sorted_first() -> None:
    assert ladder_needs(forecast, (32, 8, 16), lambda need: True)[0].buckets == (8, 16, 32)


@given(ladders)
def test_nothing_is_told_where_nothing_is_known(ladder: list[int]) -> None:
    def ask(buckets: tuple[int, ...]) -> Forecast:
        unknown = tuple(BucketForecast(bucket, UNKNOWN, UNKNOWN, UNKNOWN) for bucket in buckets)
        return Forecast("test", (Term(GRAPH_POOL, UNKNOWN, "n/a"),), unknown)

    assert ladder_needs(ask, tuple(ladder), lambda need: True) == ()


@given(ladders, st.floats(0.01, 6), st.floats(0, 1), st.floats(0, 2))
def test_budgeted_takes_the_longest_that_leaves_reserve_and_later_need(
    ladder: list[int], free_gib: float, reserve: float, later: float
) -> None:
    facts = PolicyFacts(free_gib, frozenset(), tuple(ladder), reserve, later)
    needs = ladder_needs(forecast, facts.buckets, facts.fits)
    decision = budgeted(PolicyFacts(free_gib, frozenset(), tuple(ladder), reserve, later, needs=needs))

    def fits(count: int) -> bool:
        need = need_of(tuple(ladder[:count]))
        return need.peak_gib <= free_gib - reserve and need.total_gib <= free_gib - reserve - later

    expected = max((count for count in range(1, len(ladder) + 1) if fits(count)), default=0)
    assert decision.capture == (expected > 0)
    assert sorted(decision.buckets) == ladder[:expected]
    assert list(decision.trimmed) == ladder[expected:]
