"""What to do next, from a plan. Pure; most useful first. Flags of a server stand beside this toolkit's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.forecast.outcomes import PolicyOutcome
from toolkit.forecast.remedies import MORE, Remedies, find_remedies
from toolkit.forecast.server_flags import name_backend, set_fraction, set_ladder
from toolkit.forecast.solve import stopped_by_gate
from toolkit.policies import get_policy, mib_or_gib

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

EDGE_GIB = 0.25
"""A forecast this close to the old gate does not tell on which side the measured figure will lie."""


def advise_plan(plan: Plan) -> Iterator[str]:
    """Advice, one sentence each."""
    short, states = short_policies(plan), list(_states(plan))
    small = plan.ledger.kv_cache_tokens < plan.resolved.chunked_prefill_size
    remedies = find_remedies(plan, short) if states or small or _skipped_by_gate(plan) else None
    yield from _bypassed(plan)
    if remedies is not None and states:
        yield f"{'; '.join(states)}: {remedies.words}"
    yield from _pool(plan, remedies)
    yield from _gate(plan, remedies)
    for part in (_trimmed, _table):
        yield from part(plan)


def short_policies(plan: Plan) -> tuple[str, ...]:
    """Policies under which memory runs out, or lacks for what comes later."""
    return tuple(name for name, one in plan.policies.items() if one.outcome == "oom" or one.starved_gib)


def _states(plan: Plan) -> Iterator[str]:
    """What is short, one half sentence each."""
    for code, words in _OOM.items():
        names = [name for name, one in plan.policies.items() if one.outcome == "oom" and one.code == code]
        if names:
            yield f"{words} under {', '.join(names)}"
    starved = {name: one.starved_gib for name, one in plan.policies.items() if one.starved_gib}
    if starved:
        most = mib_or_gib(max(starved.values()))
        yield f"what comes later ({plan.later_words}) lacks {most} under {', '.join(starved)}"
    whole = [one for name, one in plan.policies.items() if get_policy(name).kv_first and _all(one)]
    if whole and not short_policies(plan) and plan.left_gib < plan.reserve_gib:
        at = "at the capture's peak" if plan.left_at_peak_gib < plan.left_in_the_end_gib else "after all graphs"
        left = f"{mib_or_gib(plan.left_gib)} of the {mib_or_gib(plan.reserve_gib)} reserve"
        yield f"prefill graphs fit, but only {left} would be left {at}"


_OOM = {
    "out_of_memory_before_capture": "memory would run out before the capture",
    "out_of_memory": "the capture would run out of memory",
    "no_memory_for_kv": "less than one bucket of tokens would be left for the KV pool",
}


def _pool(plan: Plan, remedies: Remedies | None) -> Iterator[str]:
    """A KV pool that holds a bucket and no prefill chunk."""
    tokens, chunk = plan.ledger.kv_cache_tokens, plan.resolved.chunked_prefill_size
    if remedies is None or not plan.holds_bucket or tokens >= chunk:
        return
    at = remedies.fraction
    helps = at is not None and at.ledger.kv_cache_tokens >= chunk
    way = f"raise the fraction to {at.mem_fraction:g}, " if helps and at is not None else ""
    yield f"the KV pool holds {tokens:,} tokens, less than one prefill chunk of {chunk:,}: {way}{MORE}"


def _all(one: PolicyOutcome) -> bool:
    return one.outcome == "captured" and not one.trimmed


def _gate(plan: Plan, remedies: Remedies | None) -> Iterator[str]:
    """The old gate, where the release planned for has it or the plan shows it."""
    limit = plan.release.gate_gib
    if limit is None or plan.forecast is None:
        return
    if _skipped_by_gate(plan):
        at = None if remedies is None else remedies.fraction
        passes = at is not None and at.mem_fraction is not None and not stopped_by_gate(at)
        lower = f", or lower the fraction to {at.mem_fraction:g}" if passes and at is not None else ""
        yield (
            f"SGLang {plan.release.version} would skip the capture without failing: name the backend "
            f"(--backend {plan.backend.value}; {name_backend(plan.backend)} on the server) to bypass the gate{lower}"
        )
    if abs(plan.free_before_gib - limit) < EDGE_GIB:
        yield f"{plan.free_before_gib:.2f} GiB free is on the edge of the {limit:.2f} GiB gate: ranks may differ"


def _skipped_by_gate(plan: Plan) -> bool:
    gated = plan.policies.get("gated")
    return gated is not None and gated.code == "gate_low_memory" and plan.release.gate_gib is not None


def _bypassed(plan: Plan) -> Iterator[str]:
    skipped = [one for one in plan.resolved.reasons if one.standing == "bypassed" and one.phase in ("prefill", "both")]
    if skipped:
        yield f"the backend chosen by hand skips a rule of the release: {skipped[0].text}"


def _trimmed(plan: Plan) -> Iterator[str]:
    """A shorter ladder: what makes a server capture the same."""
    for name, one in plan.policies.items():
        if not one.trimmed or one.outcome != "captured":
            continue
        flags = [set_ladder(one.captured_buckets)]
        if plan.mem_fraction is not None:  # else a server would take another one with another ladder
            flags.append(set_fraction(plan.mem_fraction))
        if _skipped_by_gate(plan):
            flags.append(name_backend(plan.backend))
        yield f"SGLang {plan.release.version} captures the ladder of {name} with {' '.join(flags)}"


def _table(plan: Plan) -> Iterator[str]:
    table = plan.ledger.request_table_gib
    if plan.settings.max_running_requests is None and table > 0.1 * max(plan.free_before_gib, 0.1):
        yield (
            f"limit the requests: a server's own {plan.ledger.requests} take {table:.2f} GiB more for their table; "
            "--max-running-requests N counts it here and limits it there"
        )
