"""The forecast of the toolkit's own engine for what is picked: as exact as a capture on the accounted CPU device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from toolkit.catalogue import load_config, resolve_model
from toolkit.errors import InvalidInput, PrefillLabError, one_line
from toolkit.forecast.terms import Forecast
from toolkit.memory.allocator import CachingAllocator
from toolkit.memory.ledger import Sizes, resolve_sizes
from toolkit.settings import Backend, CaptureSettings
from toolkit.widgets.verdicts import GIB, Foresight

if TYPE_CHECKING:
    from toolkit.forecast.own_traces import CaptureTraces


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
    import torch

    from toolkit.forecast.own_traces import capture_traces
    from toolkit.prefill.build import NoMemoryForKV, kv_tokens_that_fit
    from toolkit.prefill.devices.meta import MetaDevice
    from toolkit.prefill.kv_pool import bytes_per_token
    from toolkit.runs.foretell import forecast_run

    config = load_config(resolve_model(settings.model)).get_text_config()
    sizes: Sizes = resolve_sizes(settings, total_mib, mla=getattr(config, "kv_lora_rank", None) is not None)
    traces = capture_traces(config, settings)
    dtype, total = getattr(torch, settings.dtype), int(total_mib * 2**20)
    loaded = MetaDevice(CachingAllocator())
    loaded.adopt(traces.weights)
    weights = loaded.allocator.reserved_bytes()
    try:
        tokens = kv_tokens_that_fit(settings, sizes, traces.geometry, dtype, total, total - weights, config)
    except (NoMemoryForKV, InvalidInput) as error:
        return Foresight(no_start=str(error))
    on_cpu = settings.device == "cpu"
    device = {"kind": "cpu" if on_cpu else "cuda", "name": gpu_name}
    planned = (tokens + 1) * bytes_per_token(traces.geometry, dtype.itemsize) / GIB
    free_gib = free_kv_last_gib = None
    if on_cpu and settings.free_memory_gib is None:
        # One token's pool fits into what is there anyway.
        free_gib, without_pool = (_free_gib(traces, total, held, sizes.buckets) for held in (tokens, 1))
        free_kv_last_gib = without_pool - planned

    @functools.cache
    def ask(ladder: tuple[int, ...]) -> Forecast:
        return forecast_run(settings, ladder, device, tokens)

    whole = ask(sizes.buckets)
    if not whole.buckets:
        return Foresight(blocked="; ".join(whole.notes))
    if not math.isfinite(whole.peak.mid):
        return Foresight(problem=whole.notes[-1], unforeseen=True)
    buckets = tuple(sorted(one.num_tokens for one in whole.buckets))
    return Foresight(
        ask=ask,
        buckets=buckets,
        kv_tokens=tokens,
        kv_gib=planned,
        kv_fit=_kv_fit(traces, dtype.itemsize, total),
        free_gib=free_gib,
        free_kv_last_gib=free_kv_last_gib,
    )


def _free_gib(traces: CaptureTraces, total: int, kv_tokens: int, buckets: tuple[int, ...]) -> float:
    """GiB free with weights, KV pool and static buffers in place, on the accounted CPU device."""
    allocator = CachingAllocator()
    traces.runner(allocator, kv_tokens, buckets)
    return (total - allocator.reserved_bytes()) / GIB


def _kv_fit(traces: CaptureTraces, itemsize: int, total: int) -> Callable[[float], int]:
    """Tokens of a pool of so many GiB that grows after the capture: each tensor takes whole steps of memory."""
    from toolkit.prefill.devices.cpu import BACKING_STEP
    from toolkit.prefill.elastic_kv import tokens_that_fit

    rows = [layer.kv_heads * width * itemsize for layer in traces.geometry for width in (layer.k_dim, layer.v_dim)]
    most = total // max(1, sum(rows))
    return lambda gib: tokens_that_fit(rows, int(gib * GIB), BACKING_STEP, most)
