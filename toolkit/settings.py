"""What a user picks, validated: one class per concern, put together in `CaptureSettings`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from toolkit.errors import InvalidInput

LockedKeys = frozenset[tuple[str, str]]
MAX_BUCKET_TOKENS = 1 << 20
MIN_DEVICE_GIB, MAX_DEVICE_GIB = 2**-10, 4096.0


def check_buckets(buckets: Sequence[int] | set[int]) -> list[int]:
    """`buckets` sorted and without repeats. Raises InvalidInput when one is out of range or there is none."""
    ladder = sorted(set(buckets))
    if not ladder:
        raise InvalidInput("the ladder is empty", "at least one bucket is needed", "for example --buckets 8,16")
    for bucket in (ladder[0], ladder[-1]):
        if not 1 <= bucket <= MAX_BUCKET_TOKENS:
            raise InvalidInput(
                f"bucket {bucket} is out of range",
                f"a bucket is a token count from 1 to {MAX_BUCKET_TOKENS}",
                "for example --buckets 8,16,32",
            )
    return ladder


class Phase(StrEnum):
    """Which half of serving a graph belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


class Backend(StrEnum):
    """How a bucket becomes graphs. `auto` is what a user gives to leave the choice to the server."""

    AUTO = "auto"
    FULL = "full"
    BREAKABLE = "breakable"
    TC_PIECEWISE = "tc_piecewise"
    DISABLED = "disabled"


class _Concern(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def create(cls, **choices: Any) -> Self:
        """Settings from keyword arguments. Raises InvalidInput, one line, for anything that cannot be used."""
        try:
            return cls(**choices)
        except ValidationError as error:
            raise _as_invalid_input(error, cls) from None

    def with_changes(self, **choices: Any) -> Self:
        """A validated copy with some choices replaced."""
        return self.create(**{**self.model_dump(), **choices})


def _positive(name: str, value: float | None, example: str) -> None:
    if value is not None and value <= 0:
        raise InvalidInput(f"{name} {value:g} is not positive", f"{name} is above 0", f"for example {example}")


class ModelChoice(_Concern):
    """Which model, with which weights and in which dtype."""

    model: str = "smollm2-135m"
    weights: Literal["auto", "real", "random"] = "auto"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    prompt: str | None = None

    @field_validator("dtype", mode="before")
    @classmethod
    def _short_dtype(cls, value: object) -> object:
        """The field's short names mean the same."""
        short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        return short.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if not self.model.strip():
            raise InvalidInput("the model is empty", "a catalogue id, a local path or a hub id", "--model smollm2-135m")
        for name, text in (("model", self.model), ("prompt", self.prompt or "")):
            if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise InvalidInput(f"the {name} is not text: it holds bytes that are not UTF-8", "UTF-8 text")
        if self.prompt is not None and not self.prompt.strip():
            raise InvalidInput("the prompt is empty", "any text", 'for example --prompt "The capital of France is"')
        return self


class DeviceChoice(_Concern):
    """Which device. `device_memory_gib` is the declared capacity of the CPU device, which is accounted."""

    device: str = "auto"
    device_memory_gib: float = 8.0

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise InvalidInput(f"device {self.device!r} is unknown", "auto, cpu, cuda or cuda:N", "try --device auto")
        _positive("device memory (GiB)", self.device_memory_gib, "--device-memory 8")
        if not MIN_DEVICE_GIB <= self.device_memory_gib <= MAX_DEVICE_GIB:
            raise InvalidInput(
                f"device memory {self.device_memory_gib:g} GiB is out of range",
                f"{MIN_DEVICE_GIB:g} to {MAX_DEVICE_GIB:g} GiB",
            )
        return self


class MemoryChoice(_Concern):
    """How much of the device weights and KV pool may take, or how much is to be left before the capture."""

    mem_fraction: float | Literal["auto"] = "auto"
    free_memory_gib: float | None = None

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        fraction = self.mem_fraction
        if fraction != "auto" and not 0 < fraction < 1:
            raise InvalidInput(
                f"memory fraction {fraction:g} is out of range",
                "mem_fraction_static lies between 0 and 1 (both excluded), or is auto",
                "for example --mem-fraction 0.85",
            )
        _positive("free memory (GiB)", self.free_memory_gib, "--free-memory 3.99")
        if self.free_memory_gib is not None and self.free_memory_gib > MAX_DEVICE_GIB:
            raise InvalidInput(
                f"free memory {self.free_memory_gib:g} GiB is out of range", f"up to {MAX_DEVICE_GIB:g} GiB"
            )
        if fraction != "auto" and self.free_memory_gib is not None:
            raise InvalidInput(
                "--free-memory and --mem-fraction exclude each other",
                "one of them decides the size of the KV pool",
                "leave one out",
            )
        return self


class GraphChoice(_Concern):
    """Backend and ladder. `request_slots` and `max_context` size the `full` backend's static attention."""

    backend: Backend = Backend.AUTO
    compiler: Literal["eager", "inductor"] = "eager"
    max_tokens: int | None = None
    buckets: tuple[int, ...] | None = None
    chunked_prefill_size: int | None = None
    request_slots: int = 4
    max_context: int = 2048

    @model_validator(mode="after")
    def _check_graph(self) -> Self:
        for name, value in (("max tokens", self.max_tokens), ("chunked prefill size", self.chunked_prefill_size)):
            if value is not None and not 1 <= value <= MAX_BUCKET_TOKENS:
                raise InvalidInput(f"{name} {value} is out of range", f"1 to {MAX_BUCKET_TOKENS} tokens")
        if not 1 <= self.request_slots <= 1024:
            raise InvalidInput(f"request slots {self.request_slots} is out of range", "1 to 1024 requests")
        if not 16 <= self.max_context <= MAX_BUCKET_TOKENS:
            raise InvalidInput(f"max context {self.max_context} is out of range", f"16 to {MAX_BUCKET_TOKENS} tokens")
        if self.buckets is not None:
            ladder = tuple(check_buckets(self.buckets))
            if self.max_tokens is not None:
                raise InvalidInput("--buckets and --max-tokens exclude each other", "one of them sets the ladder")
            object.__setattr__(self, "buckets", ladder)
        return self

    @property
    def locked_keys(self) -> LockedKeys:
        """What was chosen by hand. Only a backend given by name locks `("prefill", "backend")`, as in SGLang."""
        return frozenset() if self.backend is Backend.AUTO else frozenset({("prefill", "backend")})

    @property
    def resolved_backend(self) -> Backend:
        """The backend that will run: `auto` resolves to breakable, SGLang's default since 0.5.15 on CUDA."""
        return Backend.BREAKABLE if self.backend is Backend.AUTO else self.backend


class ReserveChoice(_Concern):
    """What has to stay free after the capture.

    `reserve_gib` is a margin; None is the smaller of 0.5 GiB and 10 % of what is free before. The `post_capture`
    fields declare what something needs later, by hand: so many GiB, and so many MiB more for each 1024 tokens of the
    longest prompt. Source of the idea: public issue sgl-project/sglang#40094 (337 MB and 5.58 MB for each 1K tokens).
    """

    reserve_gib: float | None = None
    post_capture_gib: float | None = None
    post_capture_mib_per_1k: float | None = None
    longest_prompt: int | None = None

    @model_validator(mode="after")
    def _check_reserve(self) -> Self:
        amounts = {
            "reserve (GiB)": (self.reserve_gib, "--reserve 0.5"),
            "post-capture need (GiB)": (self.post_capture_gib, "--post-capture 0.31"),
            "post-capture need per 1K tokens (MiB)": (self.post_capture_mib_per_1k, "--post-capture-per-1k 5.3"),
        }
        for name, (value, example) in amounts.items():
            most = MAX_DEVICE_GIB
            if value is not None and not 0 <= value <= most:
                unit = "MiB" if "MiB" in name else "GiB"
                raise InvalidInput(f"{name} {value:g} is out of range", f"0 to {most:g} {unit}", example)
        if self.longest_prompt is not None and not 1 <= self.longest_prompt <= 1 << 30:
            raise InvalidInput(f"longest prompt {self.longest_prompt} is out of range", f"1 to {1 << 30} tokens")
        if (self.post_capture_mib_per_1k is None) != (self.longest_prompt is None):
            raise InvalidInput(
                "a need per 1K tokens and the longest prompt belong together",
                "both or neither",
                "for example --post-capture-per-1k 5.3 --longest-prompt 98304",
            )
        return self

    @property
    def post_capture_need_gib(self) -> float:
        """GiB declared to be needed after the capture; 0 when nothing is declared."""
        grows = (self.post_capture_mib_per_1k or 0.0) * (self.longest_prompt or 0) / 1024
        return (self.post_capture_gib or 0.0) + grows / 1024


class PolicyChoice(_Concern):
    """Who decides whether to capture, and for which role the server is started."""

    policy: str = "ungated"
    role: Literal["target", "draft"] = "target"


class CaptureSettings(ModelChoice, DeviceChoice, MemoryChoice, GraphChoice, ReserveChoice, PolicyChoice):
    """Everything one capture needs; flat, frozen, and the same in Python, JSON and on the command line."""


def _as_invalid_input(error: ValidationError, settings: type[BaseModel]) -> InvalidInput:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"] if not isinstance(part, int)) or "settings"
    if first["type"] == "extra_forbidden":
        return InvalidInput(f"setting {name!r} is unknown", f"settings are {', '.join(settings.model_fields)}")
    return InvalidInput(f"{name.split('.')[0]} {_shown(first['input'])} cannot be used", str(first["msg"]))


def _shown(value: object) -> str:
    """A value as written, at a length a line can bear."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "with thousands of digits"
    return text if len(text) <= 80 else f"{text[:80]}..."
