"""A plan as plain values: the stable keys of `prefill-lab plan --json`. Missing is None; GiB is 2**30 bytes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from toolkit.forecast.terms import Forecast
from toolkit.memory.rules import Reason
from toolkit.settings import Backend

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

_GIB_DIGITS, _MIB_DIGITS = 4, 3


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as dictionaries and lists, ready for `json.dumps`."""
    return {
        "model": _model(plan),
        "gpu": {"id": plan.gpu.id, "total_gib": plan.gpu.visible_gib, "estimated": plan.gpu.cuda_visible_gib is None},
        "tp": plan.settings.tp,
        "sglang_version": plan.release.version,
        "engine": plan.settings.engine,
        "backend": _backend(plan),
        "resolved": {
            "chunked_prefill_size": plan.resolved.chunked_prefill_size,
            "decode_max_bs": plan.resolved.decode_max_bs,
            "prefill_ceiling": plan.resolved.prefill_ceiling,
        },
        "buckets": list(plan.buckets),
        "mem_fraction_static": plan.mem_fraction,
        "gate_gib": plan.release.gate_gib,
        "reserve_gib": _gib(plan.reserve_gib),
        "left_gib": _gib(plan.left_gib),
        "left_at_peak_gib": _gib(plan.left_at_peak_gib),
        "left_in_the_end_gib": _gib(plan.left_in_the_end_gib),
        "ledger": _ledger(plan),
        "forecast": _forecast(plan.forecast or Forecast(plan.settings.engine, (), ())),
        "policies": {name: _policy(plan, name) for name in plan.policies},
        "assumptions": list(plan.assumptions),
        "advice": list(plan.advice),
        "notes": list(plan.notes),
    }


def backend_reasons(plan: Plan) -> list[str]:
    """Why the backend is what it is, in words: every rule that held, or that none did."""
    if plan.settings.backend is not Backend.AUTO:
        first = [f"{plan.backend.value} was chosen by hand"]
    elif any(one.standing == "decided" and one.phase in ("prefill", "both") for one in plan.resolved.reasons):
        first = []
    else:
        first = [f"{plan.backend.value} is the default of SGLang {plan.release.version} on CUDA; no rule changed it"]
    return [*first, *map(_reason, plan.resolved.reasons)]


def _reason(one: Reason) -> str:
    standing = {"decided": "", "also": " (another rule decided)", "bypassed": " (skipped: chosen by hand)"}
    return f"{one.text}: {one.phase} {one.effect.replace('_', ' ')}{standing[one.standing]}"


def _model(plan: Plan) -> dict[str, Any]:
    model = plan.model
    return {
        "id": model.id,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "layers": model.layers,
        "attention": plan.cell.kind,
        "weights_gib_per_rank": _gib(plan.ledger.line("weights").gib),
        "weights": plan.settings.weights or model.published_weights,
        "kv_bytes_per_token": plan.cell.bytes_per_token,
    }


def _backend(plan: Plan) -> dict[str, Any]:
    return {
        "requested": plan.settings.backend.value,
        "resolved": plan.backend.value,
        "explicit": plan.resolved.explicit,
        "reasons": backend_reasons(plan),
        "rules": [dataclasses.asdict(one) for one in plan.resolved.reasons],
    }


def _ledger(plan: Plan) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in plan.lines:
        values[f"{line.key}_gib"] = _gib(line.gib)
        if (line.low_gib, line.high_gib) != (line.gib, line.gib):
            values |= {f"{line.key}_low_gib": _gib(line.low_gib), f"{line.key}_high_gib": _gib(line.high_gib)}
    return {**values, "kv_cache_tokens": plan.ledger.kv_cache_tokens}


def _forecast(forecast: Forecast) -> dict[str, Any]:
    whole, peak = forecast.total, forecast.peak
    return {
        "engine": forecast.engine,
        "total_gib": _gib(whole.mid / 1024),
        "low_gib": _gib(whole.low / 1024),
        "high_gib": _gib(whole.high / 1024),
        "peak_gib": _gib(peak.mid / 1024),
        "peak_high_gib": _gib(peak.high / 1024),
        "torch_pool_gib": _gib(forecast.torch_pool.mid / 1024),
        "non_torch_gib": _gib(forecast.non_torch.mid / 1024),
        "capture_time_s": sum(forecast.capture_s) if forecast.capture_s else None,
        "terms": [
            {
                "name": term.name,
                "mib": round(term.mib.mid, _MIB_DIGITS),
                "low_mib": round(term.mib.low, _MIB_DIGITS),
                "high_mib": round(term.mib.high, _MIB_DIGITS),
                "source": term.source,
            }
            for term in forecast.terms
        ],
        "per_bucket": [
            {
                "num_tokens": bucket.num_tokens,
                "added_mib": round(bucket.added.mid, _MIB_DIGITS),
                "cumulative_mib": round(bucket.cumulative.mid, _MIB_DIGITS),
                "peak_mib": round(bucket.peak.mid, _MIB_DIGITS),
            }
            for bucket in forecast.buckets
        ],
        "notes": list(forecast.notes),
    }


def _policy(plan: Plan, name: str) -> dict[str, Any]:
    one = plan.policies[name]
    return {
        "runner": one.runner,
        "outcome": one.outcome,
        "reason": one.reason,
        "code": one.code,
        "captured_buckets": list(one.captured_buckets),
        "free_after_gib": _gib(one.free_after_gib),
        "kv_cache_tokens": one.kv_cache_tokens,
        "margin_gib": _gib(one.margin_gib),
        "tight": one.tight,
        "certain": one.certain,
        "oom_bucket": one.oom_bucket,
        "log_line": one.log_line,
        "trimmed": list(one.trimmed),
        "starved_gib": _gib(one.lacks_gib),
    }


def _gib(value: float | None) -> float | None:
    return None if value is None else round(value, _GIB_DIGITS)
