"""The largest fraction or ceiling that still leaves a reserve after capture: bisection over plans. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolkit.errors import InvalidInput
from toolkit.forecast.plan import Forecaster, Plan, forecaster, plan_with
from toolkit.forecast.plan_settings import PlanSettings
from toolkit.ladder import generate_prefill_buckets

THOUSANDTHS = 1000
"""Fractions are tried in steps of 0.001, as servers round theirs."""


def solve(settings: PlanSettings, what: str) -> Plan:
    """The plan with the largest `mem-fraction` or `max-tokens` that leaves the reserve at the worst moment.

    The reserve is `reserve_gib`, else the smaller of 0.5 GiB and 10 % of free. What counts is the least that is free
    by the middle of the forecast: at the peak of the prefill capture, or after the reserve for decode graphs.

    Raises:
        InvalidInput: there is no such value, or `what` is neither.
    """
    if what not in SOLVERS:
        raise InvalidInput(f"--solve {what!r} is unknown", ", ".join(SOLVERS), "for example --solve mem-fraction")
    return SOLVERS[what](settings, forecaster(settings))


def leaves_reserve(plan: Plan) -> bool:
    """Whether what is left at the worst moment is the reserve or more."""
    return plan.left_gib >= plan.reserve_gib


def last_that_holds(count: int, holds: Callable[[int], bool]) -> int | None:
    """The last of the positions 0 to count - 1 that holds, where all after one that does not hold fail too."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low if low >= 0 else None


def _fraction(settings: PlanSettings, ask: Forecaster) -> Plan:
    free = settings.with_changes(free_memory_gib=None)
    fractions = [step / THOUSANDTHS for step in range(1, THOUSANDTHS)]
    # Below the least fraction weights do not fit, above the largest the graphs do not: the first is found first.
    fits = last_that_holds(len(fractions), lambda at: _try(free, ask, mem_fraction=fractions[-1 - at]) is not None)
    if fits is None:
        plan_with(free.with_changes(mem_fraction=fractions[-1]), ask)  # says why
        raise AssertionError("a fraction both fits and does not")
    candidates = fractions[len(fractions) - 1 - fits :]
    best = last_that_holds(len(candidates), lambda at: _leaves(_try(free, ask, mem_fraction=candidates[at])))
    if best is None:
        raise _no_answer(plan_with(free.with_changes(mem_fraction=candidates[0]), ask), "mem-fraction")
    return plan_with(free.with_changes(mem_fraction=candidates[best]), ask)


def _ceiling(settings: PlanSettings, ask: Forecaster) -> Plan:
    whole = plan_with(settings.with_changes(buckets=None, max_tokens=None), ask)
    ceilings: Sequence[int] = generate_prefill_buckets(max(whole.resolved.prefill_ceiling, max(whole.buckets)))
    # With the fraction held: a given ceiling would else change what `auto` makes of it.
    fixed = settings.with_changes(buckets=None, max_tokens=None)
    if settings.free_memory_gib is None and whole.mem_fraction is not None:
        fixed = fixed.with_changes(mem_fraction=whole.mem_fraction)
    best = last_that_holds(len(ceilings), lambda at: _leaves(_try(fixed, ask, max_tokens=ceilings[at])))
    if best is None:
        raise _no_answer(plan_with(fixed.with_changes(max_tokens=ceilings[0]), ask), "max-tokens")
    return plan_with(fixed.with_changes(max_tokens=ceilings[best]), ask)


def _try(settings: PlanSettings, ask: Forecaster, **changes: float) -> Plan | None:
    try:
        return plan_with(settings.with_changes(**changes), ask)
    except InvalidInput:
        return None


def _leaves(plan: Plan | None) -> bool:
    return plan is not None and leaves_reserve(plan)


def _no_answer(least: Plan, what: str) -> InvalidInput:
    return InvalidInput(
        f"no {what} leaves {least.reserve_gib:.2f} GiB: even the smallest leaves {least.left_gib:.2f}",
        "left is the middle of the forecast at the fullest moment of the capture, or after the decode graphs' reserve",
        "take a larger GPU, raise --tp, lower --reserve or --max-tokens, or run without prefill graphs",
    )


SOLVERS: dict[str, Callable[[PlanSettings, Forecaster], Plan]] = {"mem-fraction": _fraction, "max-tokens": _ceiling}
"""What can be solved for, by its name on the command line."""
