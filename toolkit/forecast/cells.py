"""One cell of a policy map: settings in, every policy's outcome out, with what would have fitted.

A cell that cannot be planned is a cell with a reason, never an error. Two kinds of device are known: the cards of the
catalogue, by `plan_with`, and the accounted CPU device, by `toolkit.forecast.cpu_cells`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolkit.catalogue import resolve_model
from toolkit.errors import InvalidInput
from toolkit.forecast.engines import SGLANG
from toolkit.forecast.outcomes import PolicyOutcome
from toolkit.forecast.plan import Forecaster, Plan, forecaster, later_need, plan_with
from toolkit.forecast.plan_settings import PlanSettings
from toolkit.forecast.terms import Forecast, Range
from toolkit.forecast.verdicts import Fit, Room, would_fit
from toolkit.policies import get_policy
from toolkit.settings import CaptureSettings

Key = tuple[Any, ...]
"""What makes two captures the same but for their policy: model, device, dtype, backend, ladder, memory, needs."""


@dataclass(frozen=True, slots=True)
class Executed:
    """What a real capture did, as far as a map shows it; made from run records by `toolkit.runs.executed`.

    Attributes:
        key: of the cell.
        policy: who decided.
        run_id: of the record.
        measured_on: the device's label.
        outcome: what it led to, in the words of a plan.
        free_before_gib: GiB free before the capture.
    """

    key: Key
    policy: str
    run_id: str
    measured_on: str
    outcome: PolicyOutcome
    free_before_gib: float | None = None


@dataclass(frozen=True)
class CellPlan:
    """A cell before it is judged. Where `problem` says why it cannot be planned, nothing else is known.

    Attributes:
        problem: why there is nothing.
        engine: who forecasts.
        device: what is planned for.
        buckets: the ladder asked for.
        room: GiB free before the capture, and what is needed later.
        kv_cache_tokens: of a KV pool that is sized first.
        more_gib: GiB that a capture has besides where the KV pool is sized last.
        reserve_gib: what is to stay free beside such a pool, or it cannot be.
        forecast: of the whole ladder; None where no graph is captured.
        policies: what each leads to.
        ask: the forecast of any ladder.
        key: to find executed captures by; None where none can be the same.
    """

    problem: str | None = None
    engine: str = SGLANG
    device: str = ""
    buckets: tuple[int, ...] = ()
    room: Room = field(default_factory=lambda: Room(0.0, 0.0, 0.0))
    kv_cache_tokens: int | None = None
    more_gib: float = 0.0
    reserve_gib: float = 0.0
    forecast: Forecast | None = None
    policies: dict[str, PolicyOutcome] = field(default_factory=dict)
    ask: Callable[[tuple[int, ...]], Forecast] | None = None
    key: Key | None = None

    @property
    def whole(self) -> Fit | None:
        """Whether the whole ladder fits beside a KV pool that is sized first; None without a forecast."""
        if self.forecast is None:
            return None
        return would_fit(self.forecast.peak, self.forecast.total, self.room)

    def own(self, name: str, outcome: PolicyOutcome) -> Fit | None:
        """Whether what the policy `name` captures fits where it captures it; None without a forecast."""
        if self.forecast is None or self.ask is None:
            return None
        kept = [bucket for bucket in self.buckets if bucket not in outcome.trimmed]
        forecast = self.ask(tuple(kept)) if outcome.trimmed and kept else self.forecast
        if get_policy(name).kv_first:
            return would_fit(forecast.peak, forecast.total, self.room)
        stays = forecast.total + Range.exact(1024 * self.reserve_gib)
        return would_fit(forecast.peak, stays, self.room.with_more(self.more_gib))


def cell_key(settings: PlanSettings | CaptureSettings, device: str, buckets: tuple[int, ...], fraction: Any) -> Key:
    """What a capture under these settings is found by."""
    memory = ("free", settings.free_memory_gib) if settings.free_memory_gib is not None else ("fraction", fraction)
    window = (settings.request_slots, settings.max_context) if settings.resolved_backend == "full" else ()
    return (
        resolve_model(settings.model).id,
        device,
        settings.dtype,
        settings.resolved_backend.value,
        bool(settings.locked_keys),
        settings.compiler,
        window,
        tuple(sorted(buckets)),
        memory,
        settings.reserve_gib,
        settings.post_capture_need_gib,
        getattr(settings, "role", "target"),
    )


class GpuCells:
    """Cells on cards of the catalogue; forecasts are shared between cells that differ in memory alone."""

    settings_class = PlanSettings

    def __init__(self) -> None:
        self._forecasters: dict[Key, Forecaster] = {}

    def plan(self, settings: PlanSettings) -> CellPlan:
        """The cell of some settings."""
        try:
            ask = self._forecaster(settings)
            plan = plan_with(settings, ask)
        except InvalidInput as error:
            return CellPlan(problem=str(error))
        return of_plan(plan, ask)

    def _forecaster(self, settings: PlanSettings) -> Forecaster:
        names = ("model", "gpu", "tp", "dtype", "weights", "compiler", "request_slots", "max_context", "engine")
        key = tuple(getattr(settings, name) for name in names)
        if key not in self._forecasters:
            self._forecasters[key] = forecaster(settings)
        return self._forecasters[key]


def of_plan(plan: Plan, ask: Forecaster) -> CellPlan:
    """The cell of a plan that was made."""
    settings, line = plan.settings, plan.ledger.line("free_before_capture")
    later, _ = later_need(settings, plan.resolved)
    comparable = settings.engine != SGLANG and settings.tp == 1 and settings.weights in (None, "bf16")
    same = settings.kv_dtype in (None, settings.dtype)
    return CellPlan(
        engine=settings.engine,
        device=plan.gpu.id,
        buckets=plan.buckets,
        room=Room(line.gib, line.low_gib, line.high_gib, later),
        kv_cache_tokens=plan.ledger.kv_cache_tokens,
        more_gib=plan.kv_last.room_gib,
        reserve_gib=plan.reserve_gib,
        forecast=plan.forecast,
        policies=plan.policies,
        ask=lambda buckets: ask(plan.model, plan.backend, buckets),
        key=cell_key(settings, plan.gpu.id, plan.buckets, plan.mem_fraction) if comparable and same else None,
    )
