"""What the forecast of the toolkit's own engine would have said of a run: same model, ladder, backend and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput
from toolkit.policies import get_policy
from toolkit.runs.record import RunRecord

if TYPE_CHECKING:
    from toolkit.forecast.terms import Forecast
    from toolkit.settings import CaptureSettings


def foretell(record: RunRecord) -> Forecast:
    """The forecast of the ladder that a run was to capture; imports torch and Transformers, needs no GPU.

    Raises InvalidInput when the record does not say what was captured, names a model that is not here or a card
    that is not in the catalogue.
    """
    from toolkit.settings import CaptureSettings

    known = {name: value for name, value in record.settings.items() if name in CaptureSettings.model_fields}
    if not record.capture_order:
        raise InvalidInput("the run captured nothing and planned no bucket", "a run with buckets")
    asked = max(*record.capture_order, *record.trimmed, 0)
    settings = CaptureSettings.create(**known)
    return forecast_run(settings, record.capture_order, record.device, record.kv_cache_tokens, asked)


def forecast_run(
    settings: CaptureSettings,
    buckets: Sequence[int],
    device: Mapping[str, Any],
    kv_cache_tokens: int | None,
    static_tokens: int | None = None,
) -> Forecast:
    """The forecast of capturing `buckets` under `settings` on the device that a record names.

    `static_tokens` is the largest bucket asked for where `buckets` are a part of that ladder: the static buffers were
    made for it.

    Raises InvalidInput for a model that is not here or a card that is not in the catalogue.
    """
    from toolkit.forecast.own_engine import forecast_for
    from toolkit.hardware import gpu_like

    on_cpu = device.get("kind") == "cpu"
    capability = device.get("compute_capability")
    return forecast_for(
        settings,
        buckets,
        kv_cache_tokens=kv_cache_tokens,
        kv_first=get_policy(settings.policy).kv_first,
        static_tokens=static_tokens,
        # Of the card only its architecture counts here.
        gpu=None if on_cpu else gpu_like(str(device.get("name")), float(capability) if capability else None),
    )
