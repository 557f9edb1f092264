"""The ladder that fits a traffic: against brute force, within its budgets, and reports that add up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, combinations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import InvalidInput
from toolkit.ladder import choose_bucket, exceeds_replay_limit, generate_prefill_buckets
from toolkit.ladder_choice import MAX_CANDIDATES, Limits, candidate_buckets
from toolkit.ladder_coverage import cover
from toolkit.ladder_design import design
from toolkit.ladder_models import CostModel, Curve, LadderLaw
from toolkit.ladder_solver import Budget, solve

# --- an independent account of what a server does, one prefill at a time ----------------------------------------


def _cost_of(ladder: Sequence[int], histogram: dict[int, int], cost: CostModel, limit: int | None) -> float:
    total = 0.0
    for tokens, count in histogram.items():
        bucket = choose_bucket(ladder, tokens)
        if bucket is None or exceeds_replay_limit(bucket, tokens, limit):
            total += count * float(cost.eager.at(tokens))
        else:
            total += count * float(cost.replay.at(bucket))
    return total


def _takes(law: LadderLaw, ladder: Sequence[int]) -> float:
    if not ladder:
        return 0.0
    return float(law.largest.at(max(ladder))) + sum(law.per_bucket + law.per_token * bucket for bucket in ladder)


def _cheapest(
    candidates: Sequence[int],
    histogram: dict[int, int],
    cost: CostModel,
    limit: int | None,
    most: int,
    budgets: Sequence[Budget],
    required: Sequence[int] = (),
) -> float:
    subsets = chain.from_iterable(combinations(candidates, count) for count in range(min(most, len(candidates)) + 1))
    return min(
        (
            _cost_of(ladder, histogram, cost, limit)
            for ladder in subsets
            if set(required) <= set(ladder) and all(_takes(budget.law, ladder) <= budget.limit for budget in budgets)
        ),
        default=inf,
    )


def _instance(seed: int) -> tuple[list[int], dict[int, int], CostModel, int | None, int, list[Budget]]:
    """Of every kind in turn: with and without the replay limit, no budget, max and count, with sums, two budgets."""
    draw = random.Random(seed)
    sizes = draw.sample(range(1, draw.choice([12, 60, 400])), draw.randint(1, 9))
    histogram = {size: draw.randint(1, 50) for size in sizes}
    others = {draw.randint(1, 500) for _ in range(draw.randint(0, 3))}
    overhead, slope = draw.choice([0.0, 5.0, 40.0]), draw.choice([0.5, 1.0, 1.3])
    floor = draw.choice([0.0, 30.0, 200.0])
    cost = CostModel(Curve(((0.0, floor), (floor + 1, floor + 1))), Curve.line(overhead, slope), "ms", "drawn")
    laws = [
        LadderLaw(
            Curve.line(draw.choice([0.0, 3.0]), draw.choice([0.0, 0.02])),
            draw.choice([0.0, 1.0]),
            draw.choice([0.0, 0.01]) if seed % 4 else 0.0,
            "drawn",
        )
        for _ in range(seed % 3)
    ]
    budgets = [Budget(law, draw.uniform(0, 1.2 * max(_takes(law, sizes), 0.1))) for law in laws]
    limit = None if seed % 5 == 0 else 2
    return sorted(set(sizes) | others), histogram, cost, limit, draw.randint(0, 12), budgets


@pytest.mark.parametrize("seed", range(200))
def test_the_ladder_is_as_cheap_as_brute_force_finds(seed: int) -> None:
    candidates, histogram, cost, limit, most, budgets = _instance(seed)
    found = solve(candidates, histogram, cost, limit, most, budgets)
    assert found.exact
    assert found.cost == pytest.approx(_cheapest(candidates, histogram, cost, limit, most, budgets), abs=1e-6)
    assert found.cost == pytest.approx(_cost_of(found.ladder, histogram, cost, limit), abs=1e-6)
    assert set(found.ladder) <= set(candidates)
    assert len(found.ladder) <= most
    assert all(_takes(budget.law, found.ladder) <= budget.limit + 1e-9 for budget in budgets)


@pytest.mark.parametrize("seed", range(120))
def test_with_required_buckets_it_is_as_cheap_as_brute_force_finds(seed: int) -> None:
    candidates, histogram, cost, limit, most, budgets = _instance(seed)
    draw = random.Random(seed)
    required = draw.sample(candidates, draw.randint(1, min(3, len(candidates))))
    budgets = [Budget(budget.law, budget.limit * draw.choice([1, 3])) for budget in budgets]
    found = solve(candidates, histogram, cost, limit, most, budgets, required)
    cheapest = _cheapest(candidates, histogram, cost, limit, most, budgets, required)
    assert found.exact
    if cheapest == inf:
        assert found.ladder == ()
    else:
        assert set(required) <= set(found.ladder)
        assert _cost_of(found.ladder, histogram, cost, limit) == pytest.approx(cheapest, abs=1e-6)


def test_the_instances_are_of_every_kind() -> None:
    """A brute force over instances without budgets or without a binding one would prove little."""
    binding = sums = unlimited = eager = 0
    for seed in range(200):
        candidates, histogram, cost, limit, most, budgets = _instance(seed)
        found = solve(candidates, histogram, cost, limit, most, budgets)
        binding += found.cost > solve(candidates, histogram, cost, limit).cost + 1e-6
        sums += any(budget.law.per_token > 0 for budget in budgets)
        unlimited += limit is None
        eager += not found.ladder
    assert min(binding, sums, unlimited, eager) >= 20, (binding, sums, unlimited, eager)


@pytest.mark.parametrize("seed", range(20))
def test_no_bucket_outside_the_traffic_is_worth_having(seed: int) -> None:
    """Where a replay is never dearer than eager, sizes of the traffic are all the candidates there need to be."""
    draw = random.Random(seed)
    histogram = {draw.randint(1, 14): draw.randint(1, 9) for _ in range(6)}
    cost = CostModel(Curve.line(100.0, 1.0), Curve.line(5.0, 1.0), "ms", "drawn")
    most = draw.randint(1, 4)
    anywhere = _cheapest(range(1, 15), histogram, cost, 2, most, [])
    assert solve(candidate_buckets(histogram, []), histogram, cost, 2, most).cost == pytest.approx(anywhere)


# --- what people lose graphs by ----------------------------------------------------------------------------------

SAVES = CostModel.assumed()


def test_one_token_prefills_need_a_bucket_of_their_own() -> None:
    found = solve([1, 4, 8], {1: 40, 8: 60}, SAVES, 2)
    assert found.ladder == (1, 8)


def test_without_the_replay_limit_one_bucket_can_hold_them_all() -> None:
    cost = CostModel(Curve.line(1000.0, 0.0), Curve.line(1.0, 0.0), "ms", "flat")
    assert solve([1, 8], {1: 40, 8: 60}, cost, None, 1).ladder == (8,)
    assert solve([1, 8], {1: 40, 8: 60}, cost, 2, 1).cost == 60 + 40 * 1000


def test_a_size_stays_eager_where_padding_costs_more() -> None:
    """2100 tokens are padded to 4096 wherever the rule allows it, and then take twice as long as eager."""
    assert solve([2100, 4096], {2100: 1, 4096: 1}, SAVES, 2, 1).ladder == (2100,)
    assert solve([2100, 4096], {2100: 1, 4096: 99}, SAVES, 2, 1).ladder == (4096,)
    assert solve([2100, 4096], {2040: 1, 4096: 1}, SAVES, 2, 1).ladder == (4096,)


def test_a_server_may_be_slower_with_graphs_than_without() -> None:
    """Public PR sglang-omni#1398 measured that; here a replay's own overhead is over what it saves."""
    dear = CostModel(Curve.line(10.0, 1.0), Curve.line(30.0, 1.0), "ms", "a replay is dearer")
    histogram = {20: 1, 300: 99}
    made = design(histogram, [48], dear, 2, Limits(), sglang_version="0.5.23", traffic="drawn")
    assert made.default_gain == 0  # 20 tokens are too few for a bucket of 48
    made = design({40: 1, 300: 99}, [48], dear, 2, Limits(), sglang_version="0.5.23", traffic="drawn")
    assert made.default_gain < 0
    assert made.ladder == ()
    assert made.server_flags() == ["--disable-prefill-cuda-graph"]


# --- properties --------------------------------------------------------------------------------------------------

histograms = st.dictionaries(st.integers(1, 9000), st.integers(1, 10**6), min_size=1, max_size=60)
laws = st.builds(
    LadderLaw,
    st.builds(Curve.line, st.floats(0, 5), st.floats(0, 0.01)),
    st.floats(0, 1),
    st.sampled_from([0.0, 1e-3]),
    st.just("drawn"),
)
costs = st.builds(CostModel.assumed, st.integers(0, 4000), st.integers(0, 400), st.floats(0, 0.5))


@settings(max_examples=60, deadline=None)
@given(histograms, costs, st.sampled_from([None, 2]), laws, st.floats(0, 20), laws, st.floats(0, 20))
def test_no_limit_is_ever_exceeded(
    histogram: dict[int, int],
    cost: CostModel,
    replay_limit: int | None,
    memory: LadderLaw,
    memory_gib: float,
    time: LadderLaw,
    time_s: float,
) -> None:
    limits = Limits(12, memory_gib, time_s, memory, time)
    made = design(histogram, generate_prefill_buckets(512), cost, replay_limit, limits, sglang_version="", traffic="")
    assert len(made.ladder) <= 12
    assert _takes(memory, made.ladder) <= memory_gib + 1e-6
    assert _takes(time, made.ladder) <= time_s + 1e-6
    assert made.proposal.mean_cost <= made.no_graphs.mean_cost * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(histograms, costs, st.sampled_from([None, 2]), st.sampled_from([32, 512, 8192]))
def test_it_is_never_dearer_than_the_default_ladder(
    histogram: dict[int, int], cost: CostModel, replay_limit: int | None, ceiling: int
) -> None:
    default = generate_prefill_buckets(ceiling)
    limits = Limits(max_buckets=len(default))
    made = design(histogram, default, cost, replay_limit, limits, sglang_version="", traffic="")
    assert made.proposal.mean_cost <= made.default.mean_cost * (1 + 1e-9)
    assert made.gain >= -1e-9


@settings(max_examples=60, deadline=None)
@given(histograms, costs, st.sampled_from([None, 2]), st.sets(st.integers(1, 9000), max_size=20))
def test_a_report_adds_up(
    histogram: dict[int, int], cost: CostModel, replay_limit: int | None, ladder: set[int]
) -> None:
    one = cover(histogram, sorted(ladder), cost, replay_limit)
    assert one.prefills == sum(histogram.values())
    assert one.replayed + one.too_long + one.too_padded == one.prefills
    assert one.hit_rate + one.eager_share == pytest.approx(1)
    assert sum(use.prefills for use in one.uses) == one.replayed
    assert sum(use.bucket * use.prefills for use in one.uses) == sum(use.tokens + use.padded_tokens for use in one.uses)
    spent = _cost_of(sorted(ladder), histogram, cost, replay_limit)
    assert one.mean_cost * one.prefills == pytest.approx(spent, rel=1e-9)
    if replay_limit == 2:
        assert one.padded_tokens <= sum(use.tokens for use in one.uses)


@settings(deadline=None)
@given(histograms, st.integers(1, 64))
def test_candidates_hold_every_size(histogram: dict[int, int], step: int) -> None:
    candidates = candidate_buckets(histogram, [], step)
    assert all(bucket % step == 0 for bucket in candidates)
    assert all(any(size <= bucket < size + step for bucket in candidates) for size in histogram)


def test_many_sizes_are_thinned_and_the_design_says_so() -> None:
    histogram = {size: 8193 - size for size in range(1, 8193)}
    default = generate_prefill_buckets(8192)
    candidates = candidate_buckets(histogram, default, most=MAX_CANDIDATES)
    assert len(candidates) <= MAX_CANDIDATES
    assert set(default) <= set(candidates)
    made = design(histogram, default, SAVES, 2, Limits(max_buckets=58), sglang_version="", traffic="")
    assert not made.exact
    assert len(made.ladder) <= 58
    assert made.gain > 0


def test_who_gives_up_replays_is_told() -> None:
    """With few buckets for many long prefills padding costs more than a replay saves, by the assumed costs."""
    histogram = {size: 1 for size in range(1, 8193)}
    made = design(histogram, generate_prefill_buckets(8192), SAVES, 2, Limits(8), sglang_version="", traffic="")
    assert made.proposal.eager_share > made.default.eager_share + 0.5
    assert any("run eager that replay with the default ladder" in note for note in made.notes)


def test_a_sum_budget_holds_for_many_sizes() -> None:
    histogram = {size: 8193 - size for size in range(1, 8193, 3)}
    law = LadderLaw(Curve.line(0.5, 1e-4), 0.01, 1e-5, "drawn")
    limits = Limits(30, 1.0, None, law)
    made = design(histogram, generate_prefill_buckets(8192), SAVES, 2, limits, sglang_version="", traffic="")
    assert made.ladder
    assert _takes(law, made.ladder) <= 1.0
    assert made.proposal.memory_gib == pytest.approx(_takes(law, made.ladder))
    assert made.proposal.mean_cost < made.no_graphs.mean_cost


# --- laws and costs ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(0, 5), st.floats(0, 0.01), st.floats(0.001, 0.1))
def test_a_law_is_found_again_in_what_its_buckets_took(per_bucket: float, per_token: float, pool: float) -> None:
    ladder = [4096, 2048, 1024, 64, 8]
    took = [per_bucket + per_token * bucket for bucket in ladder]
    took[0] += pool * ladder[0]
    law = LadderLaw.from_steps(list(zip(ladder, took, strict=True)), "made up")
    assert law.of(ladder) == pytest.approx(sum(took), rel=1e-6)
    assert law.of(ladder[:3]) == pytest.approx(sum(took[:3]), rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8192), st.floats(-3, 50)), min_size=1, max_size=30))
def test_a_fitted_law_never_pays_back(steps: list[tuple[int, float]]) -> None:
    law = LadderLaw.from_steps(steps, "noise")
    assert law.per_bucket >= 0
    assert law.per_token >= 0
    assert law.of([8, 16]) >= law.of([16]) >= 0


@pytest.mark.parametrize("terms", [(-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0)])
def test_a_law_that_gives_back_is_refused(terms: tuple[float, float]) -> None:
    with pytest.raises(InvalidInput, match="cannot be used"):
        LadderLaw(Curve.line(0, 0), *terms, "wrong")


@pytest.mark.parametrize("knots", [(), ((1.0, 2.0), (1.0, 3.0)), ((2.0, 1.0), (1.0, 1.0))])
def test_what_is_no_curve_is_refused(knots: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(InvalidInput, match="no curve"):
        Curve(knots)


def test_a_check_overrules_the_terms() -> None:
    law = LadderLaw(Curve.line(0.0, 0.001), 0.0, 0.0, "fitted", check=lambda ladder: 0.002 * max(ladder))
    limits = Limits(memory_gib=1.0, memory=law)
    made = design({400: 1, 900: 1}, [], SAVES, 2, limits, sglang_version="", traffic="")
    assert made.ladder == (400,)
    assert made.proposal.memory_gib == pytest.approx(0.8)


class _Timed:
    def __init__(self, num_tokens: int, eager_ms: float, replay_ms: float) -> None:
        self.num_tokens, self.eager_ms, self.replay_ms = num_tokens, eager_ms, replay_ms


def test_measured_costs_are_met_at_their_buckets_and_go_on_beyond() -> None:
    cost = CostModel.from_speed([_Timed(512, 20.0, 14.0), _Timed(128, 16.0, 5.0), _Timed(256, 16.0, 8.0)], "a GPU")
    assert cost.unit == "ms"
    assert "a GPU" in cost.source
    assert [float(cost.replay.at(tokens)) for tokens in (128, 192, 512, 768)] == [5.0, 6.5, 14.0, 20.0]
    assert float(cost.eager.at(1)) == 16.0


def test_one_timed_bucket_says_nothing_about_others() -> None:
    with pytest.raises(InvalidInput, match="at least two"):
        CostModel.from_speed([_Timed(128, 16.0, 5.0)], "a GPU")


def test_assumed_costs_are_those_of_the_public_pairs() -> None:
    """Public PR wejoncy/sfllm#46: 129 in 160 take 16.613 ms eager and 5.685 replayed, 513 in 640 16.371 and 13.729."""
    cost = CostModel.assumed()
    for tokens, bucket, eager_ms, replay_ms in ((129, 160, 16.613, 5.685), (513, 640, 16.371, 13.729)):
        ratio = float(cost.replay.at(bucket)) / float(cost.eager.at(tokens))
        assert ratio == pytest.approx(replay_ms / eager_ms, abs=0.02)
    assert float(cost.eager.at(5000)) - float(cost.replay.at(5000)) == pytest.approx(250)


@pytest.mark.parametrize("wrong", [{"launch_tokens": -1}, {"replay_tokens": 1 << 30}, {"residual_share": -0.1}])
def test_assumptions_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="out of range"):
        CostModel.assumed(**wrong)


# --- limits and results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"memory_gib": 1.0}, {"time_s": 1.0}])
def test_a_budget_without_a_law_is_refused(asked: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="needs to know what a ladder takes"):
        Limits(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1.0, inf, float("nan")])
def test_a_budget_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(InvalidInput, match="budget"):
        Limits(memory_gib=value, memory=LadderLaw(Curve.line(0, 0), 0, 0, "x"))


def test_a_result_shows_itself() -> None:
    made = design({1: 40, 8: 60}, [4, 8], SAVES, 2, Limits(2), sglang_version="0.5.23", traffic="<two sizes>")
    assert made.ladder == (1, 8)
    assert "eager 0.00% of prefills instead of 40.00%" in repr(made)
    assert "&lt;two sizes&gt;" in made._repr_html_()
    assert made.frame.set_index("ladder").loc["default", "eager_share"] == pytest.approx(0.4)
    assert made.buckets_frame["prefills"].tolist() == [40, 60]
    assert made.server_flags() == ["--cuda-graph-max-bs-prefill", "8", "--cuda-graph-bs-prefill", "1", "8"]
    assert made.to_dict()["coverage"]["default"]["memory_gib"] is None
    assert made.frame["memory_gib"].isna().all()


@pytest.mark.parametrize("step", [0, -1, 1 << 30])
def test_a_step_out_of_range_is_refused(step: int) -> None:
    with pytest.raises(InvalidInput, match="step"):
        design({8: 1}, [8], SAVES, 2, Limits(), sglang_version="", traffic="", step=step)


def test_no_prefill_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no prefill"):
        design({}, [8], SAVES, 2, Limits(), sglang_version="", traffic="")
