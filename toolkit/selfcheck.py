"""`prefill-lab selfcheck`: does the engine work on this machine's device? One command, no network.

The contract of the seam, then real captures, replay checks, the old gate, running out of memory and the recovery
from it. Every step ends as passed, failed or skipped with its reason; records, a summary of memory by pool,
figures and a report are left in a folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import StorageError
from toolkit.resources import write_whole
from toolkit.runs.environment import child_environment
from toolkit.runs.record import RunRecord
from toolkit.runs.store import RunStore
from toolkit.runs.worker import run_capture
from toolkit.settings import CaptureSettings

CONTRACT_TIMEOUT_S = 120
Judge = Callable[[RunRecord], str | None]


@dataclass(frozen=True, slots=True)
class Step:
    """One result: `status` is passed, failed or skipped; `detail` says why or what was measured."""

    name: str
    status: str
    detail: str
    seconds: float
    record_id: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One capture and what it must show. `judge` returns what is wrong, or None."""

    name: str
    settings: CaptureSettings
    judge: Judge


def run_selfcheck(device: str, out: Path) -> int:
    """Check `device` (`cuda`, `cuda:N` or `cpu`), write everything to `out`; 0 when nothing failed, else 1.

    Raises DeviceUnavailable (exit 2) before anything is written when the device is not here.
    """
    store = RunStore(out)
    steps: list[Step] = _contract_steps(device)
    store.check()
    for plan in plans(device):
        step, record = _run(plan)
        steps.append(step)
        store.save(record)
        _say(step)
        if record.outcome == "cancelled":
            print("selfcheck was interrupted; what was done so far is kept")
            return 1
    for name, reason in skipped_steps(device):
        steps.append(Step(name, "skipped", reason, 0.0))
        _say(steps[-1])
    _write_results(out, steps, [record for record in store.list() if record.id in {step.record_id for step in steps}])
    failed = [step for step in steps if step.status == "failed"]
    passed = sum(step.status == "passed" for step in steps)
    print(f"selfcheck on {device}: {passed} passed, {len(failed)} failed, results in {out}")
    return 1 if failed else 0


def plans(device: str) -> list[Plan]:
    """The captures for a device; a GPU gets the full ladder and an 8B model as well."""
    smol = CaptureSettings.create(model="smollm2-135m", weights="random", device=device)
    small = smol if device != "cpu" else smol.with_changes(buckets=(8, 32, 128))
    models = [("SmolLM2-135M", small)]
    if device != "cpu":
        models.append(("Qwen3-8B", smol.with_changes(model="qwen3-8b")))
    captures = [
        Plan(f"{name}, {backend}", settings.with_changes(backend=backend), _captured)
        for name, settings in models
        for backend in ("breakable", "full", "tc_piecewise")
    ]
    at_the_gate = small.with_changes(free_memory_gib=3.99)
    tight = smol.with_changes(max_tokens=2048, free_memory_gib=0.03)
    return [
        *captures,
        Plan("3.99 GiB free, gated", at_the_gate.with_changes(policy="gated"), _skipped_by_the_gate),
        Plan("3.99 GiB free, ungated", at_the_gate, _captured),
        Plan(
            "3.99 GiB free, gated, explicit backend",
            at_the_gate.with_changes(policy="gated", backend="breakable"),
            _captured,
        ),
        Plan("out of memory with 0.03 GiB free", tight, _out_of_memory),
        Plan("capture after out of memory", small.with_changes(buckets=(8, 32)), _captured),
    ]


def skipped_steps(device: str) -> list[tuple[str, str]]:
    """What a device does not get, and why."""
    if device != "cpu":
        return []
    return [("Qwen3-8B, three backends", "15 GiB of weights and minutes a bucket on a CPU; run with --device cuda")]


def _captured(record: RunRecord) -> str | None:
    if record.outcome != "captured":
        return f"{record.outcome}: {record.reason}"
    if record.replay_check is None or not record.speed:
        return "replays were not checked and timed"
    return None


def _skipped_by_the_gate(record: RunRecord) -> str | None:
    if (record.outcome, record.runner, record.reason_code) != ("skipped", "EagerRunner", "gate_low_memory"):
        return f"{record.outcome} with {record.runner}: {record.reason}"
    return None


def _out_of_memory(record: RunRecord) -> str | None:
    if record.outcome != "oom" or record.oom_bucket is None or not record.advice:
        return f"{record.outcome}: {record.reason}"
    return None


def _run(plan: Plan) -> tuple[Step, RunRecord]:
    start = time.monotonic()
    record = run_capture(plan.settings)
    problem = plan.judge(record)
    detail = problem if problem is not None else _figures(record)
    status = "passed" if problem is None else "failed"
    return Step(plan.name, status, detail, time.monotonic() - start, record.id), record


def _figures(record: RunRecord) -> str:
    """What was measured, in a line; every figure with its unit."""
    if record.outcome != "captured":
        return record.reason
    from toolkit.views.frames import median_ratio, memory_words, seconds_words

    median = median_ratio(record)
    ratio = "n/a" if median is None else f"{median:.2f} x eager"
    used, took = memory_words(record.mem_usage_gib), seconds_words(record.capture_time_s)
    return f"{len(record.buckets)} buckets, {used}, {took}, replay {ratio}"


def _contract_steps(device: str) -> list[Step]:
    """The seam's contract, in a child of its own so that this process never holds memory on the device."""
    command = [sys.executable, "-P", "-c", "import toolkit.selfcheck as s, sys; s.contract_child(sys.argv[1])", device]
    start = time.monotonic()
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=CONTRACT_TIMEOUT_S, env=child_environment(), check=False
        )
    except subprocess.TimeoutExpired:
        step = Step("contract", "failed", f"no end after {CONTRACT_TIMEOUT_S} s", time.monotonic() - start)
        _say(step)
        return [step]
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    if lines and "refused" in lines[0]:
        from toolkit.errors import DeviceUnavailable

        raise DeviceUnavailable(lines[0]["refused"])
    steps = [
        Step(f"contract: {line['name']}", "passed" if line["passed"] else "failed", line["detail"], line["seconds"])
        for line in lines
    ]
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or ["no message"]
        detail = f"the child ended with {child.returncode}: {last[0]}"
        steps.append(Step("contract", "failed", detail, time.monotonic() - start))
    for step in steps:
        _say(step)
    return steps


def contract_child(device: str) -> None:
    """Entry of the contract's child process: one JSON line a check on standard output."""
    from toolkit.errors import InvalidInput
    from toolkit.prefill.devices import make_device
    from toolkit.prefill.devices.contract import CHECKS, run_check

    try:
        target = make_device(device, 1.0)
    except InvalidInput as error:
        print(json.dumps({"refused": str(error)}))
        return
    for name in CHECKS:
        start = time.monotonic()
        outcome = run_check(name, target)
        print(json.dumps({**asdict(outcome), "seconds": time.monotonic() - start}), flush=True)


def _say(step: Step) -> None:
    print(f"{step.status:7} {step.name} ({step.seconds:.1f} s){': ' if step.detail else ''}{step.detail}", flush=True)


def _write_results(out: Path, steps: Iterable[Step], records: list[RunRecord]) -> None:
    from toolkit.views.plots import plot_capture_time, plot_memory, plot_speed
    from toolkit.views.report import write_report
    from toolkit.views.sheet import figure_png

    rows = [asdict(step) for step in steps]
    pools = [
        {"record": record.id, "measured_on": record.device_label, **row} for record in records for row in record.pools
    ]
    write_report(records, out / "report.html", title="Prefill Lab selfcheck")
    try:
        _write_json(out / "steps.json", rows)
        _write_json(out / "memory_by_pool.json", pools)
        for record in records:
            for plot in (plot_memory, plot_capture_time, plot_speed) if record.buckets else ():
                write_whole(out / f"{record.id}-{plot.__name__}.png", figure_png(plot(record)))
    except OSError as error:
        raise StorageError(f"results could not be written to {out.name} ({error.strerror})") from None


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())
