"""Who decides whether a ladder is captured. Pure: numbers in, a decision with its reason out.

A decision says which buckets, in which order, what has to stay free, what happens when memory runs out, and whether
the KV pool is sized before or after. It and the facts it was taken from can be written as JSON.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from toolkit.errors import InvalidInput
from toolkit.ladder import replay_share

MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB = 4.0
"""SGLang's `_MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB`, in GiB: releases 0.5.16 and 0.5.17 only.

Added by public PR sgl-project/sglang#31204 (2026-07-14), removed by #33352 (2026-08-03).
"""
PREFILL_BACKEND_KEY = ("prefill", "backend")
DEFAULT_RESERVE_GIB, DEFAULT_RESERVE_SHARE = 0.5, 0.1
"""What is kept free after the capture unless somebody says otherwise: the smaller of the two."""


class OnOutOfMemory(StrEnum):
    """What follows when memory runs out in the middle of the ladder."""

    FAIL = "fail"
    """The server does not start: every graph is dropped and the outcome is `oom`."""
    KEEP_OR_EAGER = "keep_or_eager"
    """Buckets captured before stay if they are still valid; without any, prefill runs eager."""


@dataclass(frozen=True, slots=True)
class BucketNeed:
    """Forecast of one bucket in order of capture, GiB from the start of the ladder: gone after it, and its peak."""

    num_tokens: int
    cumulative_gib: float
    peak_gib: float


@dataclass(frozen=True, slots=True)
class LadderNeed:
    """Forecast of one ladder in GiB: `peak_gib` at its worst moment, `total_gib` when it is done."""

    steps: tuple[BucketNeed, ...]
    peak_gib: float
    total_gib: float

    @property
    def known(self) -> bool:
        """Whether there are steps and every figure is a number: a forecast may be n/a."""
        figures = [self.peak_gib, self.total_gib]
        figures += [figure for step in self.steps for figure in (step.cumulative_gib, step.peak_gib)]
        return bool(self.steps) and all(map(math.isfinite, figures))

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts, smallest first."""
        return tuple(sorted(step.num_tokens for step in self.steps))


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What a policy may look at, on one rank, just before the capture.

    Attributes:
        free_gib: GiB free. Where the KV pool is sized later, what sizing it first would have left.
        locked_keys: what the user locked by hand.
        buckets: the ladder that is asked for, tokens.
        reserve_gib: GiB that have to stay free.
        post_capture_gib: GiB that something needs after the capture (a workspace that grows with the prompt).
        kv_room_gib: GiB that the KV pool does not take yet and would if it were sized first; None where nobody knows.
        needs: forecasts of this ladder and of shorter ones; empty when there is no forecast.
    """

    free_gib: float
    locked_keys: frozenset[tuple[str, str]]
    buckets: tuple[int, ...]
    reserve_gib: float = 0.0
    post_capture_gib: float = 0.0
    kv_room_gib: float | None = None
    needs: tuple[LadderNeed, ...] = ()

    @property
    def kept_gib(self) -> float:
        """GiB that a careful policy leaves alone: the reserve and what is declared to be needed later."""
        return self.reserve_gib + self.post_capture_gib

    def fits(self, need: LadderNeed) -> bool:
        """Whether a ladder leaves the reserve at its worst moment, and what is needed later when it is done."""
        return need.peak_gib <= self.free_gib - self.reserve_gib and need.total_gib <= self.free_gib - self.kept_gib


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to capture, which buckets, and why. `code` is stable and `log_line` is None when a server is silent.

    Attributes:
        capture: whether there is a capture.
        code: stable word for the reason.
        reason: one sentence.
        buckets: what to capture, smallest first; every policy captures the largest first.
        log_line: a server's own line about it.
        trimmed: buckets that were asked for and are left out.
        floor_gib: GiB that the capture may not touch at any moment; None when the policy does not watch.
        kept_gib: GiB that must be free when a bucket is done.
        steps: forecast the capture is watched against, in order of capture.
        on_oom: what follows when memory runs out.
    """

    capture: bool
    code: str
    reason: str
    buckets: tuple[int, ...] = ()
    log_line: str | None = None
    trimmed: tuple[int, ...] = ()
    floor_gib: float | None = None
    kept_gib: float = 0.0
    steps: tuple[BucketNeed, ...] = ()
    on_oom: OnOutOfMemory = OnOutOfMemory.FAIL

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON knows it: the same before it is written and after it is read."""
        plain = {**dataclasses.asdict(self), "order": "largest first", "on_oom": self.on_oom.value}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def reserve_gib(free_gib: float, asked: float | None) -> float:
    """GiB to keep free after the capture: as asked, else the smaller of 0.5 and 10 % of what is free before it."""
    return asked if asked is not None else min(DEFAULT_RESERVE_GIB, DEFAULT_RESERVE_SHARE * max(free_gib, 0.0))


# --- the gate -----------------------------------------------------------------------------------------------


def should_skip_auto_prefill_cuda_graph_for_memory(free_gb: float, locked_keys: Collection[tuple[str, str]]) -> bool:
    """The old gate: skip when less than 4.0 GiB are free, unless the prefill backend was chosen by hand.

    Same name, boundary and exemption as in SGLang 0.5.16-0.5.17; `free_gb` is GiB, as everywhere there.
    """
    if PREFILL_BACKEND_KEY in locked_keys:
        return False
    return free_gb < MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB


def gate_log_line(free_gib: float) -> str:
    """The warning of the old gate, word for word (SGLang 0.5.16-0.5.17)."""
    return (
        f"Disabling auto-selected prefill CUDA graph: only {free_gib:.2f} GiB is free after "
        f"model/KV/eager-buffer allocation; at least {MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB:.2f} GiB is "
        "required for capture. Set an explicit prefill CUDA graph backend to override this safety gate."
    )


def gated(facts: PolicyFacts) -> Decision:
    """SGLang 0.5.16-0.5.17 (July 2026): the 4 GiB gate for backends that nobody chose by hand."""
    limit = MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB
    if should_skip_auto_prefill_cuda_graph_for_memory(facts.free_gib, facts.locked_keys):
        return Decision(
            capture=False,
            code="gate_low_memory",
            reason=f"the old gate skipped the capture: {mib_or_gib(facts.free_gib)} free, under {limit:.2f} GiB",
            log_line=gate_log_line(facts.free_gib),
        )
    if PREFILL_BACKEND_KEY in facts.locked_keys:
        why = f"the backend was chosen by hand, which bypasses the gate ({mib_or_gib(facts.free_gib)} free)"
        return Decision(True, "gate_bypassed", why, facts.buckets)
    why = f"the gate let it pass: {mib_or_gib(facts.free_gib)} free, at least {limit:.2f} GiB required"
    return Decision(True, "gate_passed", why, facts.buckets)


def ungated(facts: PolicyFacts) -> Decision:
    """SGLang 0.5.18 and later (August 2026): capture is always attempted, free memory is only logged."""
    why = f"capture is always attempted; {mib_or_gib(facts.free_gib)} free is only logged"
    return Decision(True, "ungated", why, facts.buckets)


# --- a budget -----------------------------------------------------------------------------------------------


def budgeted(facts: PolicyFacts) -> Decision:
    """Ours: forecast first, trim the ladder from the top until it fits beside a reserve, watch every bucket."""
    needs = [need for need in facts.needs if need.known]
    if not needs:
        why = f"no forecast: the whole ladder is tried and watched, {_kept(facts)} of {mib_or_gib(facts.free_gib)} free"
        decision = _watched(facts, "budget_unforeseen", why, facts.buckets, ())
        return dataclasses.replace(decision, log_line=f"budgeted: {why}")
    fitting = [need for need in needs if facts.fits(need)]
    if not fitting:
        least = min(needs, key=lambda need: need.peak_gib)
        why = (
            f"no ladder fits: {mib_or_gib(facts.free_gib)} free, {_kept(facts)}, and even buckets up to "
            f"{max(least.buckets)} are forecast to need {_need(least)}; prefill runs eager"
        )
        return Decision(False, "over_budget", why, log_line=f"budgeted: {why}", trimmed=facts.buckets)
    best = max(fitting, key=lambda need: len(need.steps))
    trimmed = tuple(bucket for bucket in facts.buckets if bucket not in best.buckets)
    need = f"forecast to need {_need(best)} of {mib_or_gib(facts.free_gib)} free, {_kept(facts)}"
    if not trimmed:
        return _watched(facts, "budget_fits", f"the whole ladder fits: {need}", best.buckets, best.steps)
    why = f"{trim_words(facts.buckets, best.buckets)}: {need}"
    decision = _watched(facts, "budget_trimmed", why, best.buckets, best.steps)
    return dataclasses.replace(decision, trimmed=trimmed, log_line=f"budgeted: {why}")


def _watched(
    facts: PolicyFacts, code: str, why: str, buckets: tuple[int, ...], steps: tuple[BucketNeed, ...]
) -> Decision:
    return Decision(
        True,
        code,
        why,
        buckets,
        floor_gib=facts.reserve_gib,
        kept_gib=facts.kept_gib,
        steps=steps,
        on_oom=OnOutOfMemory.KEEP_OR_EAGER,
    )


def _need(need: LadderNeed) -> str:
    """What a ladder needs, in words: at its worst moment, and in the end where that is less."""
    end = "" if need.total_gib >= need.peak_gib else f" at its worst moment and {mib_or_gib(need.total_gib)} in the end"
    return f"{mib_or_gib(need.peak_gib)}{end}"


def _kept(facts: PolicyFacts) -> str:
    """What stays free, in words."""
    later = f" and {mib_or_gib(facts.post_capture_gib)} needed later" if facts.post_capture_gib else ""
    return f"{mib_or_gib(facts.reserve_gib)} kept as reserve{later}"


def trim_words(asked: Sequence[int], kept: Sequence[int]) -> str:
    """What a shorter ladder leaves out and what that costs in replays.

    The cost is a share of token counts from 1 to the ceiling that was asked for, each counted once: how many prefills
    it concerns depends on the traffic.
    """
    left_out = sorted(set(asked) - set(kept))
    before, after = (round(100 * replay_share(ladder, max(asked))) for ladder in (asked, kept))
    span = str(left_out[0]) if len(left_out) == 1 else f"{left_out[0]} to {left_out[-1]}"
    return (
        f"{len(left_out)} of {len(asked)} buckets left out ({span} tokens), so that {after} % instead of {before} % of "
        f"the token counts up to {max(asked)} replay"
    )


def mib_or_gib(gib: float) -> str:
    """Small figures in MiB, others in GiB."""
    return f"{gib * 1024:.{int(0 < abs(gib) < 1 / 1024)}f} MiB" if abs(gib) < 0.1 else f"{gib:.2f} GiB"


@dataclass(frozen=True, slots=True)
class Halt:
    """Why a watched capture goes no further. `exceeded`: what has to stay free is touched already."""

    reason: str
    exceeded: bool


def watch(decision: Decision, captured: int, free_at_start_gib: float, free_gib: float) -> Halt | None:
    """Asked after each bucket: why the ladder must not go on, or None when it may.

    The forecast of the next peak is moved by what the buckets so far took beyond their own forecast, or below it.

    Args:
        decision: with what has to stay free, and the forecast steps.
        captured: buckets captured so far.
        free_at_start_gib: GiB free before the first.
        free_gib: GiB free now.
    """
    if decision.floor_gib is None:
        return None
    if free_gib < decision.kept_gib:
        return Halt(f"{mib_or_gib(free_gib)} are free, {mib_or_gib(decision.kept_gib)} have to stay free", True)
    if captured >= len(decision.steps):
        return None
    taken, step = free_at_start_gib - free_gib, decision.steps[captured]
    excess = taken - (decision.steps[captured - 1].cumulative_gib if captured else 0.0)
    left = free_at_start_gib - step.peak_gib - excess
    if left >= decision.floor_gib:
        return None
    against = f"{mib_or_gib(abs(excess))} {'more' if excess > 0 else 'less'} than forecast"
    why = (
        f"bucket {step.num_tokens} would leave {mib_or_gib(left)} of the {mib_or_gib(decision.floor_gib)} reserve "
        f"({mib_or_gib(taken)} taken so far, {against})"
    )
    return Halt(why, False)


def measured_over_forecast(decision: Decision, captured: int, taken_gib: float) -> float | None:
    """How many times its forecast the capture has taken so far; None without a forecast to compare with."""
    if not 0 < captured <= len(decision.steps):
        return None
    expected = decision.steps[captured - 1].cumulative_gib
    return taken_gib / expected if expected > 0 else None


def scaled(need: LadderNeed, factor: float) -> LadderNeed:
    """A forecast corrected by a factor that was measured."""
    steps = (BucketNeed(one.num_tokens, one.cumulative_gib * factor, one.peak_gib * factor) for one in need.steps)
    return LadderNeed(tuple(steps), need.peak_gib * factor, need.total_gib * factor)


# --- the KV pool last ---------------------------------------------------------------------------------------


def capture_first(facts: PolicyFacts) -> Decision:
    """Ours: capture before the KV pool is sized; the pool gets what is left after graphs and reserve."""
    room = facts.kv_room_gib or 0.0
    more = f" and the {mib_or_gib(room)} of a KV pool sized first" if room > 0 else ""
    has = f"{mib_or_gib(facts.free_gib + min(room, 0.0))}{more}"
    why = f"the capture comes first and has {has}; KV gets the rest, {_kept(facts)}"
    return Decision(True, "capture_first", why, facts.buckets)


# --- all of them --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to decide.

    Attributes:
        name: on the command line.
        decide: pure.
        foresees: whether it looks at a forecast, which takes a moment to make.
        kv_first: whether the KV pool is sized before the capture.
    """

    name: str
    decide: Callable[[PolicyFacts], Decision]
    foresees: bool = False
    kv_first: bool = True

    @property
    def summary(self) -> str:
        """One line about it."""
        return str(self.decide.__doc__).splitlines()[0]


def _by_name(policies: Iterable[Policy]) -> dict[str, Policy]:
    return {policy.name: policy for policy in policies}


POLICIES: dict[str, Policy] = _by_name(
    (
        Policy("gated", gated),
        Policy("ungated", ungated),
        Policy("budgeted", budgeted, foresees=True),
        Policy("capture_first", capture_first, kv_first=False),
    )
)
"""Every policy by its name on the command line."""


def get_policy(name: str) -> Policy:
    """The policy called `name`. Raises InvalidInput listing the names there are."""
    try:
        return POLICIES[name]
    except KeyError:
        known = f"policies are {', '.join(POLICIES)}"
        raise InvalidInput(f"policy {name!r} is unknown", known, "for example --policy ungated") from None


def starved_gib(free_after_gib: float | None, post_capture_gib: float) -> float:
    """GiB that a declared later need lacks after the capture; 0 when nothing is declared or it fits.

    The case of public issue sgl-project/sglang#40094: graphs took 1.81 GiB, a workspace that grows with the prompt came
    later, and long prefills ran at 202 instead of 893 tokens/s without any error.
    """
    if free_after_gib is None:
        return 0.0
    return max(0.0, post_capture_gib - free_after_gib)


def later_words(free_after_gib: float, post_capture_gib: float) -> str:
    """The verdict on a declared later need, in words."""
    lacking = starved_gib(free_after_gib, post_capture_gib)
    left = f"{mib_or_gib(free_after_gib)} stay free and {mib_or_gib(post_capture_gib)} are declared to be needed later"
    return f"{left}: it starves by {mib_or_gib(lacking)}" if lacking else f"{left}: it fits"


def same_on_all_ranks(policy: Policy, facts: Sequence[PolicyFacts]) -> tuple[Decision, tuple[Decision, ...], int]:
    """(decision for all, what each rank would decide alone, index of the smallest rank).

    A server that lets ranks decide alone hangs in its first collective when they differ: the decision is taken on the
    rank with the least free memory. Raises InvalidInput without any rank.
    """
    if not facts:
        raise InvalidInput("no rank is given", "the free GiB of at least one rank", "for example (2.05, 2.28)")
    alone = tuple(policy.decide(rank) for rank in facts)
    smallest = min(range(len(facts)), key=lambda index: facts[index].free_gib)
    return alone[smallest], alone, smallest
