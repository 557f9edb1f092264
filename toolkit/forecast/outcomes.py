"""What each policy would do with a server as planned. Pure decisions over numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.forecast.kv_last import KvLast
from toolkit.forecast.needs import ladder_needs
from toolkit.forecast.terms import Forecast
from toolkit.memory.rules import Resolution
from toolkit.policies import (
    Decision,
    OnOutOfMemory,
    Policy,
    PolicyFacts,
    get_policy,
    mib_or_gib,
    reserve_gib,
    starved_gib,
)
from toolkit.settings import Backend

GRAPH_RUNNER, EAGER_RUNNER = "PrefillCudaGraphRunner", "EagerRunner"


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What a policy leads to. `free_after_gib` is None where the server would not start.

    Attributes:
        runner: who serves prefill; None where the server would not start.
        outcome: captured, skipped or oom.
        code: stable word for the reason.
        reason: one sentence.
        captured_buckets: token counts, largest first.
        free_after_gib: GiB free when graphs and KV pool are in place.
        kv_cache_tokens: tokens of the KV pool; None where a measured run does not say.
        margin_gib: what the worst moment of the capture leaves by the middle of the forecast.
        tight: whether the upper bound of the need would not fit into the lower bound of what is free.
        log_line: a server's own line about it.
        oom_bucket: where memory runs out.
        trimmed: buckets that were asked for and get no graph.
        starved_gib: GiB that what comes after the capture lacks; 0 when it fits.
    """

    runner: str | None
    outcome: str
    code: str
    reason: str
    captured_buckets: tuple[int, ...]
    free_after_gib: float | None
    kv_cache_tokens: int | None
    margin_gib: float | None = None
    tight: bool = False
    log_line: str | None = None
    oom_bucket: int | None = None
    trimmed: tuple[int, ...] = ()
    starved_gib: float = 0.0

    @property
    def certain(self) -> bool | None:
        """Whether a capture that succeeds by the middle does so at both ends too; None where there is none."""
        return not self.tight if self.outcome == "captured" else None

    @property
    def lacks_gib(self) -> float | None:
        """GiB that what comes after the capture lacks; None where the server does not come so far."""
        return None if self.free_after_gib is None else self.starved_gib


@dataclass(frozen=True, slots=True)
class Situation:
    """The moment before the capture, on one rank, with a KV pool that was sized first.

    Attributes:
        free_gib: GiB free then.
        free_low_gib: lower bound of it.
        kv_cache_tokens: tokens of the KV pool.
        buckets: the ladder.
        resolved: what the release settles; None for the toolkit's own engine.
        backend: who captures.
        locked_keys: what was locked by hand.
        reserve_gib: what is to stay free; None is the default.
        later_gib: GiB that something needs after the capture.
        later_words: what that is.
        kv_last: of a KV pool that is sized after the capture instead.
    """

    free_gib: float
    free_low_gib: float
    kv_cache_tokens: int
    buckets: tuple[int, ...]
    resolved: Resolution | None
    backend: Backend
    locked_keys: frozenset[tuple[str, str]]
    kv_last: KvLast
    reserve_gib: float | None = None
    later_gib: float = 0.0
    later_words: str = ""


Ask = Callable[[tuple[int, ...]], Forecast]


def plan_policy(name: str, now: Situation, forecast: Ask) -> PolicyOutcome:
    """The outcome under the policy `name`; `forecast` is asked for the ladders it looks at."""
    if now.free_gib < 0:
        reason = f"weights, KV pool and static buffers exceed the device by {-now.free_gib:.2f} GiB: it would not start"
        return PolicyOutcome(None, "oom", "out_of_memory_before_capture", reason, (), None, now.kv_cache_tokens)
    if now.backend is Backend.DISABLED:
        return _judged(_eager(now, "disabled", disabled_reason(now.resolved)), now)
    policy = get_policy(name)
    if policy.kv_first and now.kv_cache_tokens < now.kv_last.first_tokens:
        return _no_kv(now)
    facts = policy_facts(policy, now, forecast)
    decision = policy.decide(facts)
    if not decision.capture:
        outcome = _eager(now, decision.code, decision.reason, decision.log_line, decision.trimmed)
    elif policy.kv_first:
        outcome = _captured(now, decision, forecast(decision.buckets))
    else:
        outcome = _kv_last(now, facts, decision, forecast(decision.buckets))
    return _judged(outcome, now)


def policy_facts(policy: Policy, now: Situation, forecast: Ask) -> PolicyFacts:
    """What a policy may look at in a plan; forecasts only where it looks at them."""
    facts = PolicyFacts(
        free_gib=now.free_gib,
        locked_keys=now.locked_keys,
        buckets=now.buckets,
        reserve_gib=reserve_gib(now.free_gib, now.reserve_gib),
        post_capture_gib=now.later_gib,
        kv_room_gib=now.kv_last.room_gib,
    )
    if not policy.foresees:
        return facts
    return dataclasses.replace(facts, needs=ladder_needs(forecast, now.buckets, facts.fits))


def _no_kv(now: Situation) -> PolicyOutcome:
    """A pool sized first that holds less than one full bucket: the same is asked of every policy.

    The toolkit's engine asks for it before it captures (`toolkit.prefill.build.NoMemoryForKV`), SGLang for one token.
    """
    tokens, first = now.kv_cache_tokens, now.kv_last.first_tokens
    reason = (
        f"the KV pool gets {tokens:,} tokens, less than one bucket of {first:,}: no prompt could fill it "
        "(SGLang itself asks for one token alone)"
    )
    return PolicyOutcome(None, "oom", "no_memory_for_kv", reason, (), None, tokens)


def disabled_reason(resolved: Resolution | None) -> str:
    """Why there is no prefill graph, from the rule that decided."""
    reasons = () if resolved is None else resolved.reasons
    rule = next((one for one in reasons if one.effect != "tc_piecewise" and one.standing == "decided"), None)
    return "the prefill graph was disabled by hand" if rule is None else f"disabled by the release: {rule.text}"


def _judged(outcome: PolicyOutcome, now: Situation) -> PolicyOutcome:
    """With the verdict on what comes after the capture."""
    lacking = starved_gib(outcome.free_after_gib, now.later_gib)
    if not lacking:
        return outcome
    words = f"what comes later ({now.later_words}) lacks {mib_or_gib(lacking)}"
    return dataclasses.replace(outcome, starved_gib=lacking, reason=f"{outcome.reason}; {words}")


def _eager(
    now: Situation, code: str, reason: str, log_line: str | None = None, trimmed: tuple[int, ...] = ()
) -> PolicyOutcome:
    return PolicyOutcome(
        EAGER_RUNNER,
        "skipped",
        code,
        reason,
        (),
        now.free_gib,
        now.kv_cache_tokens,
        log_line=log_line,
        trimmed=trimmed,
    )


def _captured(now: Situation, decision: Decision, forecast: Forecast) -> PolicyOutcome:
    free_mib, why = now.free_gib * 1024, decision.reason
    peak, margin = forecast.peak, (free_mib - forecast.peak.mid) / 1024
    span = "" if peak.low == peak.high else f" ({peak.low / 1024:.2f}-{peak.high / 1024:.2f})"
    need = f"the capture is forecast to need {mib_or_gib(peak.mid / 1024)}{span}"
    failed = next((bucket.num_tokens for bucket in forecast.buckets if bucket.peak.mid > free_mib), None)
    if failed is not None:
        reason = f"{why}; {need} with {mib_or_gib(now.free_gib)} free: out of memory at bucket {failed}"
        done = tuple(one.num_tokens for one in forecast.buckets if one.peak.mid <= free_mib)
        return PolicyOutcome(
            None, "oom", "out_of_memory", reason, done, None, now.kv_cache_tokens, margin, True, oom_bucket=failed
        )
    tight = peak.high > now.free_low_gib * 1024
    bounds = f"up to {peak.high / 1024:.2f} GiB against as little as {now.free_low_gib:.2f} GiB free"
    then = "it may run out of memory" if decision.on_oom is OnOutOfMemory.FAIL else "it may stop early or run eager"
    remark = f"; at the ends of both ranges it does not fit ({bounds}): {then}" if tight else ""
    return PolicyOutcome(
        runner=GRAPH_RUNNER,
        outcome="captured",
        code=decision.code,
        reason=f"{why}; {need}{remark}",
        captured_buckets=tuple(one.num_tokens for one in forecast.buckets),
        free_after_gib=now.free_gib - forecast.total.mid / 1024,
        kv_cache_tokens=now.kv_cache_tokens,
        margin_gib=margin,
        tight=tight,
        log_line=decision.log_line,
        trimmed=decision.trimmed,
    )


def _kv_last(now: Situation, facts: PolicyFacts, decision: Decision, forecast: Forecast) -> PolicyOutcome:
    """Graphs first: they have the room of the KV pool too, and the pool gets what they leave."""
    kv, first = now.kv_last, now.kv_last.first_tokens
    roomy = dataclasses.replace(
        now, free_gib=now.free_gib + kv.room_gib, free_low_gib=now.free_low_gib + kv.room_gib, kv_cache_tokens=first
    )
    outcome = _captured(roomy, decision, forecast)
    if outcome.free_after_gib is None:
        return outcome
    room = outcome.free_after_gib - facts.kept_gib
    if room < 0:
        left = f"{mib_or_gib(outcome.free_after_gib)} are left after it, {mib_or_gib(facts.kept_gib)} have to stay free"
        reason = f"{outcome.reason}; {left}: nothing for a KV pool beyond the {first:,} tokens of one full bucket"
        return dataclasses.replace(
            outcome, runner=None, outcome="oom", code="no_memory_for_kv", reason=reason, free_after_gib=None
        )
    tokens, before = max(first, kv.tokens(kv.backed_gib + room)), now.kv_cache_tokens
    after = outcome.free_after_gib + kv.backed_gib - kv.gib(tokens)
    change = f"{abs(tokens - before):,} {'more' if tokens >= before else 'fewer'} than if it came first"
    change = f"the KV pool gets {tokens:,} tokens, {change}"
    return dataclasses.replace(
        outcome, reason=f"{outcome.reason}; {change}", free_after_gib=after, kv_cache_tokens=tokens
    )
