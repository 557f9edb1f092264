"""What each policy would decide on the memory that really was free, as a log measured it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.forecast.kv_last import KvLast
from toolkit.forecast.needs import ladder_need, ladder_needs
from toolkit.forecast.outcomes import PolicyOutcome as Planned
from toolkit.forecast.outcomes import Situation, plan_policy
from toolkit.forecast.plan import forecaster, later_need
from toolkit.policies import get_policy, reserve_gib
from toolkit.serverlogs.findings.room import ForecastRoom
from toolkit.serverlogs.ledger import RankLedger

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan
    from toolkit.policies import LadderNeed


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What a policy would do with the measured free memory.

    `tight` is whether the forecast's range holds both: that the capture fits, and that it does not.
    """

    policy: str
    outcome: str
    runner: str | None
    reason: str
    free_after_gib: float | None
    tight: bool = False

    @property
    def words(self) -> str:
        """The outcome as a table shows it."""
        return f"{self.outcome}, uncertain" if self.tight else self.outcome


def verdicts(
    plan: Plan,
    free_gib: float,
    ledger: RankLedger,
    most_tokens: int | None,
    backend_named: bool,
    sized_last: bool = False,
) -> tuple[tuple[PolicyOutcome, ...], tuple[str, ...]]:
    """(what each policy would do, notes on those that cannot be judged).

    Free memory and KV pool are the measured ones: a policy that sizes the pool last is judged only where the log
    says how large the pool was, and that it was there before the capture (not `sized_last`): what was free then had
    it in already. `backend_named` is whether the server's own backend was chosen by hand.
    """
    ask = forecaster(plan.settings)
    later, words = later_need(plan.settings, plan.resolved)
    pool, tokens = ledger.kv_cache_gib, ledger.kv_cache_tokens
    now = Situation(
        free_gib=free_gib,
        free_low_gib=free_gib,
        # The server started with its pool: it was large enough.
        kv_cache_tokens=max(tokens or 0, max(plan.buckets, default=0)),
        buckets=plan.buckets,
        resolved=plan.resolved,
        backend=plan.backend,
        locked_keys=plan.settings.locked_keys if backend_named else frozenset(),
        later_gib=later,
        later_words=words,
        kv_last=_measured_pool(plan, pool or 0.0, tokens or 0, most_tokens),
    )
    judged, notes = [], []
    for name in plan.settings.policies:
        lacking = "this server itself sized its KV pool after the captures" if sized_last else ""
        lacking = lacking if pool and tokens else "the log does not say how large the KV pool was"
        if lacking and not get_policy(name).kv_first:
            notes.append(f"{name} is not judged: {lacking}")
            continue
        one = plan_policy(name, now, lambda buckets: ask(plan.model, plan.backend, buckets))
        judged.append(_judged(name, _remarked(one, plan, now, get_policy(name).kv_first)))
    return tuple(judged), tuple(notes)


def _measured_pool(plan: Plan, pool_gib: float, tokens: int, most_tokens: int | None) -> KvLast:
    """The pool of the log, had it been sized after the capture; `most_tokens` is what it was limited to."""
    token_gib = pool_gib / tokens if tokens else 1.0
    return KvLast.of(
        pool_gib,
        max(plan.buckets, default=0),
        tokens=lambda gib: min(int(gib / token_gib), most_tokens or 1 << 62),
        gib=lambda count: count * token_gib,
    )


def _judged(name: str, one: Planned) -> PolicyOutcome:
    return PolicyOutcome(name, one.outcome, one.runner, one.reason, one.free_after_gib, one.tight)


def _remarked(one: Planned, plan: Plan, now: Situation, kv_first: bool) -> Planned:
    """Out of memory by the middle of the forecast is uncertain where its lower end fits."""
    if one.code != "out_of_memory" or plan.forecast is None:
        return dataclasses.replace(one, tight=one.tight and one.outcome == "captured")
    low, room = plan.forecast.peak.low / 1024, now.free_gib + (0.0 if kv_first else now.kv_last.room_gib)
    if low > room:
        return dataclasses.replace(one, tight=False)
    remark = f"uncertain: at the lower end of the forecast ({low:.2f} GiB) it fits"
    return dataclasses.replace(one, tight=True, reason=f"{one.reason}; {remark}")


def forecast_room(startup: int, plan: Plan, free: float) -> ForecastRoom | None:
    """What fits, as the budgeted policy judges it beside: peak and reserve, and the graphs captured later."""
    if plan.forecast is None or ladder_need(plan.forecast) is None:
        return None
    ask, reserve = forecaster(plan.settings), reserve_gib(free, None)
    later, _ = later_need(plan.settings, plan.resolved)

    def fits(need: LadderNeed) -> bool:
        return max(need.peak_gib, need.total_gib + later) <= free - reserve

    needs = ladder_needs(lambda buckets: ask(plan.model, plan.backend, buckets), plan.buckets, fits)
    best = next(filter(fits, needs), None)
    peak = plan.forecast.peak
    return ForecastRoom(
        startup,
        free,
        peak.mid / 1024,
        peak.low / 1024,
        peak.high / 1024,
        plan.forecast.total.mid / 1024 + later,
        tuple(sorted(best.buckets)) if best is not None else (),
        best.peak_gib if best is not None else None,
        best is not None and len(best.buckets) == len(plan.buckets),
    )
