"""The settings a server was started with, as far as its log shows them, for a capture of one's own.

What the toolkit's engine has no setting for, or the log does not say, is named rather than guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.catalogue import search_models
from toolkit.errors import InvalidInput
from toolkit.serverlogs.events import Value
from toolkit.serverlogs.findings import facts_of
from toolkit.serverlogs.findings.facts import Facts
from toolkit.serverlogs.focus import start_to_show
from toolkit.serverlogs.ledger import tightest
from toolkit.serverlogs.measured import known_model
from toolkit.serverlogs.server_ladder import server_ladder
from toolkit.settings import CaptureSettings

if TYPE_CHECKING:
    from toolkit.serverlogs.diagnosis import Diagnosis

GATED_VERSIONS = frozenset({"0.5.16", "0.5.17"})
"""Releases of SGLang with the 4 GiB gate (its source, executed: data/rules)."""
_BACKENDS = ("breakable", "full", "tc_piecewise")
_DTYPES = ("bfloat16", "float16", "float32")
_FP8 = "-fp8"


@dataclass(frozen=True, slots=True)
class UsedSettings:
    """Settings of CaptureSettings that stand for a start of a log.

    Attributes:
        startup: number of the start, from 0.
        settings: by the names of CaptureSettings; the default where the log says nothing.
        tp: tensor-parallel ranks, None where the log does not say.
        why: for a setting that follows from others than its own argument, in words.
        left_out: what could not be taken over, one sentence each.
    """

    startup: int
    settings: dict[str, Any]
    tp: int | None
    why: tuple[str, ...]
    left_out: tuple[str, ...]


def used_settings(diagnosis: Diagnosis) -> UsedSettings:
    """The settings of the start that `focus.start_to_show` picks. Raises InvalidInput when the log has no start."""
    startup = start_to_show(diagnosis)
    if startup is None:
        raise InvalidInput(
            "the log shows no start of a server", "a log of SGLang or vLLM", "paste it from the server's first line on"
        )
    facts = facts_of(startup, diagnosis.version)
    chosen: dict[str, Any] = {"mem_fraction": "auto", "max_tokens": None, "chunked_prefill_size": None}
    why: list[str] = []
    left_out: list[str] = []
    versions = [diagnosis.version] if diagnosis.version else list(diagnosis.versions)
    for found in (_model(facts), _memory(facts), _graph(facts), _policy(facts, versions)):
        for name, value, words in found:
            if not name:
                left_out.append(words)
                continue
            try:
                CaptureSettings.create(**{name: value})
            except InvalidInput as error:
                left_out.append(f"{name}: {error}")
                continue
            chosen[name] = value
            if words:
                why.append(words)
    if "buckets" in chosen:
        chosen.pop("max_tokens")
    if "free_memory_gib" in chosen:
        chosen.pop("mem_fraction")
    tp = facts.argument("tp_size") or facts.argument("tensor_parallel_size")
    ranks = tp if isinstance(tp, int) else None
    left_out += _without_a_setting(facts, ranks)
    return UsedSettings(startup.index, chosen, ranks, tuple(why), tuple(left_out))


Found = Iterator[tuple[str, Any, str]]
"""(setting, value, why) of what was found; without a setting the words say what could not be taken over."""


def _model(facts: Facts) -> Found:
    path = facts.argument("model_path") or facts.argument("model")
    model, plain = known_model(facts.startup), _not_quantized(path)
    if model is not None:
        yield "model", model, ""
    elif plain is not None:
        yield "model", plain, f"{path} is {plain} with FP8 weights; here it has the dtype picked"
    elif path:
        yield "", None, f"model {path}: it is not in the catalogue; pick one like it"
    else:
        yield "", None, "model: the log does not name it"
    dtype = facts.argument("dtype")
    if dtype in _DTYPES:
        yield "dtype", dtype, ""


def _not_quantized(path: Value) -> str | None:
    """The catalogue's id of the model that `path` is the FP8 version of."""
    name = path.lower() if isinstance(path, str) else ""
    if not name.endswith(_FP8):
        return None
    return next((entry.id for entry in search_models("") if entry.hub_id.lower() == name.removesuffix(_FP8)), None)


def _memory(facts: Facts) -> Found:
    fraction = facts.argument("mem_fraction_static")
    if isinstance(fraction, float) and not isinstance(fraction, bool):
        yield "mem_fraction", fraction, ""
        return
    free, rank = _free_before(facts)
    if free is not None and free > 0:
        words = f"the log does not print the memory fraction: {free:.2f} GiB is left free, as it was there on {rank}"
        yield "free_memory_gib", free, words
    else:
        yield "", None, "memory fraction: the log does not print it; it stays at auto"


def _free_before(facts: Facts) -> tuple[float | None, str]:
    """GiB free before the target's prefill capture, else before the first one, and on which rank: the least."""
    found = [
        (each.free_before_gib, each.rank)
        for each in facts.captures
        if each.phase == "prefill" and each.role == "target" and each.free_before_gib is not None
    ]
    ledger = tightest(list(facts.ledgers))
    return min(found) if found else (ledger.free_before_capture_gib if ledger else None, ledger.rank if ledger else "")


def _graph(facts: Facts) -> Found:
    if facts.switched_off:
        yield "backend", "disabled", f"the prefill graph was switched off ({facts.switched_off})"
    elif facts.explicit_backend in _BACKENDS:
        yield "backend", facts.explicit_backend, ""
    else:
        yield "backend", "auto", ""
        if facts.explicit_backend:
            yield "", None, f"backend {facts.explicit_backend}: the toolkit's engine does not have it"
    ladder = server_ladder(facts.startup)
    if ladder is not None:
        whole = ladder.ceiling
        yield ("max_tokens", whole, "") if whole is not None else ("buckets", ladder.buckets, "")
    elif facts.startup.engine == "sglang":
        yield "", None, "ladder: the log does not show all of it; it stays at the server's default"
    if facts.chunk is not None:
        yield "chunked_prefill_size", facts.chunk, ""


def _policy(facts: Facts, versions: list[str]) -> Found:
    if versions and GATED_VERSIONS.issuperset(versions):
        yield "policy", "gated", f"SGLang {' or '.join(versions)} has the 4 GiB gate"
    elif facts.startup.engine == "vllm":
        yield "policy", "ungated", "vLLM captures without a gate"
    elif GATED_VERSIONS.intersection(versions):
        yield (
            "policy",
            "ungated",
            f"the release is one of {versions[0]} to {versions[-1]}; only 0.5.16-0.5.17 have the gate",
        )
    else:
        yield "policy", "ungated", ""


def _without_a_setting(facts: Facts, tp: int | None) -> Iterator[str]:
    if tp is not None and tp > 1:
        yield f"tp {tp}: the Lab captures on one device; its forecast takes ranks"
    values = facts.startup.start.values if facts.startup.start else {}
    words = {
        "quantization": "the Lab's weights are not quantized",
        "attention_backend": "the toolkit's engine has an attention of its own",
        "speculative_algorithm": "the Lab captures the target model",
        "dp_size": "the Lab captures one rank",
        "pp_size": "the Lab captures one rank",
        "max_running_requests": "decode is not captured here",
    }
    for name, reason in words.items():
        value = values.get(name)
        if value not in (None, 1, False, "none", "auto"):
            yield f"{name} {value}: {reason}"
    kv = values.get("kv_cache_dtype")
    if isinstance(kv, str) and kv.startswith("fp8"):
        yield f"kv_cache_dtype {kv}: the KV pool here has the dtype of the model"
    if facts.startup.engine == "vllm":
        yield "everything else: the engine here imitates SGLang, not vLLM"
    yield "size of the card: a log does not name it; pick the device or declare its memory"
