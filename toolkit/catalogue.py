"""Which models there are: the catalogue in `data/models`, local folders and files, and hub ids.

Light: neither torch nor transformers is imported before `load_config`.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from toolkit.errors import ModelUnavailable, PrefillLabError
from toolkit.resources import IMPORTING, data_dir, fetch_from_hub, short

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SourceKind = Literal["catalogue", "folder", "config", "gguf", "hub"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_LAYERS = 1024  # the deepest published decoders have a few hundred
# Hub model types whose code lives under another name in Transformers. Their own code is never run.
_SAME_CODE_AS = {"kimi_k2": "deepseek_v3"}
# A family's short name means its newest member: public reports of "Kimi-K2" on eight H100 are of K2.7-Code.
_SHORT_NAMES = {"kimi-k2": "kimi-k2.7-code"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a published checkpoint stores some of its parameters in fewer bits than the rest.

    `bits_per_weight` includes the scales; `parameters` is a regular expression over parameter names as
    Transformers builds the model.
    """

    bits_per_weight: float
    parameters: str
    note: str


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the catalogue: facts about its published config and checkpoint.

    `architecture` is the text decoder that Transformers builds from `config`; `published_architecture` is
    what a server reads in the published config.json, different where the model is multimodal. `parameters`
    is the exact count of that text decoder (`parameters_note` says how it was counted);
    `published_parameters` the hub's own count of the whole checkpoint, and `published_bytes` its size.
    """

    id: str
    name: str
    hub_id: str
    architecture: str
    published_architecture: str
    parameters: int
    parameters_note: str
    published_parameters: int | None
    published_dtype: str
    published_weights: str
    published_bytes: int | None
    quantization: Quantization | None
    license: str
    source: str
    checked: str
    config: Mapping[str, Any] = field(hash=False)

    @property
    def model_type(self) -> str:
        """Transformers' name of the architecture, for example `qwen3`."""
        return str(self.config["model_type"])

    def stored_bits(self, parameter: str, plain_bits: float = 16.0) -> float:
        """Bits that the published checkpoint spends on each element of the parameter of that name."""
        if self.quantization and re.search(self.quantization.parameters, parameter):
            return self.quantization.bits_per_weight
        return plain_bits


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. `id` is for people and records: never an absolute path.

    `entry` is set for a catalogue id and for a hub id that the catalogue knows, so that planning with either
    needs no network.
    """

    kind: SourceKind
    id: str
    entry: ModelEntry | None = None
    path: Path | None = None
    hub_id: str | None = None


class _QuantizationFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    bits_per_weight: float
    parameters: str
    note: str


class _EntryFile(BaseModel):
    """What a file in `data/models` must look like."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str
    name: str
    hub_id: str
    architecture: str
    published_architecture: str
    parameters: int
    parameters_note: str
    published_parameters: int | None
    published_dtype: str
    published_weights: Literal["bf16", "fp8", "mxfp4", "int4"]
    published_bytes: int | None
    quantization: _QuantizationFile | None
    license: str
    source: str
    checked: str
    config: dict[str, Any]

    def entry(self) -> ModelEntry:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        if self.quantization is not None:
            values["quantization"] = Quantization(**self.quantization.model_dump())
        values["config"] = MappingProxyType(self.config)
        return ModelEntry(**values)


# --- the catalogue ------------------------------------------------------------------------------------------


@functools.cache
def _entries() -> Mapping[str, ModelEntry]:
    entries: dict[str, ModelEntry] = {}
    for path in (data_dir() / "models").glob("*.json"):
        try:
            entry = _EntryFile.model_validate_json(path.read_bytes()).entry()
            if entry.id != path.stem or "model_type" not in entry.config:
                raise ValueError("the id is not the file's name, or config has no model_type")
        except (OSError, ValidationError, ValueError) as error:
            what = f"data/models/{path.name} is damaged ({short(error)})"
            raise PrefillLabError(f"{what}; reinstall prefill-lab") from None
        entries[entry.id] = entry
    return MappingProxyType(dict(sorted(entries.items())))


def model_ids() -> list[str]:
    """Every catalogue id, sorted."""
    return list(_entries())


def get_model(model_id: str) -> ModelEntry:
    """The catalogue entry of that id, in any case. Raises ModelUnavailable with close matches."""
    entry = _entry(model_id)
    if entry is None:
        raise _unknown(model_id)
    return entry


def short_name(name: str) -> str | None:
    """The catalogue id that a family's short name stands for; None for any other name."""
    return _SHORT_NAMES.get(name.strip().lower())


def _entry(name: str) -> ModelEntry | None:
    plain = name.strip().lower()
    return _entries().get(_SHORT_NAMES.get(plain, plain))


def search_models(text: str) -> list[ModelEntry]:
    """Entries in whose id, name, hub id or architecture every word of `text` occurs: all, if it is empty."""

    def haystack(entry: ModelEntry) -> str:
        facts = (entry.id, entry.name, entry.hub_id, entry.architecture, entry.published_architecture)
        return " ".join((*facts, entry.model_type)).lower()

    words = text.lower().split()
    return [entry for entry in _entries().values() if all(word in haystack(entry) for word in words)]


def offline_choices() -> str:
    """What can be used without a network, on one line; ends error messages about models."""
    return (
        "offline, give a local folder, config.json or .gguf file, or smollm2-135m, or with --weights random "
        + ", ".join(name for name in model_ids() if name != "smollm2-135m")
    )


def _unknown(spec: str) -> ModelUnavailable:
    wanted = spec.strip().lower()
    names = {entry.id: entry.id for entry in _entries().values()}
    names |= {entry.hub_id.lower(): entry.id for entry in _entries().values()}
    names |= {entry.hub_id.rpartition("/")[2].lower(): entry.id for entry in _entries().values()}
    # "qwen3-8b-instruct" contains the id that is meant, however far it is by letters.
    close = [name for name in names if name in wanted] + difflib.get_close_matches(wanted, names, 4, 0.5)
    hint = ", ".join(list(dict.fromkeys(names[name] for name in close))[:4])
    what = f"unknown model {_shown(spec)}" + (f" (close: {hint})" if hint else "")
    allowed = "a model is a catalogue id, a local path or a hub id org/name"
    return ModelUnavailable(what, allowed, offline_choices())


def _shown(spec: str) -> str:
    return repr(spec if len(spec) <= 80 else spec[:77] + "...")


# --- from what a person gives to a source -------------------------------------------------------------------


def resolve_model(spec: str) -> ModelSource:
    """What `spec` means: a catalogue id, something on this machine, or a hub id, looked for in that order.

    A local path is a folder with a config.json, a config file, or a .gguf file. No network is used here. A
    hub id that the catalogue knows comes with its entry.

    Raises:
        ModelUnavailable: it is none of these; the message has close matches and the offline choices.
    """
    spec = spec.strip()
    if entry := _entry(spec):
        return ModelSource("catalogue", entry.id, entry=entry, hub_id=entry.hub_id)
    try:
        path = Path(spec).expanduser()
        found = bool(spec) and path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user's home, or a null byte
        found = False
    if found:
        return _local_source(spec, path)
    if _HUB_ID.fullmatch(spec):
        known = next((e for e in _entries().values() if e.hub_id.lower() == spec.lower()), None)
        return ModelSource("hub", spec, entry=known, hub_id=known.hub_id if known else spec)
    if "/" in spec or spec.endswith((".json", ".gguf")):
        raise ModelUnavailable(
            f"there is no file or folder {_shown(spec)}",
            "a local model is a folder with config.json, a config file or a .gguf file",
            "check the path",
        )
    raise _unknown(spec)


def _local_source(spec: str, path: Path) -> ModelSource:
    name = path.name or path.resolve().name or "model"  # "." has no name of its own
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource("folder", name, path=path)
        files = sorted(file.name for file in path.glob("*.gguf"))
        raise ModelUnavailable(
            f"folder {_shown(spec)} has no config.json",
            "a model folder holds config.json and, for real weights, safetensors",
            f"give the file itself: {files[0]}" if files else "check the path",
        )
    suffix = path.suffix.lower()
    if path.is_file() and suffix == ".gguf":
        return ModelSource("gguf", name, path=path)
    if path.is_file() and suffix == ".json":
        return ModelSource("config", name, path=path)
    raise ModelUnavailable(
        f"{_shown(spec)} is not a model",
        "a local model is a folder with config.json, a config file or a .gguf file; no pickle is loaded",
        "convert the weights to safetensors",
    )


# --- configs ------------------------------------------------------------------------------------------------


def load_config(source: ModelSource) -> PretrainedConfig:
    """The text decoder's Transformers config. A new object each time; only an unknown hub id needs a network.

    Raises:
        ModelUnavailable: the config cannot be read or fetched, or is no causal decoder of Transformers.
    """
    facts: dict[str, Any] = {}
    if source.entry is not None:
        facts = dict(source.entry.config)
    elif source.kind != "gguf":  # before the lock: the hub may take its time
        facts = _read_json(_config_file(source), source.id)
    with IMPORTING:
        return _config(source, facts)


def _config(source: ModelSource, facts: dict[str, Any]) -> PretrainedConfig:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = _config_from_facts(facts, source.id) if facts else _config_from_gguf(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise ModelUnavailable(
            f"model {source.id!r} has model_type {config.model_type!r}, which is not a causal decoder",
            "decoder-only language models that Transformers builds",
            "see the catalogue for examples",
        )
    return config


def published_facts(source: ModelSource) -> dict[str, Any]:
    """The published config.json as a mapping, with `architectures`; empty for a GGUF file, which has none.

    Of a catalogue entry it is the text decoder's part, under the name of the architecture a server reads.

    Raises:
        ModelUnavailable: the file cannot be read or fetched.
    """
    if source.entry is not None:
        return {**copy.deepcopy(dict(source.entry.config)), "architectures": [source.entry.published_architecture]}
    return {} if source.kind == "gguf" else _read_json(_config_file(source), source.id)


def _config_file(source: ModelSource) -> Path:
    if source.hub_id is not None:
        folder = fetch_from_hub(
            source.hub_id, ("config.json",), lambda got: (got / "config.json").is_file(), offline_choices()
        )
        return folder / "config.json"
    assert source.path is not None
    return source.path / "config.json" if source.kind == "folder" else source.path


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnavailable(
            f"the config of {name!r} cannot be read ({short(error)})",
            "a Transformers config.json",
            "check the file",
        ) from None
    if not isinstance(facts, dict) or not isinstance(facts.get("model_type"), str):
        raise ModelUnavailable(
            f"the config of {name!r} has no model_type", "a Transformers config.json", "check the file"
        )
    return facts


def _config_from_facts(facts: dict[str, Any], name: str) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    # `for_model` keeps the very lists and dictionaries it is given, and the catalogue's must not change.
    facts = copy.deepcopy(facts)
    model_type = str(facts.pop("model_type"))
    text = facts.get("text_config")
    if model_type not in CONFIG_MAPPING and isinstance(text, dict) and "model_type" in text:
        # A multimodal model that only its own code knows, for example kimi_k25: take its text decoder.
        return _config_from_facts(text, name)
    model_type = _SAME_CODE_AS.get(model_type, model_type)
    facts.pop("auto_map", None)  # names of remote code, which is never run
    # Transformers writes infinities as {"__float__": "Infinity"} and reads them back only from files.
    decode = getattr(PretrainedConfig, "_decode_special_floats", lambda value: value)
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **decode(facts)).get_text_config()
    except Exception as error:  # validation errors of many kinds, from code that reads somebody's file
        raise ModelUnavailable(
            f"the config of {name!r} (model_type {model_type!r}) is refused by Transformers ({short(error)})",
            "a config.json of an architecture that Transformers has",
            "check the file or update Transformers",
        ) from None
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > _MAX_LAYERS:
        raise ModelUnavailable(f"the config of {name!r} has {layers} layers", f"up to {_MAX_LAYERS}", "check the file")
    if "quantization_config" in facts:  # said of the whole model, and so of its text decoder
        config.quantization_config = facts["quantization_config"]
    return config


def _config_from_gguf(source: ModelSource) -> PretrainedConfig:
    from transformers import AutoConfig

    assert source.path is not None
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source.path.parent, gguf_file=source.path.name, local_files_only=True, trust_remote_code=False
        ).get_text_config()
    except Exception as error:  # the parser meets arbitrary bytes
        raise ModelUnavailable(
            f"GGUF file {source.id!r} cannot be read ({short(error)})",
            "a GGUF file of an architecture that Transformers can load",
            "check the file",
        ) from None
    return config
