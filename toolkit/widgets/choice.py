"""What a person has picked, and what it means before anything is captured. Pure: values in, words out."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.catalogue import ModelSource, resolve_model
from toolkit.errors import InvalidInput, PrefillLabError
from toolkit.ladder import parse_buckets
from toolkit.memory.ledger import Sizes, reserve_mib, resolve_sizes
from toolkit.policies import MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB as GATE_GIB
from toolkit.policies import PolicyFacts, get_policy
from toolkit.runs.worker import check_names
from toolkit.settings import Backend, CaptureSettings
from toolkit.weights import resolve_weights

EDGE_GIB = 0.1
"""A forecast this little above the gate does not tell on which side the measured figure will lie."""
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
_GEOMETRY_LATER = "known once the model's config is loaded"


@dataclass(frozen=True, slots=True)
class DeviceOption:
    """A device that can be picked. `total_mib` is None for the CPU device, whose capacity is declared."""

    value: str
    label: str
    total_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The controls of the Lab as they stand. `ladder` is `default`, `ceiling` or `own`."""

    model: str
    device: str
    device_memory_gib: float
    auto_fraction: bool
    mem_fraction: float
    backend: str
    policy: str
    ladder: str
    max_tokens: int
    buckets: str
    leave_exactly: bool
    free_memory_gib: float

    def settings(self, **others: Any) -> CaptureSettings:
        """The settings that these controls stand for, with `others` that have no control.

        Raises InvalidInput, one line, for what cannot be used, and ModelUnavailable for an unknown model.
        """
        resolve_model(self.model)
        choices: dict[str, Any] = {**others, "model": self.model.strip(), "device": self.device}
        if self.device == "cpu":
            choices["device_memory_gib"] = self.device_memory_gib
        if self.leave_exactly:
            choices["free_memory_gib"] = self.free_memory_gib
        else:
            choices["mem_fraction"] = "auto" if self.auto_fraction else self.mem_fraction
        if self.ladder == "ceiling":
            choices["max_tokens"] = self.max_tokens
        elif self.ladder == "own":
            choices["buckets"] = tuple(parse_buckets(self.buckets))
        settings = CaptureSettings.create(**choices, backend=self.backend, policy=self.policy)
        get_policy(settings.policy)
        return settings


def controls_for(settings: dict[str, Any]) -> dict[str, Any]:
    """The controls, by name, that stand for `settings`; what has no control keeps its own name.

    Raises InvalidInput for settings that do not exist, cannot be used, or exclude each other.
    """
    # As they come out of the check: a number given as text, or buckets that can be read only once, are values there.
    checked = CaptureSettings.create(**settings)
    check_names(checked)
    values = {name: getattr(checked, name) for name in settings}
    controls: dict[str, Any] = {}
    # None is "not given"; it must not undo what another setting of the same control says.
    for name in sorted(values, key=lambda name: values[name] is not None):
        controls.update(_CONTROLS[name](values[name]) if name in _CONTROLS else {name: values[name]})
    return controls


def _of_fraction(value: Any) -> dict[str, Any]:
    if value == "auto":
        return {"auto_fraction": True, "leave_exactly": False}
    return {"auto_fraction": False, "mem_fraction": float(value), "leave_exactly": False}


def _of_free(value: Any) -> dict[str, Any]:
    return {"leave_exactly": False} if value is None else {"leave_exactly": True, "free_memory_gib": float(value)}


def _of_ceiling(value: Any) -> dict[str, Any]:
    return {"ladder": "default"} if value is None else {"ladder": "ceiling", "max_tokens": int(value)}


def _of_buckets(value: Any) -> dict[str, Any]:
    return {"ladder": "default"} if value is None else {"ladder": "own", "buckets": ",".join(map(str, value))}


_CONTROLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mem_fraction": _of_fraction,
    "free_memory_gib": _of_free,
    "max_tokens": _of_ceiling,
    "buckets": _of_buckets,
}


@dataclass(frozen=True, slots=True)
class Preview:
    """What the choice means, in words. Without `settings` it cannot be captured, and `problem` says why.

    `skips` is whether the policy would skip the capture, `mem_fraction` the fraction that will be used: None
    where that cannot be told.
    """

    settings: CaptureSettings | None
    problem: str = ""
    model: str = ""
    fraction: str = ""
    backend: str = ""
    ladder: str = ""
    free: str = ""
    verdict: str = ""
    skips: bool | None = None
    mem_fraction: float | None = None


def preview(choice: Choice, total_mib: float | None, **others: Any) -> Preview:
    """What `choice` means on a device of `total_mib` MiB (None: unknown). Never raises for what was picked."""
    try:
        settings = choice.settings(**others)
        source = resolve_model(settings.model)
    except PrefillLabError as error:
        return Preview(None, problem=str(error))
    mla = _is_mla(source)
    try:
        sizes = resolve_sizes(settings, total_mib, mla=bool(mla)) if total_mib else None
        if sizes is not None and not sizes.buckets:
            raise InvalidInput("the ladder is empty", "the smallest bucket has 4 tokens, so a ceiling is 4 or more")
    except PrefillLabError as error:
        return Preview(None, problem=str(error), backend=_backend_words(settings))
    free_gib, free_words = _free_before(settings, source, sizes, total_mib)
    skips, verdict = _verdict(settings, sizes, free_gib)
    return Preview(
        settings,
        model=_model_words(settings, source),
        fraction=_fraction_words(settings, sizes, total_mib, mla),
        backend=_backend_words(settings),
        ladder=_ladder_words(settings, sizes, mla),
        free=free_words,
        verdict=verdict,
        skips=skips,
        mem_fraction=sizes.mem_fraction_static if sizes is not None else None,
    )


def _is_mla(source: ModelSource) -> bool | None:
    """Whether the model compresses KV into a latent; None while its config is not here."""
    if source.entry is not None:
        return _config_is_mla(dict(source.entry.config))
    if source.path is None or source.kind == "gguf":
        return None
    path = source.path / "config.json" if source.kind == "folder" else source.path
    try:
        return _mla_in_file(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=64)
def _mla_in_file(path: Path, _changed_ns: int) -> bool | None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return _config_is_mla(config) if isinstance(config, dict) else None


def _config_is_mla(config: dict[str, Any]) -> bool:
    text = config.get("text_config")
    return bool(config.get("kv_lora_rank") or (isinstance(text, dict) and text.get("kv_lora_rank")))


def _model_words(settings: CaptureSettings, source: ModelSource) -> str:
    random = resolve_weights(source, settings.weights) == "random"
    weights = "random weights: memory and times are the model's, answers mean nothing" if random else "real weights"
    entry = source.entry
    if entry is None:
        place = "from the hub, fetched when the capture starts" if source.kind == "hub" else f"a local {source.kind}"
        return f"{source.id}: {place}; {weights}"
    billions = entry.parameters >= 1e9
    count = f"{entry.parameters / 1e9:.2f} billion" if billions else f"{entry.parameters / 1e6:.0f} million"
    return f"{entry.name}: {entry.architecture}, {count} parameters; {weights}"


def _fraction_words(settings: CaptureSettings, sizes: Sizes | None, total_mib: float | None, mla: bool | None) -> str:
    if settings.free_memory_gib is not None:
        return "not used: the KV pool is sized so that the free memory you ask for is left"
    if settings.mem_fraction != "auto":
        return f"{settings.mem_fraction:.3g}, chosen by hand: the share of memory for weights and KV pool"
    if sizes is None or total_mib is None:
        return "auto: n/a until the device is known"
    graphs = 0 if settings.resolved_backend is Backend.DISABLED else len(sizes.buckets)
    reserve = reserve_mib(total_mib, sizes.chunked_prefill_size, sizes.decode_max_bs, graphs, mla=bool(mla))
    per_graph = "1536 for the graphs of an MLA model" if mla and graphs else f"8 x {graphs} buckets"
    parts = f"512 + 1.5 x max(chunk {sizes.chunked_prefill_size}, 2048) + 128 + 2 x decode batch {sizes.decode_max_bs}"
    floor = "; at least 10240 on a card of this size" if reserve == 10240 else ""
    guess = "" if mla is not None else f"; MLA or not is {_GEOMETRY_LATER}"
    return (
        f"auto = {sizes.mem_fraction_static:.3f}: ({total_mib:.0f} - {reserve:.0f}) / {total_mib:.0f} MiB, because the "
        f"heuristic keeps {parts} + {per_graph} = {reserve:.0f} MiB free{floor}{guess} (SGLang 0.5.23)"
    )


def _backend_words(settings: CaptureSettings) -> str:
    resolved = settings.resolved_backend.value
    if settings.backend is Backend.AUTO:
        return f"auto, resolves to {resolved}: nobody chose it by hand, so the old gate applies to it"
    if settings.backend is Backend.DISABLED:
        return "disabled by hand: no capture under any policy, prefill runs eager"
    return f"{resolved}, chosen by hand: this locks the backend, and a locked backend bypasses the old gate"


def _ladder_words(settings: CaptureSettings, sizes: Sizes | None, mla: bool | None) -> str:
    if sizes is None:
        return "n/a until the device is known"
    count, largest = len(sizes.buckets), sizes.buckets[-1]
    if settings.buckets is not None:
        origin = "your own ladder"
    elif settings.max_tokens is not None:
        origin = "the server's steps up to your ceiling"
    else:
        origin = f"the server's default for this device (chunk {sizes.chunked_prefill_size})"
        origin += "" if mla is not None else f"; MLA or not is {_GEOMETRY_LATER}"
    return f"{count} bucket{'s' if count != 1 else ''}, {sizes.buckets[0]} to {largest} tokens: {origin}"


def _free_before(
    settings: CaptureSettings, source: ModelSource, sizes: Sizes | None, total_mib: float | None
) -> tuple[float | None, str]:
    """GiB free when the capture begins, and the same in words with where the figure comes from."""
    weights = source.entry.parameters * _ITEMSIZE[settings.dtype] / 2**30 if source.entry else None
    if settings.free_memory_gib is not None:
        free = settings.free_memory_gib
        if weights is not None and total_mib and weights + free > total_mib / 1024:
            return None, (
                f"{free:.2f} GiB cannot be left (forecast): the weights alone take {weights:.2f} GiB in "
                f"{settings.dtype}, of {total_mib / 1024:.2f} GiB"
            )
        return free, f"exactly {free:.2f} GiB, as you ask"
    if sizes is None or sizes.mem_fraction_static is None or not total_mib:
        return None, "n/a until the device is known"
    total, fraction = total_mib / 1024, sizes.mem_fraction_static
    if weights is not None and weights > fraction * total:
        return None, (
            f"none (forecast): the weights alone take {weights:.2f} GiB in {settings.dtype}, and fraction "
            f"{fraction:.3g} of {total:.2f} GiB is {fraction * total:.2f} GiB; no KV pool is left"
        )
    free = (1 - fraction) * total
    less = "static buffers and rounding" if settings.device == "cpu" else "device context, static buffers and rounding"
    return free, f"about {free:.2f} GiB (forecast: (1 - {fraction:.3g}) x {total:.2f} GiB, less {less})"


def _verdict(settings: CaptureSettings, sizes: Sizes | None, free_gib: float | None) -> tuple[bool | None, str]:
    """Whether the policy would skip, None where that is not known, and the sentence for it."""
    if settings.backend is Backend.DISABLED:
        return True, "skips: the prefill graph is disabled by hand"
    if free_gib is None or sizes is None:
        return None, "n/a: there is no free memory before the capture, or it is not known"
    decision = get_policy(settings.policy).decide(PolicyFacts(free_gib, settings.locked_keys, sizes.buckets))
    forecast = settings.free_memory_gib is None
    gate_decides = decision.code in ("gate_low_memory", "gate_passed")
    # The forecast is what is free at most: what it leaves out can only push it under the gate.
    if forecast and gate_decides and 0 <= free_gib - GATE_GIB < EDGE_GIB:
        return (
            None,
            f"on the edge of the gate: about {free_gib:.2f} GiB against {GATE_GIB:.2f} GiB; the capture will tell",
        )
    word = "captures" if decision.capture else "skips, and prefill runs eager"
    return not decision.capture, f"{word}: {decision.reason}{' (forecast)' if forecast else ''}"
