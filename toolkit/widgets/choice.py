"""What a person has picked, and what it means before anything is captured. Pure: values in, words out."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.catalogue import ModelSource, resolve_model
from toolkit.errors import InvalidInput, PrefillLabError, one_line
from toolkit.ladder import parse_buckets
from toolkit.memory.ledger import Sizes, reserve_mib, resolve_sizes
from toolkit.policies import DEFAULT_RESERVE_GIB, DEFAULT_RESERVE_SHARE, get_policy, mib_or_gib, reserve_gib
from toolkit.runs.worker import check_names
from toolkit.settings import Backend, CaptureSettings
from toolkit.weights import resolve_weights
from toolkit.widgets.verdicts import Foreseen, Foresight, Moment, verdicts

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
_GEOMETRY_LATER = "known once the model's config is loaded"


@dataclass(frozen=True, slots=True)
class DeviceOption:
    """A device that can be picked. `total_mib` is None for the CPU device, whose capacity is declared. `gpu` is
    the card as its driver names it.
    """

    value: str
    label: str
    total_mib: float | None = None
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The controls of the Lab as they stand. `ladder` is `default`, `ceiling` or `own`.

    `reserve` and `later` are GiB as typed; empty is the default reserve, and nothing that is needed later.
    """

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
    reserve: str = ""
    later: str = ""

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
        choices["reserve_gib"] = _typed_gib("reserve", self.reserve)
        choices["post_capture_gib"] = _typed_gib("need after the capture", self.later)
        settings = CaptureSettings.create(**choices, backend=self.backend, policy=self.policy)
        get_policy(settings.policy)
        return settings


def _typed_gib(name: str, text: str) -> float | None:
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{name} {one_line(text)[:40]!r} is no number", "GiB, or empty", "for example 0.5") from None


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


def _typed(control: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {control: "" if value is None else repr(float(value))}


_CONTROLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mem_fraction": _of_fraction,
    "free_memory_gib": _of_free,
    "max_tokens": _of_ceiling,
    "buckets": _of_buckets,
    "reserve_gib": _typed("reserve"),
    "post_capture_gib": _typed("later"),
}


@dataclass(frozen=True, slots=True)
class Preview:
    """What the choice means, in words. Without `settings` it cannot be captured, and `problem` says why.

    `verdicts` has what each policy would do, by its name; `verdict` and `skips` are those of the policy that is
    chosen. `skips` is whether it would skip the capture, `mem_fraction` the fraction that will be used: None where
    that cannot be told. `foreseen` is whether the verdicts have seen a forecast, or that there is none.
    """

    settings: CaptureSettings | None
    problem: str = ""
    model: str = ""
    fraction: str = ""
    backend: str = ""
    ladder: str = ""
    free: str = ""
    reserve: str = ""
    verdicts: dict[str, Foreseen] = field(default_factory=dict)
    mem_fraction: float | None = None
    foreseen: bool = False

    @property
    def chosen(self) -> Foreseen | None:
        """The verdict of the policy that is chosen."""
        return None if self.settings is None else self.verdicts.get(self.settings.policy)

    @property
    def verdict(self) -> str:
        """What the chosen policy would do and why; empty for what cannot be captured."""
        return self.chosen.words if self.chosen is not None else ""

    @property
    def skips(self) -> bool | None:
        """Whether the chosen policy would skip the capture."""
        return self.chosen.skips if self.chosen is not None else None


def preview(choice: Choice, total_mib: float | None, foresight: Foresight | None = None, **others: Any) -> Preview:
    """What `choice` means on a device of `total_mib` MiB (None: unknown). Never raises for what was picked.

    `foresight` is the forecast for this choice; None where it is not made yet.
    """
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
    asked, exact = settings.free_memory_gib is not None, False
    known = None if foresight is None or foresight.before is None else foresight.before.free_gib
    if free_gib is not None and known is not None and settings.free_memory_gib is None:
        free_gib, exact = known, True
        amount = f"{free_gib:.3f} GiB" if free_gib >= 0 else f"none, {-free_gib:.3f} GiB are missing"
        free_words = f"{amount} (forecast, exact on this device: weights, KV pool and static buffers counted)"
    moment = Moment(settings, sizes.buckets if sizes is not None else (), free_gib, asked, asked or exact)
    return Preview(
        settings,
        model=_model_words(settings, source),
        fraction=_fraction_words(settings, sizes, total_mib, mla),
        backend=_backend_words(settings),
        ladder=_ladder_words(settings, sizes, mla),
        free=free_words,
        reserve=_reserve_words(settings, free_gib),
        verdicts=verdicts(moment, foresight),
        mem_fraction=sizes.mem_fraction_static if sizes is not None else None,
        foreseen=foresight is not None,
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


def _reserve_words(settings: CaptureSettings, free_gib: float | None) -> str:
    """What is to stay free, and what is declared to be needed after the capture."""
    if settings.reserve_gib is not None:
        words = f"{mib_or_gib(settings.reserve_gib)}, as you ask"
    else:
        share = f"by default: {DEFAULT_RESERVE_SHARE:.0%} of what is free before, at most {DEFAULT_RESERVE_GIB:.2f} GiB"
        mark = "" if settings.free_memory_gib is not None else " (forecast)"
        words = share if free_gib is None else f"{mib_or_gib(reserve_gib(free_gib, None))}{mark} {share}"
    need = settings.post_capture_need_gib
    if not need:
        return f"{words}; nothing is declared to be needed later"
    grows = settings.post_capture_mib_per_1k
    how = "" if grows is None else f" (with {grows:g} MiB per 1K tokens of a prompt of {settings.longest_prompt})"
    return f"{words}; {mib_or_gib(need)}{how} declared to be needed later"
