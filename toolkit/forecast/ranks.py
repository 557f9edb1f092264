"""One decision for all ranks: what each would decide alone, and what is decided on the one with the least free memory.

Ranks of one server differ in free memory (2.05 to 2.28 GiB on eight ranks, public PR sgl-project/sglang#31204). Each
warm-up and each capture runs collectives, so ranks that capture different ladders wait for each other for ever. What
fits the smallest rank fits all, as long as they need the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput
from toolkit.forecast.needs import ladder_needs
from toolkit.forecast.outcomes import Ask
from toolkit.forecast.plan import Plan, forecaster, later_need
from toolkit.forecast.plan_settings import chosen_policies
from toolkit.forecast.terms import Forecast
from toolkit.policies import Decision, Policy, PolicyFacts, get_policy, reserve_gib, same_on_all_ranks
from toolkit.settings import Backend

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class PolicyOnRanks:
    """One policy on every rank.

    Attributes:
        policy: its name.
        free_gib: GiB free on each rank.
        alone: what each would decide by itself.
        together: what is decided for all.
        smallest: index of the rank it was decided on.
    """

    policy: str
    free_gib: tuple[float, ...]
    alone: tuple[Decision, ...]
    together: Decision
    smallest: int

    @property
    def would_hang(self) -> bool:
        """Whether ranks that decide alone would capture different ladders and wait for each other."""
        return len({self._ladder(one) for one in self.alone}) > 1

    @staticmethod
    def _ladder(decision: Decision) -> tuple[int, ...]:
        return decision.buckets if decision.capture else ()


@dataclass(frozen=True)
class RankDecision:
    """Every policy on the ranks of one server; `frame` is the table of it."""

    plan: Plan
    free_gib: tuple[float, ...]
    policies: dict[str, PolicyOnRanks]

    @property
    def would_hang(self) -> tuple[str, ...]:
        """Policies under which ranks that decide alone would wait for each other."""
        return tuple(name for name, one in self.policies.items() if one.would_hang)

    @property
    def note(self) -> str:
        """That the figures are not those of all ranks of the plan, in words; empty where they are."""
        ranks, planned = len(self.free_gib), self.plan.settings.tp
        return "" if ranks == planned else f"figures of {ranks} for the {planned} of the plan (tp {planned})"

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per policy and rank: GiB free, code and number of buckets decided alone and for all.

        `decides` marks the rank with the least free memory, `alone_would_hang` the policies whose ranks differ.
        """
        import pandas as pd

        rows = [
            {
                "policy": name,
                "rank": rank,
                "free_gib": one.free_gib[rank],
                "alone": alone.code,
                "alone_buckets": len(alone.buckets),
                "for_all": one.together.code,
                "for_all_buckets": len(one.together.buckets),
                "decides": rank == one.smallest,
                "alone_would_hang": one.would_hang,
            }
            for name, one in self.policies.items()
            for rank, alone in enumerate(one.alone)
        ]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        free = f"{min(self.free_gib):.2f} to {max(self.free_gib):.2f} GiB free on {len(self.free_gib)} ranks"
        free += f" ({self.note})" if self.note else ""
        said = ", ".join(f"{name}: {one.together.code}" for name, one in self.policies.items())
        differ = ", ".join(self.would_hang) or "none"
        return f"<RankDecision {self.plan.model.id}, {free}; for all: {said}; alone they would differ under: {differ}>"

    def _repr_html_(self) -> str:
        from toolkit.forecast.plan_page import ranks_html

        return ranks_html(self)


def decide_on_ranks(
    plan: Plan, free_gib: Sequence[float] | Mapping[int, float], policies: str | Sequence[str] | None = None
) -> RankDecision:
    """What each rank of a planned server would decide alone, and what is decided for all.

    Args:
        plan: the server; its ladder, reserve and needs are those of every rank.
        free_gib: GiB free before the capture, rank by rank; or a mapping of ranks, numbered from 0, to theirs. Another
            number of them than the plan's tp is said.
        policies: names; None takes those of the plan.

    Raises:
        InvalidInput: no rank, something that is no number, less than no memory, or a plan without prefill graphs.
    """
    if not isinstance(plan, Plan):
        raise InvalidInput(f"{type(plan).__name__} is no plan", "a plan of toolkit.plan()")
    free = _free(free_gib)
    if plan.backend is Backend.DISABLED:
        raise InvalidInput("no prefill graph is planned", "a plan whose backend captures", "see plan.summary")
    forecast = forecaster(plan.settings)

    def ask(buckets: tuple[int, ...]) -> Forecast:
        return forecast(plan.model, plan.backend, buckets)

    found = {}
    for name in tuple(plan.policies) if policies is None else chosen_policies(policies):
        policy = get_policy(name)
        facts = [_facts(plan, policy, gib, ask) for gib in free]
        together, alone, smallest = same_on_all_ranks(policy, facts)
        found[name] = PolicyOnRanks(name, free, alone, together, smallest)
    return RankDecision(plan, free, found)


def _free(given: Any) -> tuple[float, ...]:
    """GiB of every rank, in order. Raises InvalidInput for anything that is not a finite number of 0 or more."""
    problem = InvalidInput("the ranks' free memory is not known", "GiB of at least one rank, 0 or more", "(2.05, 2.28)")
    if isinstance(given, Mapping):
        if sorted(given, key=repr) != sorted(range(len(given)), key=repr):
            raise problem
        given = [given[rank] for rank in range(len(given))]
    if isinstance(given, (str, bytes, Set)):  # a set has no order
        raise problem
    try:
        figures = list(given)
        if any(isinstance(one, (str, bytes)) or type(one).__name__ in ("bool", "bool_") for one in figures):
            raise problem
        free = tuple(float(gib) for gib in figures)
    except (TypeError, ValueError, OverflowError):
        raise problem from None
    if not free or not all(math.isfinite(gib) and gib >= 0 for gib in free):
        raise problem
    return free


def between(low_gib: float, high_gib: float, ranks: int) -> tuple[float, ...]:
    """Figures for `ranks` ranks where only the least and the most are published: the rest lie evenly between.

    The ends are facts then, the others are made up to stand for ranks that nobody listed.
    """
    if ranks < 2:
        return (low_gib,)
    return tuple(low_gib + (high_gib - low_gib) * rank / (ranks - 1) for rank in range(ranks))


def _facts(plan: Plan, policy: Policy, free_gib: float, ask: Ask) -> PolicyFacts:
    facts = PolicyFacts(
        free_gib=free_gib,
        locked_keys=plan.settings.locked_keys,
        buckets=plan.buckets,
        reserve_gib=reserve_gib(free_gib, plan.settings.reserve_gib),
        post_capture_gib=later_need(plan.settings, plan.resolved)[0],
        kv_room_gib=plan.kv_last.room_gib,
    )
    if not policy.foresees:
        return facts
    return dataclasses.replace(facts, needs=ladder_needs(ask, plan.buckets, facts.fits))
