"""Who decides whether a ladder is captured. Pure: numbers in, a decision with its reason out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from toolkit.errors import InvalidInput

MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB = 4.0
"""SGLang's `_MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB`, in GiB: releases 0.5.16 and 0.5.17 only.

Added by public PR sgl-project/sglang#31204 (2026-07-14), removed by #33352 (2026-08-03).
"""
PREFILL_BACKEND_KEY = ("prefill", "backend")


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What a policy may look at: GiB free on this rank just before capture, and what the user locked by hand."""

    free_gib: float
    locked_keys: frozenset[tuple[str, str]]
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to capture, which buckets, and why. `code` is stable and `log_line` is None when a server is silent."""

    capture: bool
    code: str
    reason: str
    buckets: tuple[int, ...] = ()
    log_line: str | None = None


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
            reason=f"the old gate skipped the capture: {facts.free_gib:.2f} GiB free, under {limit:.2f} GiB",
            log_line=gate_log_line(facts.free_gib),
        )
    if PREFILL_BACKEND_KEY in facts.locked_keys:
        why = f"the backend was chosen by hand, which bypasses the gate ({facts.free_gib:.2f} GiB free)"
        return Decision(True, "gate_bypassed", why, facts.buckets)
    why = f"the gate let it pass: {facts.free_gib:.2f} GiB free, at least {limit:.2f} GiB required"
    return Decision(True, "gate_passed", why, facts.buckets)


def ungated(facts: PolicyFacts) -> Decision:
    """SGLang 0.5.18 and later (August 2026): capture is always attempted, free memory is only logged."""
    why = f"capture is always attempted; {facts.free_gib:.2f} GiB free is only logged"
    return Decision(True, "ungated", why, facts.buckets)


Policy = Callable[[PolicyFacts], Decision]
POLICIES: dict[str, Policy] = {"gated": gated, "ungated": ungated}
"""Every policy by its name on the command line."""


def get_policy(name: str) -> Policy:
    """The policy called `name`. Raises InvalidInput listing the names there are."""
    try:
        return POLICIES[name]
    except KeyError:
        raise InvalidInput(
            f"policy {name!r} is unknown", f"policies are {', '.join(POLICIES)}", "for example --policy ungated"
        ) from None
