"""What to do next, from a plan. Pure; most useful first. Flags of a server stand beside this toolkit's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.forecast.server_flags import FRACTION, name_backend, set_ceiling, set_fraction, set_ladder
from toolkit.ladder import generate_prefill_buckets
from toolkit.policies import mib_or_gib

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

EDGE_GIB = 0.25
"""A forecast this close to the old gate does not tell on which side the measured figure will lie."""
_LOWER = f"lower the fraction (find it with --solve mem-fraction; {FRACTION} on the server)"


def advise_plan(plan: Plan) -> Iterator[str]:
    """Advice, one sentence each."""
    for part in (_bypassed, _room, _later, _pool, _gate, _trimmed, _table):
        yield from part(plan)


def _room(plan: Plan) -> Iterator[str]:
    """Not enough room for the graphs, or hardly enough."""
    worst = min((one.margin_gib for one in plan.policies.values() if one.margin_gib is not None), default=None)
    if worst is None or plan.forecast is None or worst >= plan.reserve_gib:
        return
    state = "the capture would run out of memory" if worst < 0 else f"only {worst:.2f} GiB would be left at its peak"
    yield f"{state}: {_LOWER}"
    lower = generate_prefill_buckets(max(plan.buckets) // 2)[-1:]
    if lower:
        yield (
            f"or lower the ceiling, for example --max-tokens {lower[0]} ({set_ceiling(lower[0])} on the server; the "
            "largest bucket pays for the pool)"
        )


def _later(plan: Plan) -> Iterator[str]:
    """What comes after the capture lacks memory, or takes of the reserve."""
    starved = {name: one.starved_gib for name, one in plan.policies.items() if one.starved_gib}
    if starved:
        most = mib_or_gib(max(starved.values()))
        yield f"what comes later ({plan.later_words}) lacks {most} under {', '.join(starved)}: {_LOWER}, or the ceiling"
    elif plan.forecast is not None and plan.left_in_the_end_gib < plan.reserve_gib:
        left = f"{mib_or_gib(plan.left_in_the_end_gib)} of the {mib_or_gib(plan.reserve_gib)} reserve"
        yield f"prefill graphs fit, but after all graphs only {left} would be left: {_LOWER}"


def _pool(plan: Plan) -> Iterator[str]:
    """A KV pool that serves nobody."""
    tokens, chunk = plan.ledger.kv_cache_tokens, plan.resolved.chunked_prefill_size
    if tokens < chunk:
        yield (
            f"the KV pool holds {tokens:,} tokens, less than one prefill chunk of {chunk:,}: raise the fraction, "
            "raise --tp, take smaller weights (--weights fp8 or int4) or a larger GPU"
        )


def _gate(plan: Plan) -> Iterator[str]:
    """The old gate, where the release planned for has it or the plan shows it."""
    limit = plan.release.gate_gib
    if limit is None or plan.forecast is None:
        return
    if _skipped_by_gate(plan):
        yield (
            f"SGLang {plan.release.version} would skip the capture without failing: name the backend "
            f"(--backend {plan.backend.value}; {name_backend(plan.backend)} on the server) to bypass the gate, or "
            "lower the fraction"
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
