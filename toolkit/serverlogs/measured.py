"""A forecast beside what a log measured, and what each policy would decide on the memory that really was free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import PrefillLabError
from toolkit.serverlogs.capture_report import CaptureReport, capture_reports
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.findings.room import ForecastRoom
from toolkit.serverlogs.ledger import RankLedger, rank_ledgers, tightest
from toolkit.serverlogs.model_match import mismatch
from toolkit.serverlogs.startup import Startup

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan
    from toolkit.policies import LadderNeed

_KV_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float8_e4m3fn": "fp8", "fp8_e4m3": "fp8"}
_JUDGED = ("prefill graph", "peak inside the capture")


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure measured and forecast; None where the log does not say."""

    what: str
    measured: float | None
    forecast: float
    low: float
    high: float
    unit: str = "GiB"


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What a policy would do with the measured free memory."""

    policy: str
    outcome: str
    runner: str | None
    reason: str
    free_after_gib: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The forecast of one start beside its log.

    Attributes:
        startup: number of the start, from 0.
        rank: the rank measured: the one with the least free memory.
        model: catalogue id or hub id.
        gpu: catalogue id of the card.
        sglang_version: whose rules the forecast uses.
        rows: figures side by side.
        verdicts: by policy; empty when the log does not say what was free, or is of another model.
        assumptions: of the forecast.
        lines: where that rank's prefill capture begins and ends.
        whole: whether that capture came to its end; if not, its peak is a lower bound.
        shared: whether its figures include another process, so that they say nothing against the forecast.
        mismatch: why the forecast is not about this server; None when nothing speaks against it.
        room: what the forecast says fits into the memory that was free; None where it says nothing about this server.
    """

    startup: int
    rank: str
    model: str
    gpu: str
    sglang_version: str
    rows: tuple[Compared, ...]
    verdicts: tuple[PolicyOutcome, ...]
    assumptions: tuple[str, ...]
    lines: tuple[int, ...] = ()
    whole: bool = True
    shared: bool = False
    mismatch: Finding | None = None
    room: ForecastRoom | None = None

    @property
    def about(self) -> str:
        """What the forecast is about, and that it is not about this server where that shows."""
        plainly = f"{self.model} on {self.gpu}, rules of SGLang {self.sglang_version}"
        return f"{plainly}; this server is another (MODEL_MISMATCH)" if self.mismatch else plainly

    @property
    def findings(self) -> list[Finding]:
        """That the log is of another model, else its measurements of the graphs outside the forecast's range."""
        return [self.mismatch] if self.mismatch is not None else self._misses()

    def _misses(self) -> list[Finding]:
        found: list[Finding] = []
        for row in self.rows if not self.shared else ():
            if row.what not in _JUDGED or row.measured is None or row.low <= row.measured <= row.high:
                continue
            if row.measured < row.low and not self.whole:
                continue  # it needed at least that much
            side = "above" if row.measured > row.high else "below"
            found.append(
                Finding(
                    "ESTIMATE_MISS",
                    "info",
                    f"The {row.what} measured {row.measured:.2f} GiB, {side} the forecast of {row.forecast:.2f} GiB "
                    f"({row.low:.2f} to {row.high:.2f}) for {self.model} on {self.gpu}.",
                    self.lines,
                    "Check that model, card, dtypes and ladder are those of the log before trusting either.",
                    startups=(self.startup,),
                )
            )
        return found


def beside_forecast(
    startups: Sequence[Startup], model: str | None, gpu: str, version: str | None
) -> tuple[Measured | None, tuple[str, ...]]:
    """The forecast for the last SGLang start that says anything about memory, or a note why there is none."""
    from toolkit.forecast.plan import make_plan
    from toolkit.forecast.plan_settings import PlanSettings

    found = [(startup, ledgers) for startup in startups if (ledgers := rank_ledgers(startup))]
    if not found or found[-1][0].engine != "sglang":
        return None, ("no forecast: the log has no memory figures of an SGLang server",)
    startup, ledgers = found[-1]
    name = model or known_model(startup)
    if name is None:
        return None, ("no forecast: the log does not name a model of the catalogue; give model",)
    ledger = tightest(ledgers)
    assert ledger is not None
    capture = _prefill(startup, ledger)
    choices = _choices(startup, capture) | {"model": name, "gpu": gpu}
    if version is not None:
        choices["sglang_version"] = version
    try:
        plan = make_plan(PlanSettings.create(**choices))
        other = mismatch(startup, ledger, plan)
        verdicts: tuple[PolicyOutcome, ...] = ()
        room, free = None, _free_before(ledger, capture)
        if free and other is None:
            choices.pop("mem_fraction", None)
            on_measured = make_plan(PlanSettings.create(**choices | {"free_memory_gib": free}))
            verdicts, room = _verdicts(on_measured), _room(startup.index, on_measured)
    except PrefillLabError as error:
        return None, (f"no forecast: {error}",)
    rows = tuple(_rows(plan, ledger, capture))
    parts = startup.index, ledger.rank, plan.model.id, plan.gpu.id, plan.release.version
    lines = tuple(sorted(set(capture.lines))) if capture is not None else ()
    whole, shared = (capture.outcome == "captured", capture.shared) if capture is not None else (False, False)
    return Measured(*parts, rows, verdicts, plan.assumptions, lines, whole, shared, other, room), ()


def known_model(startup: Startup) -> str | None:
    """The catalogue's id for the model that the arguments name. What a log names is never fetched or opened."""
    from toolkit.catalogue import search_models

    path = startup.start.values.get("model_path") if startup.start else None
    if not isinstance(path, str):
        return None
    return next((entry.id for entry in search_models("") if entry.hub_id.lower() == path.lower()), None)


def _prefill(startup: Startup, ledger: RankLedger) -> CaptureReport | None:
    found = [each for each in capture_reports(startup) if each.phase == "prefill" and each.role == "target"]
    of_rank = [each for each in found if each.rank == ledger.rank]
    return next(iter(of_rank or found), None)


def _free_before(ledger: RankLedger, capture: CaptureReport | None) -> float | None:
    """Of the prefill capture where the log tells, else of the first one."""
    own = capture.free_before_gib if capture is not None and capture.rank == ledger.rank else None
    return own if own is not None else ledger.free_before_capture_gib


def _room(startup: int, plan: Plan) -> ForecastRoom | None:
    """What fits, as the budgeted policy judges it beside: peak and reserve, and the graphs captured later."""
    from toolkit.forecast.needs import ladder_need, ladder_needs
    from toolkit.forecast.plan import forecaster, later_need

    if plan.forecast is None or ladder_need(plan.forecast) is None:
        return None
    ask, free = forecaster(plan.settings), plan.free_before_gib
    later, _ = later_need(plan.settings, plan.resolved)

    def fits(need: LadderNeed) -> bool:
        return max(need.peak_gib, need.total_gib + later) <= free - plan.reserve_gib

    needs = ladder_needs(lambda buckets: ask(plan.model, plan.backend, buckets), plan.buckets, fits)
    best = next(filter(fits, needs), None)
    peak = plan.forecast.peak
    return ForecastRoom(
        startup,
        free,
        peak.mid / 1024,
        peak.low / 1024,
        peak.high / 1024,
        plan.forecast.total.mid / 1024 + later,
        tuple(sorted(best.buckets)) if best is not None else (),
        best.peak_gib if best is not None else None,
        best is not None and len(best.buckets) == len(plan.buckets),
    )


def _choices(startup: Startup, capture: CaptureReport | None) -> dict[str, Any]:
    """Plan settings that the log shows; everything else stays at the server's default."""
    values = startup.start.values if startup.start else {}
    limits = startup.limits[0] if startup.limits else None
    found: dict[str, Any] = {
        "tp": values.get("tp_size") or _tensor_ranks(startup),
        "mem_fraction": values.get("mem_fraction_static"),
        "chunked_prefill_size": _positive(values.get("chunked_prefill_size"), limits and limits.chunked_prefill_size),
        "max_running_requests": _positive(values.get("max_running_requests"), limits and limits.max_running_requests),
        "attention_backend": values.get("prefill_attention_backend") or values.get("attention_backend"),
        "kv_dtype": _kv_dtype(startup),
        "weights": _weights(startup),
    }
    if capture is not None and capture.buckets:
        found["buckets"] = list(capture.buckets)
    # A backend that nobody named must stay the default: naming one bypasses rules and the gate.
    named = values.get("cuda_graph_backend_prefill") or (capture.backend if capture else None)
    if named in ("full", "tc_piecewise") or values.get("cuda_graph_backend_prefill") == "breakable":
        found["backend"] = named
    return {key: value for key, value in found.items() if value is not None}


def _positive(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _tensor_ranks(startup: Startup) -> int:
    return max((rank.tp for rank in startup.ranks if rank.tp is not None), default=0) + 1


def _kv_dtype(startup: Startup) -> str | None:
    pools = [pool for log in startup.ranks.values() for pool in log.kv_pools]
    return _KV_DTYPES.get(pools[0].dtype or "") if pools else None


def _weights(startup: Startup) -> str | None:
    ends = [each.end for log in startup.ranks.values() for each in log.weights[:1] if each.end is not None]
    quant = ends[0].quant or "" if ends else ""
    return "fp8" if "fp8" in quant else "int4" if quant.startswith(("awq", "gptq")) else None


def _rows(plan: Plan, ledger: RankLedger, capture: CaptureReport | None) -> list[Compared]:
    names = (
        ("weights", ledger.weights_gib, "weights"),
        ("KV pool", ledger.kv_cache_gib, "kv_cache"),
        ("free before capture", ledger.free_before_capture_gib, "free_before_capture"),
    )
    rows = []
    for what, measured, name in names:
        line = plan.ledger.line(name)
        rows.append(Compared(what, measured, line.gib, line.low_gib, line.high_gib))
    tokens = float(plan.ledger.kv_cache_tokens)
    rows.append(Compared("KV tokens", ledger.kv_cache_tokens, tokens, tokens, tokens, "tokens"))
    if plan.forecast is not None and capture is not None:
        figures = (
            ("prefill graph", capture.mem_usage_gib, plan.forecast.total),
            ("peak inside the capture", capture.peak_need_gib, plan.forecast.peak),
        )
        for what, measured, mib in figures:
            rows.append(Compared(what, measured, mib.mid / 1024, mib.low / 1024, mib.high / 1024))
        if plan.forecast.capture_s:
            seconds = sum(plan.forecast.capture_s)
            rows.append(Compared("capture time", capture.elapsed_s, seconds, seconds, seconds, "s"))
    return rows


def _verdicts(plan: Plan) -> tuple[PolicyOutcome, ...]:
    return tuple(
        PolicyOutcome(name, one.outcome, one.runner, one.reason, one.free_after_gib)
        for name, one in plan.policies.items()
    )
