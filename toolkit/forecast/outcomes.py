"""What each policy would do with a server as planned, and advice from it. Pure decisions over numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.forecast.terms import Forecast
from toolkit.memory.rules import Resolution
from toolkit.policies import PolicyFacts, get_policy
from toolkit.settings import Backend

GRAPH_RUNNER, EAGER_RUNNER = "PrefillCudaGraphRunner", "EagerRunner"
DEFAULT_RESERVE_GIB, DEFAULT_RESERVE_SHARE = 0.5, 0.1
"""What is kept free after the capture unless somebody says otherwise: the smaller of the two."""


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What a policy leads to. `free_after_gib` is None where the server would not start.

    `margin_gib` is what the worst moment of the capture leaves by the middle of the forecast, `tight` whether its
    upper bound would not fit into the lower bound of what is free.
    """

    runner: str | None
    outcome: str
    code: str
    reason: str
    captured_buckets: tuple[int, ...]
    free_after_gib: float | None
    kv_cache_tokens: int
    margin_gib: float | None = None
    tight: bool = False
    log_line: str | None = None
    oom_bucket: int | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """The moment before the capture, on one rank."""

    free_gib: float
    free_low_gib: float
    kv_cache_tokens: int
    buckets: tuple[int, ...]
    resolved: Resolution
    backend: Backend
    locked_keys: frozenset[tuple[str, str]]


def plan_policy(name: str, now: Situation, forecast: Callable[[tuple[int, ...]], Forecast]) -> PolicyOutcome:
    """The outcome under the policy `name`; `forecast` is asked for the buckets it decides to capture."""
    if now.free_gib < 0:
        reason = f"weights, KV pool and static buffers exceed the device by {-now.free_gib:.2f} GiB: it would not start"
        return PolicyOutcome(None, "oom", "out_of_memory_before_capture", reason, (), None, now.kv_cache_tokens)
    if now.backend is Backend.DISABLED:
        return _eager(now, "disabled", disabled_reason(now.resolved))
    decision = get_policy(name)(PolicyFacts(now.free_gib, now.locked_keys, now.buckets))
    if not decision.capture:
        return _eager(now, decision.code, decision.reason, decision.log_line)
    return _captured(now, decision.code, decision.reason, forecast(decision.buckets))


def disabled_reason(resolved: Resolution) -> str:
    """Why there is no prefill graph, from the rule that decided."""
    rule = next((one for one in resolved.reasons if one.effect != "tc_piecewise" and one.standing == "decided"), None)
    return "the prefill graph was disabled by hand" if rule is None else f"disabled by the release: {rule.text}"


def reserve_gib(free_gib: float, asked: float | None) -> float:
    """GiB to keep free after the capture: as asked, else the smaller of 0.5 and 10 % of what is free before it."""
    return asked if asked is not None else min(DEFAULT_RESERVE_GIB, DEFAULT_RESERVE_SHARE * max(free_gib, 0.0))


def _eager(now: Situation, code: str, reason: str, log_line: str | None = None) -> PolicyOutcome:
    return PolicyOutcome(
        EAGER_RUNNER, "skipped", code, reason, (), now.free_gib, now.kv_cache_tokens, log_line=log_line
    )


def _captured(now: Situation, code: str, why: str, forecast: Forecast) -> PolicyOutcome:
    free_mib = now.free_gib * 1024
    peak, margin = forecast.peak, (free_mib - forecast.peak.mid) / 1024
    need = f"the capture is forecast to need {peak.mid / 1024:.2f} GiB ({peak.low / 1024:.2f}-{peak.high / 1024:.2f})"
    failed = next((bucket.num_tokens for bucket in forecast.buckets if bucket.peak.mid > free_mib), None)
    if failed is not None:
        reason = f"{why}; {need} with {now.free_gib:.2f} GiB free: out of memory at bucket {failed}"
        done = tuple(one.num_tokens for one in forecast.buckets if one.peak.mid <= free_mib)
        return PolicyOutcome(
            None, "oom", "out_of_memory", reason, done, None, now.kv_cache_tokens, margin, True, oom_bucket=failed
        )
    tight = peak.high > now.free_low_gib * 1024
    bounds = f"up to {peak.high / 1024:.2f} GiB against as little as {now.free_low_gib:.2f} GiB free"
    remark = f"; at the ends of both ranges it does not fit ({bounds}): it may run out of memory" if tight else ""
    return PolicyOutcome(
        runner=GRAPH_RUNNER,
        outcome="captured",
        code=code,
        reason=f"{why}; {need}{remark}",
        captured_buckets=tuple(one.num_tokens for one in forecast.buckets),
        free_after_gib=now.free_gib - forecast.total.mid / 1024,
        kv_cache_tokens=now.kv_cache_tokens,
        margin_gib=margin,
        tight=tight,
    )
