"""A forecast beside what a log measured, and what each policy would decide on the memory that really was free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from toolkit.errors import PrefillLabError
from toolkit.serverlogs.capture_report import CaptureReport, capture_reports
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.findings.room import ForecastRoom
from toolkit.serverlogs.ledger import RankLedger, backed_first_gib, rank_ledgers, tightest
from toolkit.serverlogs.log_choices import LogChoices, log_choices
from toolkit.serverlogs.measured_policies import PolicyOutcome, forecast_room, verdicts
from toolkit.serverlogs.model_match import mismatch
from toolkit.serverlogs.startup import Startup

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

_JUDGED = ("prefill graph", "peak inside the capture")


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure measured and forecast; None where the log does not say, or the forecast has no range."""

    what: str
    measured: float | None
    forecast: float
    low: float | None
    high: float | None
    unit: str = "GiB"


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
        verdicts: by policy; empty when the log does not say what was free, or is of another model or card.
        assumptions: of the forecast, and what it cannot know about this server.
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
        return f"{plainly}; this server is another ({self.mismatch.code})" if self.mismatch else plainly

    @property
    def findings(self) -> list[Finding]:
        """That the log is of another model or card, else measurements of the graphs outside the forecast's range."""
        return [self.mismatch] if self.mismatch is not None else self._misses()

    def _misses(self) -> list[Finding]:
        found: list[Finding] = []
        for row in self.rows if not self.shared else ():
            if row.what not in _JUDGED or row.measured is None or row.low is None or row.high is None:
                continue
            if row.low <= row.measured <= row.high:
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
    said = log_choices(startups, startup, ledger, capture, version)
    if said.refused:
        return None, (f"no forecast: {said.refused}",)
    try:
        plan = _plan(said, name, gpu)
        return _beside(startup, ledgers, ledger, capture, said, plan), ()
    except PrefillLabError as error:
        return None, (f"no forecast: {error}",)


def _plan(said: LogChoices, model: str, gpu: str | None) -> Plan:
    from toolkit.forecast.plan import make_plan
    from toolkit.forecast.plan_settings import PlanSettings

    choices = said.settings | {"model": model, "gpu": gpu}
    plan = make_plan(PlanSettings.create(**choices))
    if said.most_tokens is None or "buckets" in choices or not 4 <= said.most_tokens < max(plan.buckets, default=0):
        return plan
    return make_plan(PlanSettings.create(**choices, max_tokens=said.most_tokens))  # it limits the default ladder too


def _beside(
    startup: Startup,
    ledgers: list[RankLedger],
    ledger: RankLedger,
    capture: CaptureReport | None,
    said: LogChoices,
    plan: Plan,
) -> Measured:
    other = mismatch(startup, ledgers, ledger, plan, weighed=said.weighed)
    judged: tuple[PolicyOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    room, free = None, _free_before(ledger, capture)
    if free and other is None:
        now = _with_decode_done(plan) if _decode_is_done(startup, ledger, capture) else plan
        judged, notes = verdicts(
            *(now, free, ledger, said.most_tokens, said.backend_named),
            sized_last=backed_first_gib(startup, ledger) != ledger.kv_cache_gib,
        )
        room = forecast_room(startup.index, now, free)
    capped = _capped_words(plan, said.most_tokens)
    return Measured(
        startup=startup.index,
        rank=ledger.rank,
        model=plan.model.id,
        gpu=plan.gpu.id,
        sglang_version=plan.release.version,
        rows=tuple(_rows(plan, ledger, capture, said.most_tokens)),
        verdicts=judged,
        assumptions=(*plan.assumptions, *said.notes, *capped, *notes),
        lines=tuple(sorted(set(capture.lines))) if capture is not None else (),
        whole=capture is not None and capture.outcome == "captured",
        shared=capture is not None and capture.shared,
        mismatch=other,
        room=room,
    )


def _decode_is_done(startup: Startup, ledger: RankLedger, capture: CaptureReport | None) -> bool:
    """Whether the decode graphs were captured before what was free was read, as old builds do."""
    if capture is None or not capture.lines:
        return False
    ends = [each.end for each in startup.captures if each.phase == "decode" and each.rank.label == ledger.rank]
    return any(end is not None and end.line < capture.lines[0] for end in ends)


def _with_decode_done(plan: Plan) -> Plan:
    """The plan without a later need of decode graphs."""
    return replace(plan, resolved=replace(plan.resolved, decode_on=False))


def _capped_words(plan: Plan, most: int | None) -> tuple[str, ...]:
    tokens = plan.ledger.kv_cache_tokens
    if most is None or most >= tokens:
        return ()
    return (f"KV pool: limited by max_total_tokens to {most:,} tokens; memory has room for {tokens:,}",)


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


def _rows(plan: Plan, ledger: RankLedger, capture: CaptureReport | None, most_tokens: int | None) -> Iterator[Compared]:
    yield from _memory_rows(plan, ledger, most_tokens)
    if plan.forecast is None or capture is None:
        return
    figures = (
        ("prefill graph", capture.mem_usage_gib, plan.forecast.total),
        ("peak inside the capture", capture.peak_need_gib, plan.forecast.peak),
    )
    for what, measured, mib in figures:
        yield Compared(what, measured, mib.mid / 1024, mib.low / 1024, mib.high / 1024)
    if plan.forecast.capture_s:
        from toolkit.forecast.capture_time import seconds_range

        span = seconds_range(plan.forecast.engine, len(plan.forecast.buckets))
        low, high = span if span is not None else (None, None)
        yield Compared("capture time", capture.elapsed_s, sum(plan.forecast.capture_s), low, high, "s")


def _memory_rows(plan: Plan, ledger: RankLedger, most_tokens: int | None) -> Iterator[Compared]:
    """Weights, KV pool and what is free; a limit of the pool's tokens leaves free what it does not take."""
    tokens = plan.ledger.kv_cache_tokens
    allowed = min(tokens, most_tokens) if most_tokens is not None else tokens
    share = allowed / tokens if tokens else 1.0
    weights, pool, free = (plan.ledger.line(name) for name in ("weights", "kv_cache", "free_before_capture"))
    yield Compared("weights", ledger.weights_gib, weights.gib, weights.low_gib, weights.high_gib)
    yield Compared("KV pool", ledger.kv_cache_gib, pool.gib * share, pool.low_gib * share, pool.high_gib * share)
    # A bound of what is free belongs to the other bound of the pool.
    before = (free.gib + pool.gib * (1 - share), free.low_gib + pool.high_gib * (1 - share))
    highest = free.high_gib + pool.low_gib * (1 - share)
    yield Compared("free before capture", ledger.free_before_capture_gib, *before, highest)
    yield Compared("KV tokens", ledger.kv_cache_tokens, float(allowed), float(allowed), float(allowed), "tokens")
