"""What to do next, from a plan. Pure; most useful first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.ladder import generate_prefill_buckets

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

EDGE_GIB = 0.25
"""A forecast this close to the old gate does not tell on which side the measured figure will lie."""


def advise_plan(plan: Plan) -> Iterator[str]:
    """Advice, one sentence each."""
    for part in (_bypassed, _room, _pool, _gate, _table):
        yield from part(plan)


def _room(plan: Plan) -> Iterator[str]:
    """Not enough room for the graphs, or hardly enough."""
    worst = min((one.margin_gib for one in plan.policies.values() if one.margin_gib is not None), default=None)
    if worst is None or plan.forecast is None:
        return
    if worst < plan.reserve_gib:
        state = "the capture would run out of memory" if worst < 0 else f"only {worst:.2f} GiB would be left"
        yield f"{state}: find the largest fraction that leaves a reserve with --solve mem-fraction"
        lower = generate_prefill_buckets(max(plan.buckets) // 2)[-1:]
        if lower:
            yield f"or lower the ceiling, for example --max-tokens {lower[0]} (the largest bucket pays for the pool)"
    elif plan.lines[-1].gib < plan.reserve_gib:
        yield "prefill graphs fit, the reserve for decode graphs does not: lower the fraction (--solve mem-fraction)"


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
    gated = plan.policies.get("gated")
    if limit is None:
        return
    if gated is not None and gated.code == "gate_low_memory":
        yield (
            f"SGLang {plan.release.version} would skip the capture without failing: name the backend "
            f"(--backend {plan.backend.value}) to bypass the gate, or lower the fraction"
        )
    if abs(plan.free_before_gib - limit) < EDGE_GIB:
        yield f"{plan.free_before_gib:.2f} GiB free is on the edge of the {limit:.2f} GiB gate: ranks may differ"


def _bypassed(plan: Plan) -> Iterator[str]:
    skipped = [one for one in plan.resolved.reasons if one.standing == "bypassed" and one.phase in ("prefill", "both")]
    if skipped:
        yield f"the backend chosen by hand skips a rule of the release: {skipped[0].text}"


def _table(plan: Plan) -> Iterator[str]:
    table = plan.ledger.request_table_gib
    if plan.settings.max_running_requests is None and table > 0.1 * max(plan.free_before_gib, 0.1):
        yield (
            f"limit the requests: a server's own {plan.ledger.requests} take {table:.2f} GiB more for their table; "
            "--max-running-requests N counts it here and limits it there"
        )
