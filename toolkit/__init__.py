"""Prefill Lab: what prefill CUDA graphs cost, whether they fit, who decides, and what they buy.

    import toolkit
    record = toolkit.capture(model="smollm2-135m", max_tokens=512)
    records = toolkit.compare(policies=["gated", "budgeted"], free_memory_gib=0.02)
    toolkit.compare_policies(records)  # side by side, with prefill time over a mix of prompts
    diagnosis = toolkit.diagnose("server.log")  # what a server's log says, and what to do
    plan = toolkit.plan(model="qwen3-8b", gpu="h100-80gb")  # a forecast, no GPU needed
    toolkit.policy_map(model="qwen3-8b", fractions=[0.9, 0.94, 0.98])  # what each policy would do where
    design = toolkit.design_ladder("server.log", max_buckets=24)  # the ladder that fits the traffic
    toolkit.Lab()  # in a notebook: the same with widgets
    toolkit.LogDoctor()  # in a notebook: paste a server's log

Importing this is cheap: what is heavy is imported when it is first used, and torch only in a child process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from toolkit.forecast.plan import Plan
    from toolkit.forecast.plan_settings import PlanSettings
    from toolkit.forecast.policy_map import PolicyMap
    from toolkit.forecast.ranks import decide_on_ranks
    from toolkit.ladder import generate_prefill_buckets
    from toolkit.ladder_design import LadderDesign
    from toolkit.runs.record import RunRecord
    from toolkit.runs.store import RunStore
    from toolkit.runs.worker import CaptureJob
    from toolkit.serverlogs.compare import compare_logs
    from toolkit.serverlogs.diagnosis import Diagnosis, diagnose
    from toolkit.settings import CaptureSettings
    from toolkit.widgets.lab import Lab
    from toolkit.widgets.log_doctor import LogDoctor

__version__ = "0.1.0"
__all__ = [
    "CaptureJob",
    "CaptureSettings",
    "Diagnosis",
    "Lab",
    "LadderDesign",
    "LogDoctor",
    "Plan",
    "PlanSettings",
    "PolicyComparison",
    "PolicyMap",
    "RunRecord",
    "RunStore",
    "__version__",
    "capture",
    "compare",
    "compare_logs",
    "compare_policies",
    "decide_on_ranks",
    "design_ladder",
    "diagnose",
    "generate_prefill_buckets",
    "plan",
    "policy_map",
]

_HOMES = {
    "CaptureJob": "toolkit.runs.worker",
    "CaptureSettings": "toolkit.settings",
    "Diagnosis": "toolkit.serverlogs.diagnosis",
    "Lab": "toolkit.widgets.lab",
    "LadderDesign": "toolkit.ladder_design",
    "LogDoctor": "toolkit.widgets.log_doctor",
    "Plan": "toolkit.forecast.plan",
    "PlanSettings": "toolkit.forecast.plan_settings",
    "PolicyComparison": "toolkit.views.comparison",
    "PolicyMap": "toolkit.forecast.policy_map",
    "RunRecord": "toolkit.runs.record",
    "RunStore": "toolkit.runs.store",
    "compare_logs": "toolkit.serverlogs.compare",
    "compare_policies": "toolkit.views.comparison",
    "decide_on_ranks": "toolkit.forecast.ranks",
    "diagnose": "toolkit.serverlogs.diagnosis",
    "generate_prefill_buckets": "toolkit.ladder",
}


def capture(
    *,
    save: bool = True,
    runs_dir: Path | str | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> RunRecord:
    """Capture once, in a child process, and return the record, whatever the outcome; see its `reason`.

    `settings` are those of CaptureSettings (model, policy, max_tokens, free_memory_gib in GiB, ...). The
    record is saved in `runs_dir`, else PREFILL_LAB_RUNS, else ./runs, unless `save` is False.

    Raises InvalidInput for settings that cannot be used (nothing is saved then) and StorageError when the
    record cannot be written.
    """
    from toolkit.settings import CaptureSettings

    return _capture_each([CaptureSettings.create(**settings)], save, runs_dir, on_event)[0]


def compare(
    policies: Sequence[str] | None = None,
    *,
    save: bool = True,
    runs_dir: Path | str | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> list[RunRecord]:
    """Capture once per policy (default: every one there is), all else equal, one after the other.

    Interrupting it ends the comparison: the last record is the `cancelled` one. Parameters and errors are
    those of `capture`; a policy named twice is refused with InvalidInput.
    """
    from toolkit.runs.worker import per_policy
    from toolkit.settings import CaptureSettings

    each = per_policy(CaptureSettings.create(**settings), policies)
    return _capture_each(each, save, runs_dir, on_event)


def plan(*, solve: str | None = None, **settings: Any) -> Plan:
    """What a server would do with its memory and what its prefill graphs will cost; nothing is captured.

    `settings` are those of PlanSettings (model, gpu, tp, mem_fraction, max_tokens, sglang_version, ...). `solve` finds
    the largest "mem-fraction" or "max-tokens" that leaves the reserve beside all that comes later, and passes the gate
    of a release that has one, and returns that plan.

    Raises InvalidInput for settings that cannot be planned.
    """
    from toolkit.forecast.plan import make_plan
    from toolkit.forecast.plan_settings import PlanSettings

    chosen = PlanSettings.create(**settings)
    if solve is None:
        return make_plan(chosen)
    from toolkit.forecast.solve import solve as solve_for

    return solve_for(chosen, solve)


def policy_map(
    *,
    rows: Mapping[str, Sequence[Any]] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    records: Iterable[RunRecord] = (),
    **settings: Any,
) -> PolicyMap:
    """What each policy leads to over one or two settings, by forecast; wrong skips and wrong captures are counted.

    Axes are `rows={"max_tokens": [512, 2048]}` and `columns={"mem_fraction": [0.9, 0.95]}`, or the shortcuts
    `fractions`, `free_memory` (GiB), `gpus`, `models` and `ceilings` (tokens). The other settings are those of
    `plan`; `device_memory_gib` makes it a map of the accounted CPU device. Cells that one of `records` captured under
    the same settings show what was measured.

    Raises InvalidInput without an axis, or when nothing can be planned; a single cell that cannot has its reason.
    """
    from toolkit.forecast.policy_map import policy_map as make_map
    from toolkit.runs.executed import executed

    return make_map(rows=rows, columns=columns, executed=executed(records), **settings)


def design_ladder(
    prompt_lengths: Any,
    *,
    memory_gib: float | None = None,
    time_s: float | None = None,
    max_buckets: int | None = None,
    **others: Any,
) -> LadderDesign:
    """The ladder that fits the traffic, and what it gains over the default one; nothing is captured.

    `prompt_lengths` are numbers, a mapping from length to count, or the path of a CSV or a server's log. `memory_gib`
    and `time_s` limit what the capture may take, and need `plan=` or `measured=`. `others` are the further parameters
    of `toolkit.serverlogs.traffic_ladder.design_ladder` (chunked_prefill_size, plan, measured, keep_ceiling, ...).

    Raises InvalidInput for a traffic or a budget that cannot be used.
    """
    from toolkit.serverlogs.traffic_ladder import design_ladder as design

    return design(prompt_lengths, memory_gib=memory_gib, time_s=time_s, max_buckets=max_buckets, **others)


def _capture_each(
    each: Sequence[CaptureSettings],
    save: bool,
    runs_dir: Path | str | None,
    on_event: Callable[[dict[str, Any]], None] | None,
) -> list[RunRecord]:
    from toolkit.runs.store import RunStore
    from toolkit.runs.worker import run_each

    store = RunStore(runs_dir) if save else None
    if store is not None:
        store.check()  # Before the captures: an unwritable folder should not cost their minutes.
    records = []
    for record in run_each(each, on_event):
        if store is not None:
            store.save(record)
        records.append(record)
    return records


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
