"""The cheapest ladder for a traffic, by dynamic programming over the buckets it may have. Pure numbers.

The cost of a set of buckets splits between neighbours: the prefills with more tokens than bucket j and no more than
bucket k, the next one, go to k, and replay there unless k is over the replay limit for them. So the cheapest ladder of
q buckets that ends with k is the cheapest of q - 1 that ends with some j < k, plus that segment. Replay is not a
choice: where the server's rule allows it, it happens, even if eager would be cheaper.

Budgets have a max-term, a count-term and a sum-term. The first two are known for every pair (q, k), so they only rule
out ends. A sum-term makes it a knapsack: then each (q, k) keeps every ladder that is not beaten in both sum and cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from toolkit.ladder_models import CostModel, LadderLaw

_LABELS = 100_000
"""Ladders kept per (q, k) times candidates squared, at least `_FEWEST_LABELS`; never reached by 12 candidates."""
_FEWEST_LABELS = 32
_EPSILON = 1e-9
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Budget:
    """A limit on what a law says of the ladder, in the law's unit."""

    law: LadderLaw
    limit: float


@dataclass(frozen=True)
class Solution:
    """The ladder, its total cost, and whether no other set of the candidates can be cheaper within the limits."""

    ladder: tuple[int, ...]
    cost: float
    exact: bool


@dataclass(frozen=True)
class _Problem:
    """`segment[j, k]`: cost of the prefills between j and k; row 0 of it is `no bucket below`. `tail`: above k."""

    candidates: Integers
    segment: Floats
    tail: Floats
    eager: float
    most: int
    budgets: tuple[Budget, ...]


def solve(
    candidates: Sequence[int],
    histogram: Mapping[int, int],
    cost: CostModel,
    replay_limit: int | None,
    max_buckets: int | None = None,
    budgets: Sequence[Budget] = (),
    required: Sequence[int] = (),
) -> Solution:
    """The cheapest ladder made of `candidates` and `required`; empty where that is cheapest or nothing else fits.

    Of two ladders that cost the same, the one with fewer buckets. Every bucket of `required` is in the ladder; where
    no such ladder fits, it is empty.
    """
    buckets = np.array(sorted({*candidates, *required}), dtype=np.int64)
    most = len(buckets) if max_buckets is None else min(max_buckets, len(buckets))
    problem = _problem(buckets, histogram, cost, replay_limit, most, tuple(budgets), sorted(required))
    if not len(buckets) or most < 1:
        return Solution((), problem.eager, True)
    if any(budget.law.per_token > 0 for budget in problem.budgets):
        return _with_sums(problem)
    return _by_count(problem)


def _problem(
    buckets: Integers,
    histogram: Mapping[int, int],
    cost: CostModel,
    replay_limit: int | None,
    most: int,
    budgets: tuple[Budget, ...],
    required: Sequence[int],
) -> _Problem:
    tokens = np.array(sorted(histogram), dtype=np.int64)
    weights = np.array([histogram[one] for one in tokens.tolist()], dtype=np.float64)
    count = np.concatenate([[0.0], np.cumsum(weights)])
    eager = np.concatenate([[0.0], np.cumsum(weights * cost.eager.at(tokens))])
    upto = np.searchsorted(tokens, buckets, side="right")  # lengths that fit into each bucket
    limited = tokens * replay_limit if replay_limit is not None else np.full_like(tokens, np.iinfo(np.int64).max)
    refused = np.searchsorted(limited, buckets, side="left")  # lengths too short for it
    below = np.concatenate([[0], upto])[:, None]
    replay_from = np.maximum(below, np.minimum(refused, upto)[None, :])
    segment = cost.replay.at(buckets)[None, :] * (count[upto][None, :] - count[replay_from])
    segment = segment + eager[replay_from] - eager[below]
    rows, columns = np.indices(segment.shape)
    # Who goes from one bucket to another, or ends, must not leave out one that is required.
    passed = np.searchsorted(required, buckets)  # required ones below each bucket
    reached = np.concatenate([[0], np.searchsorted(required, buckets, side="right")])
    segment[(rows > columns) | (reached[:, None] < passed[None, :])] = inf
    tail = np.where(reached[1:] == len(required), eager[-1] - eager[upto], inf)
    return _Problem(buckets, segment, tail, inf if required else float(eager[-1]), most, budgets)


def _room(problem: _Problem, count: int) -> Floats:
    """For ladders of `count` buckets, by their last: the largest sum of tokens that keeps every budget; -inf: none."""
    room = np.full(len(problem.candidates), inf)
    for budget in problem.budgets:
        left = budget.limit - budget.law.largest.at(problem.candidates) - budget.law.per_bucket * count
        if budget.law.per_token > 0:
            room = np.minimum(room, np.where(left >= 0, left / budget.law.per_token, -inf))
        else:
            room = np.where(left >= 0, room, -inf)
    return room


class _Best:
    """The cheapest end so far; a dearer number of buckets must be worth it."""

    def __init__(self, cost: float) -> None:
        self.cost, self.end = cost, (0, -1, -1)

    def offer(self, cost: float, end: tuple[int, int, int]) -> None:
        if cost + _EPSILON * max(1.0, abs(cost)) < self.cost:
            self.cost, self.end = cost, end


def _by_count(problem: _Problem) -> Solution:
    """Exact: count and last bucket are all that a budget without a sum-term sees."""
    best, parents = _Best(problem.eager), []
    reach = problem.segment[0]
    for count in range(1, problem.most + 1):
        if count > 1:
            ways = reach[:, None] + problem.segment[1:]
            parent = ways.argmin(axis=0)
            parents.append(parent)
            reach = ways[parent, np.arange(len(parent))]
        total = np.where(_room(problem, count) > -inf, reach + problem.tail, inf)
        last = int(total.argmin())
        best.offer(float(total[last]), (count, last, -1))
    count, last, _ = best.end
    ladder: list[int] = []
    while count > 0:
        ladder.append(int(problem.candidates[last]))
        last = int(parents[count - 2][last]) if count > 1 else -1
        count -= 1
    return Solution(tuple(reversed(ladder)), best.cost, True)


@dataclass(frozen=True)
class _Labels:
    """Ladders of one count: sum of tokens, cost, last bucket, and the label of the ladder without that bucket."""

    sums: Floats
    costs: Floats
    last: Integers
    parent: Integers


def _with_sums(problem: _Problem) -> Solution:
    """Exact until a (q, k) holds more ladders than are kept; then still within every budget, which sums decide."""
    size = len(problem.candidates)
    keep = max(_FEWEST_LABELS, _LABELS // size**2)
    best, levels, exact = _Best(problem.eager), [], True
    previous: _Labels | None = None
    for count in range(1, problem.most + 1):
        room = _room(problem, count)
        parts: list[_Labels] = []
        for last in range(size):
            label = _extend(problem, previous, last)
            # A longer ladder has less room, so what is over the most there is can be dropped for good.
            label = _undominated(label, float(room[last:].max()))
            if len(label.sums) > keep:
                exact, label = False, _thin(label, keep)
            parts.append(label)
        previous = _join(parts)
        if not len(previous.sums):
            break
        levels.append(previous)
        total = np.where(previous.sums <= room[previous.last], previous.costs + problem.tail[previous.last], inf)
        cheapest = int(total.argmin())
        best.offer(float(total[cheapest]), (count, cheapest, -1))
    count, label_number, _ = best.end
    ladder: list[int] = []
    while count > 0:
        level = levels[count - 1]
        ladder.append(int(problem.candidates[level.last[label_number]]))
        label_number = int(level.parent[label_number])
        count -= 1
    return Solution(tuple(reversed(ladder)), best.cost, exact)


def _extend(problem: _Problem, previous: _Labels | None, last: int) -> _Labels:
    """Every kept ladder with a smaller last bucket, and `last` added to it."""
    tokens = float(problem.candidates[last])
    if previous is None:
        one = np.array([problem.segment[0, last]])
        return _Labels(np.array([tokens]), one, np.array([last]), np.array([-1]))
    until = int(np.searchsorted(previous.last, last))  # labels are in order of their last bucket
    costs = previous.costs[:until] + problem.segment[previous.last[:until] + 1, last]
    return _Labels(previous.sums[:until] + tokens, costs, np.full(until, last), np.arange(until))


def _undominated(label: _Labels, room: float) -> _Labels:
    """Without those over `room`, and without those that another beats in sum and cost."""
    order = np.lexsort((label.costs, label.sums))
    order = order[label.sums[order] <= room]
    costs = label.costs[order]
    cheapest_before = np.concatenate([[inf], np.minimum.accumulate(costs)[:-1]]) if len(order) else costs
    order = order[costs < cheapest_before]
    return _Labels(label.sums[order], label.costs[order], label.last[order], label.parent[order])


def _thin(label: _Labels, keep: int) -> _Labels:
    """Evenly spaced, the smallest sum and the lowest cost included."""
    chosen = np.unique(np.linspace(0, len(label.sums) - 1, keep).round().astype(np.int64))
    return _Labels(label.sums[chosen], label.costs[chosen], label.last[chosen], label.parent[chosen])


def _join(parts: Sequence[_Labels]) -> _Labels:
    names = ("sums", "costs", "last", "parent")
    return _Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
