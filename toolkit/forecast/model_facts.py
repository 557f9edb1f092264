"""What a plan has to know about a model: shapes, how its weights are stored, and as what a server reads it.

Catalogue models need neither torch nor Transformers; a config.json of somebody's is read by Transformers, which knows
the defaults of its family.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from toolkit.catalogue import ModelEntry, ModelSource, load_config, published_facts, resolve_model
from toolkit.errors import InvalidInput, one_line
from toolkit.memory.parameters import Parameter, is_counted, rank_parameters, stored_gib
from toolkit.memory.server import hf_traits
from toolkit.resources import short

Weights = Literal["bf16", "fp8", "int4", "mxfp4"]
WEIGHTS: tuple[str, ...] = ("bf16", "fp8", "int4")
"""What `--weights` takes; `mxfp4` exists as a published form alone."""
_MATRICES = re.compile(r"\.layers\.\d+\.(self_attn|mlp)\.(?!gate\.|router\.)[\w.]*proj(_with_mqa)?(\.weight)?$")
_ROUTED = re.compile(r"\.mlp\.experts\.[\w.]*proj(\.weight)?$")
_FP8_BITS, _INT4_BITS = 8.001953125, 4.5
_LAYOUTS = {
    "bf16": "every parameter in 16 bits",
    "fp8": "fp8 with one fp32 scale per 128 x 128 block for the matrices of all layers, as DeepSeek-V3 is published; "
    "embeddings, head, norms and routers stay 16 bit",
    "int4": "int4 with one 16-bit scale per group of 32 (4.5 bits) for routed experts, or for all matrices of the "
    "layers where there are none, as Kimi-K2.7-Code is published; everything else stays 16 bit",
    "mxfp4": "MXFP4, 4.25 bits, for routed experts, as gpt-oss is published; everything else stays 16 bit",
}


@dataclass(frozen=True)
class ModelFacts:
    """One model as a plan sees it.

    Attributes:
        id: the catalogue id, or the name of a folder or file.
        architecture: as a server reads it in the published config.
        config: the text decoder's config: an object with its attributes.
        parameters: of the text decoder, tied weights once.
        tower_parameters: of the vision or audio tower that the published model has in front of it.
        published_weights: how the published checkpoint stores them.
        entry: the catalogue's, None for a local model.
    """

    id: str
    architecture: str | None
    config: Any = field(repr=False)
    parameters: int
    tower_parameters: int
    published_weights: Weights
    mla: bool
    dsa: bool
    entry: ModelEntry | None = field(default=None, repr=False)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.config.num_hidden_layers)

    def weights_gib(self, tp: int, weights: str | None, plain_bits: int = 16) -> float:
        """GiB of weights on each of `tp` ranks; the tower is counted whole on every rank, in 16 bits.

        Args:
            tp: tensor parallel size.
            weights: one of `WEIGHTS`; None takes the published checkpoint's.
            plain_bits: of what is not quantised.

        Raises:
            InvalidInput: tp does not divide the model.
        """
        text = stored_gib(_rank(self, tp), self._bits(weights or self.published_weights, plain_bits))
        return text + self.tower_parameters * 16 / 8 / (1 << 30)

    def layout(self, weights: str | None) -> str:
        """How the weights are stored, in words."""
        kind = weights or self.published_weights
        if kind == self.published_weights and self.entry is not None and self.entry.quantization is not None:
            return one_line(self.entry.quantization.note)
        return _LAYOUTS[kind]

    def _bits(self, kind: str, plain: int) -> Callable[[str], float]:
        if kind == self.published_weights and self.entry is not None:
            entry = self.entry
            return lambda name: entry.stored_bits(name, plain)
        if kind == "bf16":
            return lambda _: plain
        moe = any(_ROUTED.search(parameter.name) for parameter in _rank(self, 1))
        chosen = _ROUTED if moe and kind != "fp8" else _MATRICES
        bits = {"fp8": _FP8_BITS, "int4": _INT4_BITS, "mxfp4": 4.25}[kind]
        return lambda name: bits if chosen.search(name) else plain


def model_facts(spec: str) -> ModelFacts:
    """The facts of a catalogue id, hub id, folder or config.json. Raises ModelUnavailable or InvalidInput."""
    source = resolve_model(spec)
    return _catalogue_facts(source.entry) if source.entry is not None else _facts(source)


def unplannable(name: str, error: Exception) -> InvalidInput:
    """What to raise where the config of a model that is not of the catalogue broke the arithmetic of a plan.

    Somebody's file can hold any value anywhere, and Transformers checks few of them.
    """
    return InvalidInput(
        f"the config of {name!r} cannot be planned ({type(error).__name__}: {short(error)})",
        "a decoder whose hidden_size, num_hidden_layers, num_attention_heads, vocab_size and the like fit together",
        "check the file",
    )


@functools.lru_cache(maxsize=64)
def _catalogue_facts(entry: ModelEntry) -> ModelFacts:
    return _facts(ModelSource("catalogue", entry.id, entry=entry))


def _facts(source: ModelSource) -> ModelFacts:
    published = published_facts(source)
    config: Any = SimpleNamespace(**{"layer_types": _layer_types(published), **published})
    if source.entry is None or not is_counted(config):
        config = load_config(source)
    said = published.get("architectures") or getattr(config, "architectures", None)
    names = [str(name) for name in said] if isinstance(said, list) else []
    traits = hf_traits(SimpleNamespace(architectures=names, text_config=config))
    entry = source.entry
    is_tower = entry is not None and entry.architecture != entry.published_architecture
    tower = (entry.published_parameters or entry.parameters) - entry.parameters if entry and is_tower else 0
    try:
        parameters = sum(parameter.elements for parameter in rank_parameters(config))
    except (AttributeError, TypeError, ArithmeticError) as error:
        raise unplannable(source.id, error) from None
    return ModelFacts(
        id=source.id,
        architecture=names[0] if names else None,
        config=config,
        parameters=parameters,
        tower_parameters=max(0, tower),
        published_weights=entry.published_weights if entry else _stored_as(published),  # type: ignore[arg-type]
        mla=bool(traits["mla"]),
        dsa=bool(traits["dsa"]),
        entry=entry,
    )


@functools.lru_cache(maxsize=256)
def _rank_of_entry(entry: ModelEntry, tp: int) -> list[Parameter]:
    return rank_parameters(_catalogue_facts(entry).config, tp)


def _rank(model: ModelFacts, tp: int) -> list[Parameter]:
    return _rank_of_entry(model.entry, tp) if model.entry is not None else rank_parameters(model.config, tp)


def _layer_types(published: dict[str, Any]) -> list[str] | None:
    """Gemma writes every how manyth layer attends fully; None where all do or the config lists them itself."""
    period, layers = published.get("sliding_window_pattern"), published.get("num_hidden_layers")
    if not period or not layers or not published.get("sliding_window"):
        return None
    return ["full_attention" if (n + 1) % period == 0 else "sliding_attention" for n in range(layers)]


def _stored_as(published: dict[str, Any]) -> Weights:
    """What `quantization_config` of a config.json says, of the kinds a plan knows; else 16 bits."""
    said = published.get("quantization_config")
    method = str((said or {}).get("quant_method", "")) if isinstance(said, dict) or said is None else ""
    bits = re.findall(r"'(?:num_)?bits': (\d+)", str(said))
    if method in ("fp8", "mxfp4"):
        return "fp8" if method == "fp8" else "mxfp4"
    return {"4": "int4", "8": "fp8"}.get(bits[0], "bf16") if bits else "bf16"  # type: ignore[return-value]
