"""Whether a log is of the model and of the card that it is compared with: by names, weights and memory it prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.catalogue import search_models
from toolkit.hardware import GpuSpec
from toolkit.serverlogs.events import OutOfMemory
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.ledger import RankLedger, backed_first_gib
from toolkit.serverlogs.startup import Startup

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

MOST_OFF = 0.25
"""Share by which weights may differ from the planned ones: packing and embeddings differ by less between formats."""
_CARD_OFF = 0.05
"""Share by which memory may exceed the card's, or a printed card differ: drivers keep more or less back."""
_LEAST_FREE = 0.75
"""With a smaller share of the card free before the weights, it is another card or it is shared."""
_LEAST_GIB = 0.25  # below that, small models differ by what a context takes


def mismatch(
    startup: Startup, ledgers: Sequence[RankLedger], ledger: RankLedger, plan: Plan, *, weighed: bool = True
) -> Finding | None:
    """Why the log is not of the planned server, None where nothing speaks against it.

    MODEL_MISMATCH when it names another model, or the weights of `ledger` are not those that the plan counts (not
    looked at unless `weighed`); CARD_MISMATCH when any rank shows memory that the card has not, or has far more of.
    """
    model = [_named(startup, plan), _weighed(startup, ledger, plan) if weighed else None]
    said = [part for part in model if part is not None]
    card = _card(startup, ledgers, plan.gpu)
    if not said and card is None:
        return None
    what = f"{plan.model.id} (tp {plan.settings.tp}, {_weights(plan)} weights)" if said else f"one of {plan.gpu.name}"
    give = "model, tp and weights" if card is None else "model, tp, weights and card" if said else "card"
    said += [card] if card is not None else []
    return Finding(
        "MODEL_MISMATCH" if said != [card] else "CARD_MISMATCH",
        "warning",
        f"This log does not look like {what}: {' and '.join(words for words, _ in said)}.",
        tuple(line for _, line in said),
        f"Give the {give} of this server; the forecast beside it is of another, so no policy is judged.",
        startups=(startup.index,),
    )


def _card(startup: Startup, ledgers: Sequence[RankLedger], gpu: GpuSpec) -> tuple[str, int] | None:
    """The card's size as an error prints it, else the most memory that any rank shows, against the card's own."""
    seen = f"where {gpu.id} gives {gpu.visible_gib:.2f} GiB"
    for oom in (*startup.ooms, *(each.event for each in startup.caught if isinstance(each.event, OutOfMemory))):
        if oom.total_gib is not None:
            off = abs(oom.total_gib - gpu.visible_gib) > _CARD_OFF * gpu.visible_gib
            return (f"its card has {oom.total_gib:.2f} GiB in all {seen}", oom.line) if off else None
    most, line = max(((_shown(startup, one), _first_line(one)) for one in ledgers), default=(0.0, 0))
    if most > gpu.visible_gib * (1 + _CARD_OFF):
        return f"{most:.2f} GiB were free or in use on one rank {seen}", line
    baselines = [one for one in ledgers if one.baseline_gib is not None]
    free = max((one.baseline_gib or 0.0 for one in baselines), default=None)
    if free is None or free >= _LEAST_FREE * gpu.visible_gib:
        return None
    words = f"only {free:.2f} GiB were free before the weights {seen}: another card, or others' memory on it"
    return words, _first_line(baselines[0])


def _shown(startup: Startup, ledger: RankLedger) -> float:
    """The most memory that a rank's lines show at one time: free before the weights, or taken and left after them."""
    later = ledger.free_after_pools_gib if ledger.free_after_pools_gib is not None else ledger.free_before_capture_gib
    parts = (ledger.weights_gib, backed_first_gib(startup, ledger), ledger.state_gib, later)
    taken = sum(part or 0.0 for part in parts)
    return max([taken, ledger.baseline_gib or 0.0, *(stage.free_gib for stage in ledger.stages)])


def _first_line(ledger: RankLedger) -> int:
    return ledger.stages[0].line if ledger.stages else 0


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
