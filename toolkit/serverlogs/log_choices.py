"""The settings of a plan that a log shows: whose rules, which flags, which ladder. What it does not show is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.chosen import positive
from toolkit.serverlogs.findings import facts_of
from toolkit.serverlogs.findings.facts import Facts
from toolkit.serverlogs.ledger import RankLedger
from toolkit.serverlogs.server_ladder import server_ladder
from toolkit.serverlogs.startup import Startup
from toolkit.serverlogs.versions import newest_version

_KV_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_DTYPES = ("bfloat16", "float16", "float32")
_NAMED_BACKENDS = ("full", "breakable", "tc_piecewise")


@dataclass(frozen=True, slots=True)
class LogChoices:
    """What a log says about the server that a plan is to be made of.

    Attributes:
        settings: by the names of PlanSettings; what the log does not show is left out.
        most_tokens: `max_total_tokens`, the most that the KV pool may have; None without such a limit.
        backend_named: whether somebody chose the backend by hand, which bypasses the gate.
        weighed: whether a rank's weights are those that a plan counts for its tp.
        notes: what was settled by the log's wording, and what a plan does not know of, one sentence each.
        refused: why no plan can stand for this server; empty where one can.
    """

    settings: dict[str, Any]
    most_tokens: int | None
    backend_named: bool
    weighed: bool
    notes: tuple[str, ...]
    refused: str = ""


def log_choices(
    startups: Sequence[Startup],
    startup: Startup,
    ledger: RankLedger,
    capture: CaptureReport | None,
    version: str | None,
) -> LogChoices:
    """The choices of one start; `version` is as given, else the newest that the whole log's wording allows."""
    facts = facts_of(startup, version)
    newest, why = (version, "") if version is not None else newest_version(startups)
    kv, unknown_kv = _kv_dtype(facts)
    backend = _backend(facts, capture)
    found: dict[str, Any] = {
        "sglang_version": newest,
        "tp": positive(facts.argument("tp_size")) or _ranks(startup, "tp"),
        "mem_fraction": facts.argument("mem_fraction_static"),
        "chunked_prefill_size": facts.chunk,
        "max_running_requests": positive(facts.argument("max_running_requests"))
        or next((positive(each.max_running_requests) for each in startup.limits[:1]), None),
        "attention_backend": facts.argument("prefill_attention_backend") or facts.argument("attention_backend"),
        "dtype": next((name for name in _DTYPES if name == facts.argument("dtype")), None),
        "kv_dtype": kv,
        "weights": _weights(startup),
        "backend": backend,
    }
    ladder = server_ladder(startup)
    if ladder is not None:
        found["buckets"] = list(ladder.buckets)
    stages = positive(facts.argument("pp_size")) or _ranks(startup, "pp")
    notes = [
        f"rules of SGLang {newest}: {why}" if why else "",
        f"prefill backend {backend}: as the log shows" if backend else "",
        _fraction_words(facts, ledger),
        f"KV cache {unknown_kv}: a plan does not know its size, so the KV pool is another" if unknown_kv else "",
        *_not_planned(facts),
    ]
    return LogChoices(
        {key: value for key, value in found.items() if value is not None},
        positive(facts.argument("max_total_tokens")),
        facts.explicit_backend is not None,
        not any(_is_set(facts.argument(name)) for name in _OTHER_WEIGHTS),
        tuple(filter(None, notes)),
        f"pipeline parallel, {stages} stages: a rank holds some of the layers, and the log does not say which"
        if stages > 1
        else "",
    )


def _fraction_words(facts: Facts, ledger: RankLedger) -> str:
    if facts.argument("mem_fraction_static") is not None or ledger.free_before_capture_gib is None:
        return ""
    return "mem_fraction_static: the log does not print it; the KV pool forecast is that of auto"


_OTHER_WEIGHTS = ("cpu_offload_gb", "enable_dp_attention")
_UNPLANNED = {
    "cpu_offload_gb": "weights in main memory",
    "enable_dp_attention": "attention weights whole on each rank, and a KV pool of its own",
    "speculative_algorithm": "the draft model, its KV pool and its graphs",
    "attn_cp_size": "a KV pool spread over context parallel ranks",
    "dcp_size": "a KV pool spread over context parallel ranks",
    "enable_lora": "adapters and their buffers",
}
"""Arguments that move memory and that a plan has no setting for, and what it does not count."""


def _not_planned(facts: Facts) -> Iterator[str]:
    for name, what in _UNPLANNED.items():
        value = facts.argument(name)
        if _is_set(value):
            yield f"{name} {value}: not planned ({what})"


def _is_set(value: object) -> bool:
    return value not in (None, False, 0, 1, "none") or value is True


def _ranks(startup: Startup, kind: str) -> int:
    """How many tp or pp ranks the prefixes show."""
    return max((number for rank in startup.ranks if (number := getattr(rank, kind)) is not None), default=0) + 1


def _kv_dtype(facts: Facts) -> tuple[str | None, str | None]:
    """(the dtype of a plan's KV pool, None for the model's; the printed one where a plan has none like it)."""
    pools = [pool.dtype for log in facts.startup.ranks.values() for pool in log.kv_pools if pool.dtype]
    argument = facts.argument("kv_cache_dtype")
    printed = next(iter(pools), argument if isinstance(argument, str) and argument != "auto" else None)
    if printed is None:
        return None, None
    name = printed.removeprefix("torch.")
    if name.startswith(("fp8_", "float8_")):
        return "fp8", None
    return (_KV_DTYPES[name], None) if name in _KV_DTYPES else (None, printed)


def _weights(startup: Startup) -> str | None:
    ends = [each.end for log in startup.ranks.values() for each in log.weights[:1] if each.end is not None]
    quant = ends[0].quant or "" if ends else ""
    return "fp8" if "fp8" in quant else "int4" if quant.startswith(("awq", "gptq")) else None


def _backend(facts: Facts, capture: CaptureReport | None) -> str | None:
    """As named, else as captured where that is not the default; None leaves it to the release's rules."""
    if facts.switched_off and (capture is None or capture.outcome == "skipped"):
        return "disabled"
    if facts.explicit_backend in _NAMED_BACKENDS:
        return facts.explicit_backend
    # Below it is only planned with, and counts as chosen by nobody.
    if capture is None or capture.outcome == "skipped":
        return None
    # Builds with the old wording print no backend: their prefill graphs are the piecewise ones.
    said = [each.end or each.begin for each in facts.startup.captures if each.phase == "prefill"]
    old = any(each is not None and each.wording == "old" for each in said)
    shown = "tc_piecewise" if old else capture.backend
    return shown if shown in ("full", "tc_piecewise") else None
