"""What a plan takes for granted, and what to keep in mind when it is read. Pure; sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.catalogue import model_ids, short_name
from toolkit.forecast.model_facts import ModelFacts
from toolkit.forecast.plan_ledger import Ledger
from toolkit.hardware import GpuSpec
from toolkit.memory.release import Release
from toolkit.settings import Backend

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan
    from toolkit.forecast.plan_settings import PlanSettings

ESTIMATED = "estimated: nvidia-smi's figure less what the median card keeps back"


def assumptions(
    settings: PlanSettings, model: ModelFacts, gpu: GpuSpec, ledger: Ledger, release: Release
) -> Iterator[str]:
    """What was taken for granted."""
    weights = settings.weights or model.published_weights
    said = "as given" if settings.weights else "as the checkpoint is published"
    yield f"weights: {weights} ({said}): {model.layout(settings.weights)}"
    yield f"KV cache: {settings.kv_dtype or settings.dtype}"
    yield f"served as {model.architecture or 'n/a'}"
    if gpu.cuda_visible_gib is None:
        yield f"memory of {gpu.id} that CUDA sees: {ESTIMATED}"
    if settings.max_running_requests is None:
        yield (
            f"request table: not counted ({ledger.request_table_gib:.2f} GiB more are gone with a server's own "
            f"{ledger.requests} requests; give --max-running-requests to count it)"
        )
    yield from _attention(settings.attention_backend, release)


def _attention(name: str | None, release: Release) -> Iterator[str]:
    """Attention backends are an open set (plug-ins add some), so a name that no rule knows may still be right."""
    known = ", ".join(attention_backends(release))
    if name is None:
        yield f"attention backend: not given, so rules that ask for one are left out (they name {known})"
    elif name not in attention_backends(release):
        yield f"attention backend {name}: no rule of SGLang {release.version} names it (they name {known})"


def attention_backends(release: Release) -> tuple[str, ...]:
    """Attention backends that any rule of a release names, sorted."""
    tags = {tag for rule in release.rules for tag in (*rule.all, *rule.none)}
    named = {tag.removeprefix("attention:") for tag in tags if tag.startswith("attention:")}
    return tuple(sorted(named | set(release.least_capability)))


def plan_notes(plan: Plan) -> Iterator[str]:
    """What to keep in mind."""
    for part in (_model, _uncertain, _low, _eager, _gain):
        yield from part(plan)


def _model(plan: Plan) -> Iterator[str]:
    """Which model a short name was taken for."""
    asked = plan.settings.model.strip().lower()
    if short_name(asked) != plan.model.id:
        return
    others = ", ".join(name for name in model_ids() if name.startswith(asked) and name != plan.model.id)
    yield (
        f"{asked} is taken for {plan.model.id}: a family's short name means its newest model in the catalogue"
        + (f" (also there: {others})" if others else "")
    )


def _uncertain(plan: Plan) -> Iterator[str]:
    if any(one.tight and one.outcome == "captured" for one in plan.policies.values()):
        yield (
            "uncertain: the prefill capture does not fit at the ends of its range and of the range of free memory; "
            "no other range counts, decode graphs and later needs are taken by their middle"
        )


def _low(plan: Plan) -> Iterator[str]:
    """Why the least that may be left is below nothing."""
    left = plan.lines[-1]
    if left.low_gib >= 0:
        return
    doubtful = [line for line in plan.lines if line.key in ("static_buffers", "prefill_graph", "decode_graph")]
    widest = max(doubtful, key=lambda line: line.high_gib - line.gib)
    source = ", the range of public captures of many models" if widest.key == "decode_graph" else ""
    yield (
        f"{left.name}: {left.low_gib:.2f} GiB at the low end, mostly because of the {widest.name} "
        f"({widest.gib:.2f} GiB, {widest.low_gib:.2f} to {widest.high_gib:.2f}{source}); `fits` and the policies' "
        "outcomes are about the prefill capture and do not count that end"
    )


def _captured(plan: Plan) -> bool:
    return any(one.outcome == "captured" for one in plan.policies.values())


def _eager(plan: Plan) -> Iterator[str]:
    if _captured(plan):
        yield (
            "a server of these settings that runs prefill eager all the same was told so by a rule or a flag that is "
            "not among them: `prefill-lab diagnose server.log` names it"
        )


def _gain(plan: Plan) -> Iterator[str]:
    """Time is measured, never planned."""
    if plan.backend is not Backend.DISABLED:
        model = plan.model.id if plan.model.entry is not None else "MODEL"
        yield (
            "what the graphs save in time: n/a, a plan measures nothing; on a GPU `prefill-lab compare --model "
            f"{model} --policy ungated --traffic lengths.csv` times replay and eager, and `prefill-lab ladder "
            "lengths.csv` weighs padding and eager shares"
        )
