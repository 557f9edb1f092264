"""The largest fraction or ceiling that still leaves a reserve after capture: bisection over plans. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.errors import InvalidInput
from toolkit.forecast.plan import Forecaster, Plan, forecaster, plan_with
from toolkit.forecast.plan_settings import PlanSettings
from toolkit.forecast.server_flags import name_backend
from toolkit.ladder import generate_prefill_buckets
from toolkit.policies import should_skip_auto_prefill_cuda_graph_for_memory
from toolkit.settings import Backend

THOUSANDTHS = 1000
"""Fractions are tried in steps of 0.001, as servers round theirs."""
Holds = Callable[[Plan], bool]


@dataclass(frozen=True)
class Solution:
    """An answer, and what it would be without the old gate.

    Attributes:
        what: `mem-fraction` or `max-tokens`.
        plan: the plan at the answer.
        without_gate: the plan at the answer of a server whose backend is named, so that no gate is asked; the same
            plan where the gate changes nothing.
    """

    what: str
    plan: Plan
    without_gate: Plan

    @property
    def value(self) -> float | int:
        """The answer: a fraction, or tokens."""
        return self._value(self.plan)

    def _value(self, plan: Plan) -> float | int:
        return plan.mem_fraction or 0.0 if self.what == "mem-fraction" else max(plan.buckets)

    @property
    def words(self) -> str:
        """The answer with what it leaves at the capture's peak and in the end, then what the gate makes of it."""
        plan = self.plan
        later = _taken_later(plan)
        end = f"{plan.left_in_the_end_gib:.2f} GiB in the end" + (f", after {later}" if later else "")
        peak = f"{plan.left_at_peak_gib:.2f} GiB stay free at the capture's peak"
        left = f"by the middle of the forecast {peak} and {end}; reserve {plan.reserve_gib:.2f} GiB"
        return f"largest {self.what}: {self.value} ({left})"

    @property
    def gate_words(self) -> str | None:
        """What the old gate has to do with the answer; None where it changes nothing."""
        other, plan = self.without_gate, self.plan
        if plan.release.gate_gib is None:
            return None
        gate = f"the gate of SGLang {plan.release.version} asks for {plan.release.gate_gib:.2f} GiB before the capture"
        named = f"with the backend named ({name_backend(plan.backend)}) it is not asked"
        if stopped_by_gate(plan):
            free = f"{plan.free_before_gib:.2f} GiB are free whatever the {self.what}"
            return f"{gate} and {free}, so nothing is captured; {named}"
        if other is plan:
            return None
        free = f"{plan.free_before_gib:.2f} GiB are free at {self.value}, {other.free_before_gib:.2f}"
        return f"{gate}: {free} at {self._value(other)}, which the reserve alone allows; {named}"

    def to_dict(self) -> dict[str, object]:
        """What `prefill-lab plan --solve ... --json` prints as `solved`."""
        return {
            "what": self.what,
            "value": self.value,
            "without_gate": self._value(self.without_gate),
            "stopped_by_gate": stopped_by_gate(self.plan),
        }


def solve(settings: PlanSettings, what: str) -> Plan:
    """The plan of `solution`. Raises InvalidInput as it does."""
    return solution(settings, what).plan


def solution(settings: PlanSettings, what: str) -> Solution:
    """The largest `mem-fraction` or `max-tokens` that leaves the reserve at the worst moment, and passes the gate.

    The reserve is `reserve_gib`, else the smaller of 0.5 GiB and 10 % of free. What counts is the least that is free
    by the middle of the forecast: at the peak of the prefill capture, or when decode graphs and what is declared to be
    needed later have their memory too. The KV pool holds one full bucket of tokens at least. The gate counts where the
    release has one and nobody named the backend; where no value passes it, the answer is the one without it.

    Raises:
        InvalidInput: there is no such value, `what` is neither, or it is given besides (a ladder gives a ceiling).
    """
    if what not in SOLVERS:
        raise InvalidInput(f"--solve {what!r} is unknown", ", ".join(SOLVERS), "for example --solve mem-fraction")
    _refuse_given(settings, what)
    solver, ask = SOLVERS[what], forecaster(settings)
    free = solver(settings, ask, leaves_reserve)
    if isinstance(free, InvalidInput):
        raise free
    if not stopped_by_gate(free):
        return Solution(what, free, free)
    passing = solver(settings, ask, lambda plan: leaves_reserve(plan) and not stopped_by_gate(plan))
    return Solution(what, free if isinstance(passing, InvalidInput) else passing, free)


def _refuse_given(settings: PlanSettings, what: str) -> None:
    """A ladder that is given cannot be sought as well: it would be dropped without a word."""
    given = {"--buckets": settings.buckets, "--max-tokens": settings.max_tokens}
    for option, value in given.items():
        if what == "max-tokens" and value is not None:
            raise InvalidInput(
                f"--solve max-tokens looks for what {option} gives", "one of the two", f"leave out --solve or {option}"
            )


def passing_fraction(settings: PlanSettings, ask: Forecaster) -> Plan | None:
    """The plan at the largest fraction that works, by the gate too where one passes it; None where none works.

    Whatever gives the memory is left out. Works means what it does for `solution`.
    """
    free = settings.with_changes(mem_fraction="auto", free_memory_gib=None)
    try:
        found = _fraction(free, ask, leaves_reserve)
        if isinstance(found, Plan) and stopped_by_gate(found):
            passing = _fraction(free, ask, lambda plan: leaves_reserve(plan) and not stopped_by_gate(plan))
            found = passing if isinstance(passing, Plan) else found
    except InvalidInput:
        return None
    return found if isinstance(found, Plan) else None


def shorter_ladder(plan: Plan, ask: Forecaster) -> Plan | None:
    """The plan with the longest ladder, without its largest buckets, that works where memory stays as it is."""
    ladder, settings = sorted(plan.buckets), plan.settings
    if plan.mem_fraction is not None:
        settings = settings.with_changes(mem_fraction=plan.mem_fraction)

    def kept(count: int) -> PlanSettings:
        given = {"buckets": tuple(ladder[:count])} if settings.buckets else {"max_tokens": ladder[count - 1]}
        return settings.with_changes(**given)

    def works(at: int) -> bool:
        return _holds(_try(kept(at + 1), ask), lambda one: leaves_reserve(one) and one.holds_bucket)

    best = last_that_holds(len(ladder) - 1, works)
    return None if best is None else plan_with(kept(best + 1), ask)


def _taken_later(plan: Plan) -> str:
    """What the ledger takes between the prefill graphs and the end, in words; empty for nothing."""
    lines = (line for line in plan.lines if line.key in ("decode_graph", "declared") and line.gib)
    return " and ".join(f"{line.name} {line.gib:.2f} GiB" for line in lines)


def leaves_reserve(plan: Plan) -> bool:
    """Whether what is left at the worst moment is the reserve or more."""
    return plan.left_gib >= plan.reserve_gib


def stopped_by_gate(plan: Plan) -> bool:
    """Whether the release planned for has the old gate and would skip this capture."""
    if plan.release.gate_gib is None or plan.forecast is None:
        return False
    return should_skip_auto_prefill_cuda_graph_for_memory(plan.free_before_gib, plan.settings.locked_keys)


def last_that_holds(count: int, holds: Callable[[int], bool]) -> int | None:
    """The last of the positions 0 to count - 1 that holds, where all after one that does not hold fail too."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low if low >= 0 else None


def _fraction(settings: PlanSettings, ask: Forecaster, holds: Holds) -> Plan | InvalidInput:
    free = settings.with_changes(free_memory_gib=None)
    fractions = [step / THOUSANDTHS for step in range(1, THOUSANDTHS)]
    # Below the least fraction weights leave no KV pool, above the largest the graphs do not fit: first the least.
    fits = last_that_holds(
        len(fractions),
        lambda at: _holds(_try(free, ask, mem_fraction=fractions[-1 - at]), lambda one: one.holds_bucket),
    )
    if fits is None:
        return _no_pool(plan_with(free.with_changes(mem_fraction=fractions[-1]), ask))  # or that says why
    candidates = fractions[len(fractions) - 1 - fits :]
    best = last_that_holds(len(candidates), lambda at: _holds(_try(free, ask, mem_fraction=candidates[at]), holds))
    if best is None:
        return _no_answer(plan_with(free.with_changes(mem_fraction=candidates[0]), ask), "mem-fraction")
    return plan_with(free.with_changes(mem_fraction=candidates[best]), ask)


def _ceiling(settings: PlanSettings, ask: Forecaster, holds: Holds) -> Plan | InvalidInput:
    whole = plan_with(settings.with_changes(buckets=None, max_tokens=None), ask)
    if whole.backend is Backend.DISABLED:
        return InvalidInput("no max-tokens is to be found", "a backend that captures", whole.summary)
    ceilings: Sequence[int] = generate_prefill_buckets(max(whole.resolved.prefill_ceiling, max(whole.buckets)))
    # With the fraction held: a given ceiling would else change what `auto` makes of it.
    fixed = settings.with_changes(buckets=None, max_tokens=None)
    if settings.free_memory_gib is None and whole.mem_fraction is not None:
        fixed = fixed.with_changes(mem_fraction=whole.mem_fraction)

    def works(plan: Plan) -> bool:
        return holds(plan) and plan.holds_bucket

    best = last_that_holds(len(ceilings), lambda at: _holds(_try(fixed, ask, max_tokens=ceilings[at]), works))
    if best is None:
        return _no_answer(plan_with(fixed.with_changes(max_tokens=ceilings[0]), ask), "max-tokens")
    return plan_with(fixed.with_changes(max_tokens=ceilings[best]), ask)


def _try(settings: PlanSettings, ask: Forecaster, **changes: float) -> Plan | None:
    try:
        return plan_with(settings.with_changes(policy="ungated", **changes), ask)  # what is tried asks for no policy
    except InvalidInput:
        return None


def _holds(plan: Plan | None, holds: Holds) -> bool:
    return plan is not None and holds(plan)


def _no_pool(most: Plan) -> InvalidInput:
    tokens, bucket = most.ledger.kv_cache_tokens, most.kv_last.first_tokens
    return InvalidInput(
        f"no fraction leaves a KV pool of one bucket of {bucket:,} tokens: the largest leaves {tokens:,}",
        "a fraction whose KV pool a prompt can fill",
        "raise --tp, take smaller weights (--weights fp8 or int4), a larger GPU or a lower --max-tokens",
    )


def _no_answer(least: Plan, what: str) -> InvalidInput:
    if not least.holds_bucket:
        return _no_pool(least)
    pool = f" with {least.kv_last.first_tokens:,} KV tokens for one bucket" if what == "mem-fraction" else ""
    return InvalidInput(
        f"no {what} leaves {least.reserve_gib:.2f} GiB: even the smallest{pool} leaves {least.left_gib:.2f}",
        "left is the middle of the forecast at the fullest moment: of the capture, or after it"
        + (f" with {_taken_later(least)}" if _taken_later(least) else ""),
        "take a larger GPU, raise --tp, lower --reserve or --max-tokens, or run without prefill graphs",
    )


Solver = Callable[[PlanSettings, Forecaster, Holds], Plan | InvalidInput]
SOLVERS: dict[str, Solver] = {"mem-fraction": _fraction, "max-tokens": _ceiling}
"""What can be solved for, by its name on the command line."""
