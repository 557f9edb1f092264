"""Compatibility rules in the order SGLang applies them, each with a reason code and its own words.

Order and wording: releases 0.5.15-0.5.23 executed. Which guards a release has, and where they differ, is data
(`toolkit.memory.release`); without a release the newest is meant. Guards run before any policy, and an explicit
backend does not skip them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.memory.release import Release, get_release
from toolkit.settings import Backend, Phase


@dataclass(frozen=True, slots=True)
class GuardFacts:
    """What the guards look at. `capture_tokens` is request slots x context length, cut to the KV pool."""

    backend: Backend
    role: str
    draft_forced: bool
    eagle_target: bool
    lora_unsupported: bool
    is_language_model: bool
    buckets: tuple[int, ...]
    capture_requests: int
    context_length: int
    capture_tokens: int
    has_layers: bool
    num_layers: int
    num_attention_layers: int


@dataclass(frozen=True, slots=True)
class Blocked:
    """A guard said no. `log_line` is None where a server prints nothing."""

    code: str
    reason: str
    log_line: str | None


def check_cuda_graph_backend(phase: Phase, backend: Backend, resolved: dict[Phase, Backend]) -> bool:
    """Whether `phase` resolved to `backend` (SGLang's name and meaning)."""
    return resolved.get(phase) is backend


def fitting_buckets(facts: GuardFacts, release: Release | None = None) -> tuple[int, ...]:
    """The buckets that fit request slots x context; servers drop the others silently (0.5.17 and later)."""
    if "no_size_fits" not in (release or get_release()).guards:
        return facts.buckets
    return tuple(bucket for bucket in facts.buckets if bucket <= facts.capture_tokens)


def _disabled(facts: GuardFacts, _: Release) -> str | None:
    if not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED, {Phase.PREFILL: facts.backend}):
        return None
    return (
        "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' (e.g. via "
        "--cuda-graph-backend-prefill=disabled or auto-disable rules)."
    )


def _draft_not_forced(facts: GuardFacts, _: Release) -> str | None:
    return "" if facts.role == "draft" and not facts.draft_forced else None


def _eagle_target(facts: GuardFacts, release: Release) -> str | None:
    if not facts.eagle_target or facts.backend in release.eagle_spares:
        return None
    return (
        "Disable prefill CUDA graph for EAGLE target on tc_piecewise to avoid FP4/MoE decode-replay corruption "
        "(#28386)."
    )


def _lora(facts: GuardFacts, release: Release) -> str | None:
    if not facts.lora_unsupported:
        return None
    return (
        "Disable prefill CUDA graph because the current LoRA configuration does not support it (unsupported LoRA "
        f"backend, {release.lora_guard_detail}, or DP attention)."
    )


def _language_model(facts: GuardFacts, _: Release) -> str | None:
    if facts.is_language_model:
        return None
    return "Disable prefill CUDA graph because the model is not a language model"


def _capture_sizes(facts: GuardFacts, _: Release) -> str | None:
    return None if facts.buckets else "Disable prefill CUDA graph because the capture size is not set"


def _size_fits(facts: GuardFacts, _: Release) -> str | None:
    if fitting_buckets(facts):
        return None
    return (
        "Disable prefill CUDA graph capture because no configured capture size fits "
        f"backend={facts.backend.value} with max_capture_tokens={facts.capture_tokens} "
        f"(max_capture_requests={facts.capture_requests}, context_length={facts.context_length}, "
        f"request-pool size={facts.capture_requests})."
    )


def _layers(facts: GuardFacts, release: Release) -> str | None:
    if facts.has_layers:
        return None
    role = f"{facts.role} " if release.layers_guard_names_role else ""
    return f"Disable {role}prefill CUDA graph because the {role}model does not have a 'layers' attribute"


def _standard_gqa(facts: GuardFacts, _: Release) -> str | None:
    if facts.num_attention_layers >= facts.num_layers:
        return None
    return "Disable prefill CUDA graph because some layers do not apply Standard GQA"


GUARDS: tuple[tuple[str, str, Callable[[GuardFacts, Release], str | None]], ...] = (
    ("disabled", "the prefill graph was disabled by hand", _disabled),
    ("draft_not_forced", "a draft worker captures no prefill graph unless it is forced", _draft_not_forced),
    ("eagle_target", "tc_piecewise is unsafe for an EAGLE target", _eagle_target),
    ("lora_unsupported", "the LoRA configuration does not support prefill graphs", _lora),
    ("not_a_language_model", "no decoder body was found in the model", _language_model),
    ("no_capture_sizes", "the ladder is empty", _capture_sizes),
    ("no_size_fits", "no bucket fits the request slots, the context length and the KV pool", _size_fits),
    ("no_layers", "the model has no decoder `layers`", _layers),
    ("non_standard_gqa", "some layers have no standard attention", _standard_gqa),
)
"""(reason code, plain reason, rule): the rule returns the log line, empty where servers are silent, or None."""


def first_blocked(facts: GuardFacts, release: Release | None = None) -> Blocked | None:
    """The first guard of a release that says no, in the documented order; None when all pass."""
    release = release or get_release()
    for code, reason, rule in GUARDS:
        line = rule(facts, release) if code in release.guards else None
        if line is not None:
            return Blocked(code, reason, line or None)
    return None
