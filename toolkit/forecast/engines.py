"""Which engines forecast, by name: each turns a request into a `Forecast` and is imported when it is first asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from toolkit.errors import InvalidInput
from toolkit.forecast.terms import Forecast
from toolkit.hardware import GpuSpec
from toolkit.settings import Backend

SGLANG = "sglang"
"""The server itself: its refusals and its KV formulas hold. Any other engine is the toolkit's own runner."""


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """What an engine may look at.

    Attributes:
        model: what names the model: a catalogue id, a path or a hub id.
        config: the text decoder's config, anything with its attributes.
        gpu: the card, for what depends on its architecture.
        buckets: token counts of the ladder.
        backend: one that captures.
        tp: ranks that share the layers.
        dtype: of the activations, for example `bfloat16`.
        weights: how the linear layers are stored: bf16, fp8, int4 or mxfp4.
        compiler: of tc_piecewise in the toolkit's own runner.
        request_slots: requests of one batch, for the toolkit's own `full`.
        max_context: tokens of the longest context, for the toolkit's own `full`.
    """

    model: str
    config: Any
    gpu: GpuSpec
    buckets: tuple[int, ...]
    backend: Backend
    tp: int = 1
    dtype: str = "bfloat16"
    weights: str = "bf16"
    compiler: str = "eager"
    request_slots: int = 4
    max_context: int = 2048


Engine = Callable[[ForecastRequest], Forecast]


def _sglang(request: ForecastRequest) -> Forecast:
    from toolkit.forecast.sglang_engine import forecast_sglang

    return forecast_sglang(
        request.config,
        request.buckets,
        backend=request.backend,
        tp=request.tp,
        dtype=request.dtype,
        weights=cast(Any, request.weights),  # checked there
    )


def _transformers(request: ForecastRequest) -> Forecast:
    from toolkit.catalogue import load_config, resolve_model
    from toolkit.forecast.own_engine import forecast_transformers
    from toolkit.memory.rank_local import rank_local_config

    config = load_config(resolve_model(request.model)).get_text_config()
    return forecast_transformers(
        rank_local_config(config, request.tp),
        request.buckets,
        backend=request.backend,
        compiler=request.compiler,
        dtype=request.dtype,
        request_slots=request.request_slots,
        max_context=request.max_context,
        gpu=request.gpu,
    )


ENGINES: dict[str, Engine] = {SGLANG: _sglang, "transformers": _transformers}
"""Every engine by its name on the command line."""


def get_engine(name: str) -> Engine:
    """The engine called `name`. Raises InvalidInput listing the names there are."""
    try:
        return ENGINES[name]
    except KeyError:
        raise InvalidInput(
            f"engine {name!r} is unknown", f"engines are {', '.join(ENGINES)}", "for example --engine sglang"
        ) from None
