"""The forecast of the toolkit's own engine for what is picked: as exact as a capture on the accounted CPU device."""

from __future__ import annotations

import functools
import math

from toolkit.catalogue import load_config, resolve_model
from toolkit.errors import InvalidInput, PrefillLabError, one_line
from toolkit.forecast.before_capture import before_capture
from toolkit.forecast.terms import Forecast
from toolkit.memory.ledger import resolve_sizes
from toolkit.settings import Backend, CaptureSettings
from toolkit.widgets.verdicts import Foresight


def foresee(settings: CaptureSettings, total_mib: float | None, gpu_name: str) -> Foresight:
    """The forecast for `settings` on a device of `total_mib` MiB. Never raises.

    Imports torch and Transformers, which takes seconds; then a new model takes up to two, and one it knows a tenth.

    Args:
        settings: what is to be captured.
        total_mib: memory of the device; None where it is not known.
        gpu_name: the card as its driver names it; not looked at for the CPU device.
    """
    if settings.backend is Backend.DISABLED:
        return Foresight(problem="no forecast: the prefill graph is disabled by hand")
    source = resolve_model(settings.model)
    if source.kind == "hub":
        return Foresight(problem="no forecast: the model's config is fetched when the capture starts")
    if total_mib is None:
        return Foresight(problem="no forecast: the memory of the device is not known")
    try:
        return _foresee(settings, total_mib, gpu_name)
    except PrefillLabError as error:
        return Foresight(problem=f"no forecast: {error}")
    except Exception as error:  # a config is somebody's file
        return Foresight(problem=one_line(f"no forecast ({type(error).__name__}: {error})"))


def _foresee(settings: CaptureSettings, total_mib: float, gpu_name: str) -> Foresight:
    from toolkit.forecast.own_traces import capture_traces
    from toolkit.runs.foretell import forecast_run

    config = load_config(resolve_model(settings.model)).get_text_config()
    sizes = resolve_sizes(settings, total_mib, mla=getattr(config, "kv_lora_rank", None) is not None)
    traces = capture_traces(config, settings)
    try:
        before = before_capture(settings, sizes, traces, config, int(total_mib * 2**20))
    except InvalidInput as error:
        return Foresight(no_start=str(error))
    device = {"kind": "cpu" if settings.device == "cpu" else "cuda", "name": gpu_name}
    # One forecast for every policy: where the KV pool comes last, a peak may differ by the gaps beside it.
    kv_first = settings.with_changes(policy="ungated")

    @functools.cache
    def ask(ladder: tuple[int, ...]) -> Forecast:
        return forecast_run(kv_first, ladder, device, before.kv_tokens, max(sizes.buckets))

    whole = ask(sizes.buckets)
    if not whole.buckets:
        return Foresight(blocked="; ".join(whole.notes))
    if not math.isfinite(whole.peak.mid):
        return Foresight(problem=whole.notes[-1], unforeseen=True)
    buckets = tuple(sorted(one.num_tokens for one in whole.buckets))
    return Foresight(ask=ask, buckets=buckets, before=before)
