"""A plan: what a server would do with its memory, what its prefill graphs will cost, and whether they fit.

Nothing is captured and no GPU is looked for. Settings go in, a frozen `Plan` comes out; the same settings give the
same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.catalogue import resolve_model
from toolkit.errors import InvalidInput
from toolkit.forecast.assumptions import DECODE_GRAPHS, context_gib
from toolkit.forecast.engines import SGLANG, ForecastRequest, get_engine
from toolkit.forecast.kv_last import KvLast, planned_cell, whole_pool
from toolkit.forecast.model_facts import ModelFacts, model_facts, unplannable
from toolkit.forecast.outcomes import PolicyOutcome, Situation, plan_policy
from toolkit.forecast.plan_ledger import Ledger, LedgerFacts, LedgerLine, build_ledger, with_graphs
from toolkit.forecast.plan_notes import ESTIMATED, assumptions, plan_notes
from toolkit.forecast.plan_settings import ITEMSIZES, PlanSettings
from toolkit.forecast.terms import ZERO, Forecast, Range
from toolkit.hardware import GpuSpec, resolve_gpu
from toolkit.memory.kv_cells import KvCell
from toolkit.memory.ledger import MIN_AUTO_FRACTION
from toolkit.memory.post_capture import Condition
from toolkit.memory.release import Release, get_release
from toolkit.memory.rules import Resolution, ServerFacts, resolve_server
from toolkit.policies import mib_or_gib, reserve_gib, starved_gib
from toolkit.settings import Backend

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Plan:
    """What would happen, on one rank. `pandas` views of it are the `*_frame` properties; GiB is 2**30 bytes.

    Attributes:
        settings: what was asked.
        model: facts about the model.
        gpu: the card.
        release: the SGLang version whose rules decide.
        resolved: what that version makes of the settings.
        backend: the backend that is planned.
        buckets: the ladder that a capture is asked for; empty where no graph is captured.
        mem_fraction: `mem_fraction_static`, None when free memory was given.
        lines: the ledger, in the order in which memory is taken.
        ledger: its figures.
        cell: what a token takes in the KV pool.
        kv_last: of a KV pool that is sized after the capture.
        forecast: of the whole ladder, None where no graph is captured.
        policies: the outcome under each policy.
        reserve_gib: what is to stay free after the capture.
        assumptions: what was taken for granted, in words.
        notes: what to keep in mind when the plan is read.
    """

    settings: PlanSettings
    model: ModelFacts
    gpu: GpuSpec
    release: Release
    resolved: Resolution
    backend: Backend
    buckets: tuple[int, ...]
    mem_fraction: float | None
    lines: tuple[LedgerLine, ...]
    ledger: Ledger
    cell: KvCell
    kv_last: KvLast
    forecast: Forecast | None
    policies: dict[str, PolicyOutcome]
    reserve_gib: float
    assumptions: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def free_before_gib(self) -> float:
        """GiB free on each rank just before the capture."""
        return self.ledger.free_before_gib

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """What to do next, most useful first. Worked out when it is asked for: values that work take more plans."""
        from toolkit.forecast.advice import advise_plan

        return tuple(advise_plan(self))

    @property
    def holds_bucket(self) -> bool:
        """Whether a KV pool that is sized first holds one full bucket of tokens."""
        return self.ledger.kv_cache_tokens >= self.kv_last.first_tokens

    @property
    def summary(self) -> str:
        """Whether it fits, in one sentence: needed, free, what the graphs keep, how long."""
        if self.forecast is None:
            return "no prefill graph: " + next((one.reason for one in self.policies.values()), "disabled")
        peak, total = self.forecast.peak, self.forecast.total
        free = self.ledger.line("free_before_capture")
        # Of the whole ladder beside a KV pool that is sized first, whatever a policy makes of it.
        certain = peak.high <= 1024 * free.low_gib
        word = "does not fit" if peak.mid > 1024 * free.gib else "fits" if certain else "may not fit"
        lacking = starved_gib(free.gib - total.mid / 1024, self.later_gib) if peak.mid <= 1024 * free.gib else 0.0
        if all(one.outcome == "skipped" for one in self.policies.values()):
            word, lacking = "is not captured", 0.0
        elif not self.holds_bucket:
            word, lacking = f"{word}, but the KV pool holds less than one bucket of tokens", 0.0
        elif lacking:
            word = "fits, but what comes later does not" if certain else "may not fit, and what comes later does not"
        then = f"; what comes later ({self.later_words}) lacks {mib_or_gib(lacking)}" if lacking else ""
        seconds = f"; about {sum(self.forecast.capture_s):.0f} s" if self.forecast.capture_s else "; time n/a"
        return (
            f"{word}: the capture needs {peak.mid / 1024:.2f} GiB ({peak.low / 1024:.2f} to {peak.high / 1024:.2f}) of "
            f"{free.gib:.2f} GiB free ({free.low_gib:.2f} to {free.high_gib:.2f}); "
            f"the graphs keep {total.mid / 1024:.2f} GiB{then}{seconds}"
        )

    @property
    def later_gib(self) -> float:
        """GiB that are needed after the prefill capture: decode graphs, and what was declared."""
        return later_need(self.settings, self.resolved)[0]

    @property
    def later_words(self) -> str:
        """What that is, in words; empty for nothing."""
        return later_need(self.settings, self.resolved)[1]

    @property
    def post_capture_checklist(self) -> tuple[Condition, ...]:
        """What a server of this release needs to size its KV pool after the capture, and whether this one would."""
        return self.resolved.post_capture_checklist

    @property
    def left_at_peak_gib(self) -> float:
        """GiB that stay free at the worst moment of the prefill capture, by the middle of the forecast."""
        peak = ZERO if self.forecast is None else self.forecast.peak
        return self.free_before_gib - peak.mid / 1024

    @property
    def left_in_the_end_gib(self) -> float:
        """GiB that stay free after decode graphs and what is declared for later: the last line of the ledger."""
        return self.lines[-1].gib

    @property
    def left_gib(self) -> float:
        """The smaller of what is left at the capture's peak and in the end, GiB."""
        return min(self.left_at_peak_gib, self.left_in_the_end_gib)

    @cached_property
    def ledger_frame(self) -> pd.DataFrame:
        """One row per line of the ledger: GiB, low and high, formula and source."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(line) for line in self.lines])

    @cached_property
    def buckets_frame(self) -> pd.DataFrame:
        """One row per bucket in order of capture, as `Forecast.frame`; empty without a capture."""
        return (self.forecast or Forecast(self.settings.engine, (), ())).frame()

    @cached_property
    def terms_frame(self) -> pd.DataFrame:
        """One row per term of the forecast, as `Forecast.terms_frame`."""
        return (self.forecast or Forecast(self.settings.engine, (), ())).terms_frame()

    @cached_property
    def policies_frame(self) -> pd.DataFrame:
        """One row per policy, GiB on each rank.

        `outcome`, `runner`, number of buckets `captured`, `free_after_gib` (after the prefill graphs, before decode
        graphs and anything else that comes later), `kv_cache_tokens`, `reason`; `certain` says of a capture whether it
        fits at both ends of its own range and of what is free (missing where there is no capture), `starved_gib` what
        decode graphs and declared needs lack by their middle (missing where the server does not start).
        """
        import pandas as pd

        columns = [
            *("policy", "outcome", "runner", "captured", "free_after_gib", "kv_cache_tokens", "reason"),
            *("certain", "starved_gib"),
        ]
        rows = [
            (
                name,
                one.outcome,
                one.runner,
                len(one.captured_buckets),
                one.free_after_gib,
                one.kv_cache_tokens,
                one.reason,
                one.certain,
                one.lacks_gib,
            )
            for name, one in self.policies.items()
        ]
        dtypes = {"free_after_gib": "float64", "certain": "boolean", "starved_gib": "float64"}
        return pd.DataFrame(rows, columns=columns).astype(dtypes)

    def to_dict(self) -> dict[str, Any]:
        """What `prefill-lab plan --json` prints."""
        from toolkit.forecast.plan_json import plan_json

        return plan_json(self)

    def _repr_html_(self) -> str:
        from toolkit.forecast.plan_page import plan_html

        return plan_html(self)

    def __repr__(self) -> str:
        cost = "no capture" if self.forecast is None else f"{self.forecast.total.mid / 1024:.2f} GiB"
        outcomes = ", ".join(f"{name}: {one.outcome}" for name, one in self.policies.items())
        return (
            f"<Plan {self.model.id} tp {self.settings.tp} on {self.gpu.id}, SGLang {self.release.version}, "
            f"{self.backend.value}, {len(self.buckets)} buckets: {self.free_before_gib:.2f} GiB free before, {cost}; "
            f"{outcomes}>"
        )


def make_plan(settings: PlanSettings) -> Plan:
    """The plan for settings.

    Raises:
        InvalidInput: something that cannot be planned, in one line: an unknown model or GPU, a tp that does not divide
            the model, weights that do not fit.
    """
    return plan_with(settings, forecaster(settings))


Forecaster = Callable[[ModelFacts, Backend, tuple[int, ...]], Forecast]


def forecaster(settings: PlanSettings) -> Forecaster:
    """The chosen engine as a function of model, backend and ladder that remembers its last answers."""
    engine, gpu = get_engine(settings.engine), resolve_gpu(settings.gpu)
    known: dict[tuple[Backend, tuple[int, ...]], Forecast] = {}

    def ask(model: ModelFacts, backend: Backend, buckets: tuple[int, ...]) -> Forecast:
        if (backend, buckets) not in known:
            request = ForecastRequest(
                settings.model,
                model.config,
                gpu,
                buckets,
                backend,
                settings.tp,
                settings.dtype,
                settings.weights or model.published_weights,
                settings.compiler,
                settings.request_slots,
                settings.max_context,
            )
            known[backend, buckets] = engine(request)
        return known[backend, buckets]

    return ask


def plan_with(settings: PlanSettings, ask: Forecaster) -> Plan:
    """The plan for settings, with forecasts from `ask`. Raises InvalidInput as `make_plan`."""
    try:
        return _plan(settings, ask)
    except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        source = resolve_model(settings.model)
        if source.entry is not None:
            raise  # the catalogue's configs are ours: with them it is a bug, which must be seen
        raise unplannable(source.id, error) from None


def _plan(settings: PlanSettings, ask: Forecaster) -> Plan:
    model, gpu, release = model_facts(settings.model), resolve_gpu(settings.gpu), get_release(settings.sglang_version)
    resolved, backend = _resolve(settings, model, gpu, release)
    fraction = None if settings.free_memory_gib is not None else resolved.mem_fraction_static
    if fraction is not None and settings.mem_fraction == "auto" and fraction < MIN_AUTO_FRACTION:
        raise InvalidInput(
            f"mem fraction auto gives {fraction:g} on {gpu.id}",
            f"the heuristic needs at least {MIN_AUTO_FRACTION:g}",
            "give one yourself, for example --mem-fraction 0.8",
        )
    cell = planned_cell(settings, model)
    facts = _ledger_facts(settings, model, gpu, cell, fraction)
    ledger = build_ledger(facts)
    later, words = later_need(settings, resolved)
    kv_last = whole_pool(ledger, cell, () if backend is Backend.DISABLED else resolved.buckets)
    now = Situation(
        free_gib=ledger.free_before_gib,
        free_low_gib=ledger.lines[-1].low_gib,
        kv_cache_tokens=ledger.kv_cache_tokens,
        buckets=resolved.buckets,
        resolved=resolved,
        backend=backend,
        locked_keys=settings.locked_keys,
        reserve_gib=settings.reserve_gib,
        later_gib=later,
        later_words=words,
        kv_last=kv_last,
    )
    forecast = None if backend is Backend.DISABLED else ask(model, backend, resolved.buckets)
    policies = {
        name: plan_policy(name, now, lambda buckets: ask(model, backend, buckets)) for name in settings.policies
    }
    cost: Range = ZERO if forecast is None else forecast.total
    plan = Plan(
        settings=settings,
        model=model,
        gpu=gpu,
        release=release,
        resolved=resolved,
        backend=backend,
        buckets=resolved.buckets if forecast is not None else (),
        mem_fraction=fraction,
        lines=with_graphs(ledger, cost, resolved.decode_on, settings.post_capture_need_gib),
        ledger=ledger,
        cell=cell,
        kv_last=kv_last,
        forecast=forecast,
        policies=policies,
        reserve_gib=reserve_gib(ledger.free_before_gib, settings.reserve_gib),
        assumptions=tuple(assumptions(settings, model, gpu, ledger, release)),
    )
    return dataclasses.replace(plan, notes=tuple(plan_notes(plan)))


def later_need(settings: PlanSettings, resolved: Resolution) -> tuple[float, str]:
    """(GiB that are needed after the prefill capture, in words): what was declared, and a server's decode graphs."""
    parts = {"declared": settings.post_capture_need_gib}
    if settings.engine == SGLANG and resolved.decode_on:
        parts["decode graphs"] = DECODE_GRAPHS.gib
    said = ", ".join(f"{name} {gib:.2f} GiB" for name, gib in parts.items() if gib)
    return sum(parts.values()), said


def _resolve(settings: PlanSettings, model: ModelFacts, gpu: GpuSpec, release: Release) -> tuple[Resolution, Backend]:
    """What the release settles, and the backend that is planned."""
    asked = None if settings.backend is Backend.AUTO else settings.backend
    # The toolkit's own runner keeps the legacy backend; sizes are those of any backend that captures.
    own = asked is Backend.TC_PIECEWISE and settings.engine != SGLANG and asked not in release.prefill_backends
    resolved = resolve_server(
        release,
        ServerFacts(
            gpu_mem_mib=gpu.tier_mib,
            tp=settings.tp,
            mla=model.mla,
            dsa=model.dsa,
            architecture=model.architecture,
            attention_backend=settings.attention_backend,
            compute_capability=gpu.compute_capability,
            prefill_backend=Backend.BREAKABLE if own else asked,
            chunked_prefill_size=settings.chunked_prefill_size,
            max_tokens=settings.max_tokens,
            buckets=settings.buckets,
            max_running_requests=settings.max_running_requests,
            context_length=settings.context_length,
            mem_fraction=None if settings.mem_fraction == "auto" else settings.mem_fraction,
            model_path=settings.model,
        ),
    )
    if not resolved.buckets and resolved.backend is not Backend.DISABLED:
        raise InvalidInput(
            f"a ceiling of {resolved.prefill_ceiling} tokens leaves no bucket",
            "the smallest bucket of a ladder has 4 tokens",
            "raise --chunked-prefill-size or --context-length",
        )
    return resolved, Backend.TC_PIECEWISE if own else resolved.backend


def _ledger_facts(
    settings: PlanSettings, model: ModelFacts, gpu: GpuSpec, cell: KvCell, fraction: float | None
) -> LedgerFacts:
    plain_bits = int(ITEMSIZES[settings.dtype] * 8)
    kind = settings.weights or f"as published ({model.published_weights})"
    source = f"counted from the config, {kind}: {model.layout(settings.weights)}"
    if model.tower_parameters:
        source += f"; {model.tower_parameters / 1e6:,.0f} M parameters of the tower whole on every rank"
    return LedgerFacts(
        total_gib=gpu.visible_gib,
        total_source=(gpu.cuda_visible_gib is not None and gpu.cuda_visible_source) or ESTIMATED,
        context=context_gib(settings.tp),
        weights_gib=model.weights_gib(settings.tp, settings.weights, plain_bits),
        weights_formula="elements on this rank x bits each; tp divides heads, feed-forward widths and the vocabulary",
        weights_source=source,
        cell=cell,
        mem_fraction=fraction,
        free_gib=settings.free_memory_gib,
        context_length=settings.context_length or int(getattr(model.config, "max_position_embeddings", None) or 4096),
        requests=settings.max_running_requests,
        gpu=gpu.id,
    )
