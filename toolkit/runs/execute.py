"""One capture from settings to record: build, capture, check, measure. Runs in the child process."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.catalogue import resolve_model
from toolkit.errors import PrefillLabError, one_line
from toolkit.policies import get_policy
from toolkit.runs.advice import Known, Shortfall, advise, shortfall
from toolkit.runs.provenance import software_versions
from toolkit.runs.record import BucketFigures, ReplayCheck, RunRecord, SpeedPoint
from toolkit.settings import CaptureSettings

if TYPE_CHECKING:
    from toolkit.policies import LadderNeed
    from toolkit.prefill.build import Built
    from toolkit.prefill.devices.base import Device
    from toolkit.prefill.runners import PrefillCudaGraphRunner
    from toolkit.prefill.setup import GraphCapture

Emit = Callable[[dict[str, Any]], None]
SPEED_POINTS = 12
"""Buckets at which replay is timed against eager; more would double the time of a run on a CPU."""


def execute(
    settings: CaptureSettings, emit: Emit, cancelled: Callable[[], bool], *, run_id: str, created: str
) -> RunRecord:
    """Do what `settings` ask for and return the record of it, whatever the outcome.

    Raises InvalidInput for settings that turn out to be unusable on this machine; nothing is recorded then.
    """
    get_policy(settings.policy)
    resolve_model(settings.model)
    from toolkit.prefill.devices import make_device

    run = _Run(settings, make_device(settings.device, settings.device_memory_gib), emit, cancelled)
    run.perform()
    return run.record(run_id, created)


def _busy_cores() -> str | None:
    """A sentence when more work runs on this machine than it has cores, so that CPU times are inflated."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    # This run alone keeps every core busy; only what goes well beyond that belongs to others.
    if load <= 1.5 * cores + 0.5:
        return None
    return f"the machine was busy (load {load:.1f} on {cores} cores): times are inflated by other work"


class _Run:
    """The state of one run; `fields` are what the record will hold, filled as figures become known."""

    def __init__(self, settings: CaptureSettings, device: Device, emit: Emit, cancelled: Callable[[], bool]) -> None:
        from toolkit.prefill.build import Built

        self.settings, self.device, self.cancelled = settings, device, cancelled
        self._emit = emit
        self.built: Built = Built()
        self.log: list[str] = []
        self.notes: list[str] = []
        self.fields: dict[str, Any] = {"device": device.facts()}
        self.capture: GraphCapture | None = None
        self.known = Known()
        self.others = [device.other_processes()]

    def emit(self, event: dict[str, Any]) -> None:
        """Send an event and keep its log line or note for the record."""
        if event["event"] == "log":
            self.log.append(event["line"])
        elif event["event"] == "note":
            self.notes.append(event["text"])
        self._emit(event)

    def stage(self, name: str, detail: str | None = None) -> None:
        """Say what begins."""
        self.emit({"event": "stage", "name": name, "detail": detail})

    def note(self, text: str) -> None:
        """Say something that belongs to the record."""
        self.emit({"event": "note", "text": text})

    def perform(self) -> None:
        """Build, capture, check, measure; running out of memory on the way is an outcome."""
        from toolkit.prefill.build import NoMemoryForKV, build_model_runner

        self._emit({"event": "facts", **self.fields})
        try:
            runner = build_model_runner(self.settings, self.device, self.built, self.stage)
        except NoMemoryForKV as error:
            return self._end("oom", "no_memory_for_kv", str(error))
        except Exception as error:
            if not self.device.is_out_of_memory(error):
                raise
            self.known = Known(auto_fraction=self._auto_fraction())
            return self._end("oom", "out_of_memory_before_capture", f"before the capture: {one_line(str(error))}")
        self._after_build(runner)
        self._capture(runner)

    def _after_build(self, runner: Any) -> None:
        sizes = self.built.sizes
        assert sizes is not None
        self.fields["kv_cache_tokens"] = runner.kv_pool.num_tokens
        self.fields["mem_fraction_static"] = sizes.mem_fraction_static
        self.fields["ledger"] = self.built.ledger
        self._emit({"event": "facts", **self.fields})
        if self.built.weights_kind == "random":
            self.note("weights are random: memory and times are those of the model, its answers mean nothing")

    def _capture(self, runner: Any) -> None:
        from toolkit.prefill.runners import EagerRunner
        from toolkit.prefill.setup import capture_prefill_graph

        self.stage("capture", f"{runner.backend}, policy {runner.policy}")
        eager = EagerRunner(runner)
        result = capture_prefill_graph(
            model_runner=runner,
            eager_runner=eager,
            on_event=self.emit,
            cancelled=self.cancelled,
            foresee=self._foresee_for_policy,
        )
        self.capture = result
        self.others.append(self.device.other_processes())
        self._take_capture(result)
        later = self._pool_share(result.starved_gib) if result.starved_gib else None
        self.known = Known(self._shortfall(result), later)
        if result.outcome == "captured":
            self._after_capture(result)

    def _foresee(self, buckets: tuple[int, ...], suits: Callable[[LadderNeed], bool]) -> tuple[LadderNeed, ...]:
        from toolkit.forecast.needs import ladder_needs
        from toolkit.runs.foretell import forecast_run

        assert self.built.runner is not None
        self.stage("forecast", f"up to {max(buckets)} tokens")
        device, runner = self.fields["device"], self.built.runner
        there = (device, runner.kv_pool.num_tokens, max(runner.buckets))
        try:
            return ladder_needs(lambda ladder: forecast_run(self.settings, ladder, *there), buckets, suits)
        except PrefillLabError as error:
            self.note(f"no forecast: {error}")
            return ()

    def _foresee_for_policy(
        self, buckets: tuple[int, ...], suits: Callable[[LadderNeed], bool]
    ) -> tuple[LadderNeed, ...]:
        needs = self._foresee(buckets, suits)
        self.stage("capture", f"{self.settings.resolved_backend.value}, policy {self.settings.policy}")
        return needs

    def _shortfall(self, result: GraphCapture) -> Shortfall | None:
        """What is missing where not every bucket got its graph for want of memory, so that advice can be computed."""
        facts = result.facts
        if facts is None or facts.kv_room_gib is not None or result.outcome not in ("captured", "skipped", "oom"):
            return None
        if result.oom_bucket is None and not result.trimmed:
            return None
        short = shortfall(self._foresee(facts.buckets, facts.fits), facts)
        return short and replace(short, pool_gib=self._pool_share(short.more_gib))

    def _auto_fraction(self) -> float | None:
        """What a server would compute for this device; None where it is too small for the heuristic."""
        from toolkit.memory.ledger import resolve_sizes

        settings = self.settings.model_copy(update={"mem_fraction": "auto"})
        try:
            return resolve_sizes(settings, self.device.total_mib, mla=self.built.mla).mem_fraction_static
        except PrefillLabError:
            return None

    def _pool_share(self, more_gib: float) -> float | None:
        """GiB of rows that the KV pool has to lose, so that its tensors, in whole steps, give back so much."""
        from toolkit.prefill.elastic_kv import pool_bytes, tokens_that_fit
        from toolkit.prefill.runners import GIB

        assert self.built.runner is not None
        pool, step = self.built.runner.kv_pool, self.device.backing_step
        rows = pool.row_bytes
        room = pool_bytes(rows, pool.num_tokens, step) - math.ceil(more_gib * GIB)
        kept = tokens_that_fit(rows, room, step, pool.num_tokens)
        return (pool.num_tokens - kept) * sum(rows) / GIB if kept else None

    def _take_capture(self, result: GraphCapture) -> None:
        fields, ledger = self.fields, dict(self.built.ledger or {})
        fields.update(
            free_before_gib=result.free_before_gib,
            free_after_gib=result.free_after_gib,
            mem_usage_gib=result.memory_usage_gib,
            peak_usage_gib=result.peak_usage_gib,
            capture_time_s=result.capture_time_s,
            capture_order=[figure.num_tokens for figure in result.figures],
            oom_bucket=result.oom_bucket,
            trimmed=list(result.trimmed),
            decision=result.decision.to_dict() if result.decision is not None else None,
            starved_gib=result.starved_gib,
            pools=self.device.memory_by_pool(),
            buckets=[BucketFigures.model_validate(figure, from_attributes=True) for figure in result.figures],
        )
        ledger["prefill_graph_gib"] = result.memory_usage_gib
        ledger["free_gib"] = result.free_after_gib
        self._take_kv_pool(ledger)
        fields["ledger"] = ledger
        # If this process ends before its record, the parent still knows what the capture measured.
        known = ("kv_cache_tokens", "free_after_gib", "mem_usage_gib", "peak_usage_gib", "capture_time_s", "ledger")
        self._emit({"event": "facts", **{key: fields[key] for key in known}})
        runner = type(result.runner).__name__ if result.runner is not None else None
        self._end(result.outcome, result.reason_code, result.reason, runner)

    def _take_kv_pool(self, ledger: dict[str, float | None]) -> None:
        """A pool that was sized after the capture: its figures are known only now."""
        from toolkit.prefill.elastic_kv import ElasticKVPool
        from toolkit.prefill.runners import GIB

        runner = self.built.runner
        if runner is not None and isinstance(runner.kv_pool, ElasticKVPool):
            self.fields["kv_cache_tokens"] = runner.kv_pool.num_tokens
            ledger["kv_cache_gib"] = runner.kv_pool.backed_bytes / GIB

    def _after_capture(self, result: GraphCapture) -> None:
        runner: Any = result.runner
        if result.memory_usage_gib is None:
            self.note(
                "memory of the graphs is n/a: compiled code ran in the pool, whose inside the CPU device cannot see"
            )
        self._try("the comparison of replays with eager", self._check, runner)
        if self.fields["outcome"] == "captured":
            self._try("the time of replays against eager", self._speed, runner)

    def _try(self, what: str, step: Callable[[PrefillCudaGraphRunner], None], runner: PrefillCudaGraphRunner) -> None:
        """Look at what was captured. Eager passes may not fit beside the graphs: that is no fault of the graphs."""
        try:
            step(runner)
        except Exception as error:
            if not self.device.is_out_of_memory(error):
                words = one_line(f"{type(error).__name__}: {error}")[:500]
                return self._end("failed", "replay_error", f"captured, but {what} failed: {words}")
            words = one_line(str(error))
        else:
            return None
        self.device.empty_cache()  # out here the failed pass is gone, and what it held with it
        self.note(f"{what} is n/a: an eager pass does not fit beside the graphs ({words})")

    def _check(self, runner: PrefillCudaGraphRunner) -> None:
        from toolkit.prefill.check import check_replays, next_token
        from toolkit.prefill.reference import check_reference

        self.stage("compare with plain Transformers", "two packed requests")
        reference = check_reference(runner.model_runner, self.built.vocabulary, self.settings.seed)
        if reference.problem is not None:
            return self._end("failed", "reference_mismatch", reference.problem)
        self.stage("check replays", f"{len(runner.ladder)} buckets, random order")
        result = check_replays(runner, self.built.vocabulary, self.settings.seed, self.emit)
        token = None
        if self.settings.prompt is not None:
            token, why = next_token(runner, self.settings.prompt)
            if token is None:
                self.note(f"no next token for the prompt: {why}")
        self.fields["replay_check"] = ReplayCheck(
            bit_equal=result.bit_equal,
            max_abs_diff=result.max_abs_diff,
            tolerance=result.tolerance,
            tokens_checked=result.tokens_checked,
            prompt=self.settings.prompt,
            next_token=token,
        )
        if result.problem is not None:
            self._end("failed", "replay_mismatch", result.problem)

    def _speed(self, runner: PrefillCudaGraphRunner) -> None:
        from toolkit.prefill.speed import measure_speed, spread

        buckets = spread(runner.ladder, SPEED_POINTS)
        self.stage("time replay against eager", f"{len(buckets)} buckets")
        self.fields["speed"] = [
            SpeedPoint.model_validate(figure, from_attributes=True)
            for figure in measure_speed(runner, buckets, on_event=self.emit)
        ]

    def _end(self, outcome: str, code: str, reason: str, runner: str | None = None) -> None:
        self.fields.update(outcome=outcome, reason_code=code, reason=reason, runner=runner)
        self.fields.setdefault("ledger", self.built.ledger or {})
        if self.built.sizes is not None:
            self.fields.setdefault("mem_fraction_static", self.built.sizes.mem_fraction_static)

    def record(self, run_id: str, created: str) -> RunRecord:
        """The record of what happened."""
        known = [count for count in self.others if count is not None]
        others = max(known) if known else None
        if others:
            self.note(
                f"{others} other processes used the device: free memory and memory usage are not this run's alone"
            )
        usage = self.fields.get("mem_usage_gib")
        if usage is not None and usage < 0:
            self.note("memory usage is negative: something else gave memory back during the capture")
        if self.device.kind == "cpu":
            busy = _busy_cores()
            if busy is not None:
                self.note(busy)
            self.note(
                "memory is accounted by a model of the CUDA allocator against a declared capacity; times are CPU times"
            )
        settings = {
            **self.settings.model_dump(mode="json"),
            "locked_keys": sorted(map(list, self.settings.locked_keys)),
        }
        settings["resolved_backend"] = self.settings.resolved_backend.value
        fields = dict(self.fields)
        return RunRecord(
            id=run_id,
            created=created,
            settings=settings,
            software=software_versions(),
            other_processes=others,
            weights=self.built.weights_kind,
            advice=advise(fields, self.settings, self.known),
            log=self.log,
            notes=self.notes,
            **fields,
        )
