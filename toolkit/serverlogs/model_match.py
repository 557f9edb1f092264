"""Whether a log is of the model that it is compared with: by the name that it prints and by the weights it loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.catalogue import search_models
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.ledger import RankLedger
from toolkit.serverlogs.startup import Startup

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

MOST_OFF = 0.25
"""Share by which weights may differ from the planned ones: packing and embeddings differ by less between formats."""
_LEAST_GIB = 0.25  # below that, small models differ by what a context takes


def mismatch(startup: Startup, ledger: RankLedger, plan: Plan) -> Finding | None:
    """MODEL_MISMATCH when the log names another model, or its weights are not those that the plan counts."""
    said = [part for part in (_named(startup, plan), _weighed(startup, ledger, plan)) if part is not None]
    if not said:
        return None
    return Finding(
        "MODEL_MISMATCH",
        "warning",
        f"This log does not look like {plan.model.id} (tp {plan.settings.tp}, {_weights(plan)} weights): "
        f"{' and '.join(words for words, _ in said)}.",
        tuple(line for _, line in said),
        "Give the model, tp and weights of this server; the forecast beside it is of another, so no policy is judged.",
        startups=(startup.index,),
    )


def _weights(plan: Plan) -> str:
    return plan.settings.weights or plan.model.published_weights


def _named(startup: Startup, plan: Plan) -> tuple[str, int] | None:
    """Only where the log's name belongs to the catalogue: a path or a name that was given freely tells nothing."""
    path = startup.start.values.get("model_path") if startup.start else None
    if startup.start is None or not isinstance(path, str):
        return None
    printed = _last(path)
    hub = {entry.id: _last(entry.hub_id) for entry in search_models("")}
    asked = hub.get(plan.model.id, _last(plan.model.id))
    if _same(printed, asked) or not any(_begins(printed, name) for name in hub.values()):
        return None
    return (
        f"its arguments name {''.join(mark if mark.isprintable() else '?' for mark in path[:100])}",
        startup.start.line,
    )


def _weighed(startup: Startup, ledger: RankLedger, plan: Plan) -> tuple[str, int] | None:
    ends = [
        each.end
        for log in startup.ranks.values()
        for each in log.weights
        if log.rank.label == ledger.rank and each.role == "target" and each.end is not None
    ]
    planned = plan.ledger.line("weights").gib
    if not ends or ends[0].usage_gib is None:
        return None
    loaded = ends[0].usage_gib
    if abs(loaded - planned) <= max(MOST_OFF * planned, _LEAST_GIB):
        return None
    return f"it loaded {loaded:.2f} GiB of weights where {planned:.2f} GiB are planned", ends[0].line


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _begins(longer: str, name: str) -> bool:
    return longer == name or longer.startswith((f"{name}-", f"{name}_"))


def _same(one: str, other: str) -> bool:
    """`qwen3-30b-a3b-fp8` is a checkpoint of `qwen3-30b-a3b`."""
    return _begins(one, other) or _begins(other, one)
