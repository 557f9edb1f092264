"""What each policy would do with the settings as they are picked. Pure: numbers and forecasts in, words out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from toolkit.forecast.before_capture import BeforeCapture
from toolkit.forecast.outcomes import PolicyOutcome, Situation, plan_policy
from toolkit.forecast.terms import Forecast
from toolkit.policies import MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB as GATE_GIB
from toolkit.policies import POLICIES, Policy, PolicyFacts, mib_or_gib, reserve_gib
from toolkit.settings import Backend, CaptureSettings

EDGE_GIB = 0.1
"""A forecast this little above the gate does not tell on which side the measured figure will lie."""
PENDING = "n/a until the forecast is there"
Kind = Literal["captured", "trimmed", "skipped", "oom", "unknown"]
_PHRASES: dict[Kind, str] = {
    "captured": "captures",
    "trimmed": "trims, and captures the rest",
    "skipped": "skips, and prefill runs eager",
    "oom": "runs out of memory (forecast)",
    "unknown": "n/a",
}
_NO_START = {"out_of_memory_before_capture": "does not start", "no_memory_for_kv": "no memory for KV"}


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What one policy would do.

    Attributes:
        policy: its name.
        kind: the outcome in a word that is always the same.
        short: the outcome in a few words, for a table.
        words: the outcome and its reason, a sentence.
        reason: the reason alone.
        kv_tokens: forecast tokens of the KV pool; None where they are not known.
        kv_change: tokens more than with a pool that is sized first; None where they are not known.
        trimmed: buckets that were asked for and would get no graph.
        starved_gib: GiB that a declared later need would lack.
    """

    policy: str
    kind: Kind
    short: str
    words: str
    reason: str
    kv_tokens: int | None = None
    kv_change: int | None = None
    trimmed: tuple[int, ...] = ()
    starved_gib: float = 0.0

    @property
    def skips(self) -> bool | None:
        """Whether the policy skips the capture; None where that is not known."""
        return None if self.kind == "unknown" else self.kind == "skipped"


@dataclass(frozen=True, slots=True)
class Foresight:
    """The forecast of the toolkit's own engine for one choice. Without `ask` there is none: `problem` says why.

    Attributes:
        ask: the forecast of a ladder.
        buckets: what the engine's guards leave of the ladder.
        before: the device before the capture, with what is known of it; None where there is no forecast.
        problem: why there is no forecast.
        no_start: why no capture would begin under any policy.
        blocked: why nothing is captured under any policy: a guard's reason.
        unforeseen: whether a run could not make a forecast either, so that a policy decides without.
    """

    ask: Callable[[tuple[int, ...]], Forecast] | None = None
    buckets: tuple[int, ...] = ()
    before: BeforeCapture | None = None
    problem: str = ""
    no_start: str = ""
    blocked: str = ""
    unforeseen: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment before the capture as far as the controls tell. `exact` is whether the free memory is what it will be:
    asked for, or of the accounted CPU device and forecast. `asked` is whether it was asked for.
    """

    settings: CaptureSettings
    buckets: tuple[int, ...]
    free_gib: float | None
    asked: bool
    exact: bool

    @property
    def reserve(self) -> float:
        """GiB to keep free."""
        return reserve_gib(self.free_gib or 0.0, self.settings.reserve_gib)


def verdicts(now: Moment, foresight: Foresight | None) -> dict[str, Foreseen]:
    """One verdict a policy, by its name; `foresight` is None until it is made."""
    return {name: _verdict(policy, now, foresight) for name, policy in POLICIES.items()}


def _verdict(policy: Policy, now: Moment, foresight: Foresight | None) -> Foreseen:
    if now.settings.backend is Backend.DISABLED:
        reason = "the prefill graph is disabled by hand"
        return Foreseen(policy.name, "skipped", "skips", f"skips: {reason}", reason)
    if now.free_gib is None or not now.buckets:
        return _unknown(policy, "there is no free memory before the capture, or it is not known")
    if foresight is not None and foresight.no_start:
        reason = foresight.no_start
        return Foreseen(policy.name, "oom", "does not start", f"does not start (forecast): {reason}", reason)
    if foresight is not None and foresight.blocked:
        return _said(policy, "skipped", "skips", foresight.blocked)
    if foresight is not None and foresight.ask is not None:
        return _foreseen(policy, now, now.free_gib, foresight)
    return _unforeseen(policy, now, now.free_gib, foresight)


def _unforeseen(policy: Policy, now: Moment, free_gib: float, foresight: Foresight | None) -> Foreseen:
    """What can be told without a forecast: all of it for a policy that looks at none, but for what it needs."""
    if policy.foresees and (foresight is None or not foresight.unforeseen):
        problem = PENDING if foresight is None else f"n/a: {foresight.problem}"
        return Foreseen(policy.name, "unknown", "n/a", problem, problem.removeprefix("n/a: "))
    settings = now.settings
    facts = PolicyFacts(
        free_gib, settings.locked_keys, now.buckets, now.reserve, settings.post_capture_need_gib
    )  # fmt: skip
    decision = policy.decide(facts)
    if decision.code in ("gate_low_memory", "gate_passed") and (edge := _edge(now, free_gib)):
        return _unknown(policy, edge, "on the edge", edge)
    reason = f"{decision.reason}{'' if now.asked else ' (forecast)'}"
    count = f"captures {_buckets(len(now.buckets))}"
    return _said(policy, "captured", count, reason) if decision.capture else _said(policy, "skipped", "skips", reason)


def _foreseen(policy: Policy, now: Moment, free_gib: float, foresight: Foresight) -> Foreseen:
    before = foresight.before
    assert foresight.ask is not None and before is not None
    settings = now.settings
    if not policy.kv_first and before.free_kv_last_gib is not None:
        free_gib = before.free_kv_last_gib
    situation = Situation(
        free_gib=free_gib,
        free_low_gib=free_gib if now.exact else free_gib - EDGE_GIB,
        kv_cache_tokens=before.kv_tokens,
        buckets=foresight.buckets,
        resolved=None,
        backend=settings.resolved_backend,
        locked_keys=settings.locked_keys,
        reserve_gib=settings.reserve_gib,
        later_gib=settings.post_capture_need_gib,
        later_words=f"{mib_or_gib(settings.post_capture_need_gib)}, as declared",
        kv_last=before.kv_last,
    )
    outcome = plan_policy(policy.name, situation, foresight.ask)
    if outcome.code in ("gate_low_memory", "gate_passed") and (edge := _edge(now, free_gib)):
        return _unknown(policy, edge, "on the edge", edge)
    kind, short = _short(outcome, len(foresight.buckets))
    reason = f"{outcome.reason}{'' if now.asked else ' (forecast)'}"
    tokens = outcome.kv_cache_tokens
    change = None if policy.kv_first or tokens is None else tokens - before.kv_tokens
    return _said(policy, kind, short, reason, tokens, change, outcome.trimmed, outcome.starved_gib)


def _short(outcome: PolicyOutcome, asked: int) -> tuple[Kind, str]:
    count = len(outcome.captured_buckets)
    if outcome.outcome == "oom":
        at = f"out of memory at bucket {outcome.oom_bucket}"
        return "oom", _NO_START.get(outcome.code, at)
    if outcome.outcome == "skipped":
        return "skipped", "skips"
    if outcome.trimmed:
        return "trimmed", f"trims to {count} of {_buckets(asked)}"
    return "captured", f"captures {_buckets(count)}"


def _edge(now: Moment, free_gib: float) -> str:
    """Words for a forecast on the edge of the gate, else nothing.

    The forecast is what is free at most: what it leaves out can only push it under the gate.
    """
    if now.exact or not 0 <= free_gib - GATE_GIB < EDGE_GIB:
        return ""
    return f"on the edge of the gate: about {free_gib:.2f} GiB against {GATE_GIB:.2f} GiB; the capture will tell"


def _said(policy: Policy, kind: Kind, short: str, reason: str, *figures: object) -> Foreseen:
    return Foreseen(policy.name, kind, short, f"{_PHRASES[kind]}: {reason}", reason, *figures)  # type: ignore[arg-type]


def _unknown(policy: Policy, reason: str, short: str = "n/a", words: str = "") -> Foreseen:
    return Foreseen(policy.name, "unknown", short, words or f"n/a: {reason}", reason)


def _buckets(count: int) -> str:
    return f"{count} bucket{'' if count == 1 else 's'}"
