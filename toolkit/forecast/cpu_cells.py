"""Cells of a policy map on the accounted CPU device, where captures can really be executed without a GPU.

The situation before the capture is put together as `toolkit.prefill.build` does it, over meta tensors: the same
allocator model is charged with the same weights, KV pool and static buffers. Forecasts have no range there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.catalogue import load_config, resolve_model
from toolkit.errors import InvalidInput
from toolkit.forecast.cells import CellPlan, cell_key
from toolkit.forecast.outcomes import Situation, plan_policy
from toolkit.forecast.own_engine import ENGINE, forecast_transformers
from toolkit.forecast.plan_settings import chosen_policies
from toolkit.forecast.terms import Forecast
from toolkit.forecast.verdicts import Room
from toolkit.memory.allocator import CachingAllocator
from toolkit.memory.ledger import GIB, Sizes, resolve_sizes
from toolkit.memory.rules import resolve
from toolkit.policies import get_policy
from toolkit.settings import CaptureSettings

if TYPE_CHECKING:
    from toolkit.forecast.own_traces import CaptureTraces

DEVICE = "cpu (accounted)"
"""What the device's figures are labelled with, here and in records."""


def cpu_device(memory_gib: float) -> str:
    """The CPU device of that capacity, as maps and records name it."""
    return f"{DEVICE}, {memory_gib:g} GiB declared"


class CpuCells:
    """Cells on the CPU device; traces are shared, since the engine keeps them."""

    settings_class = CaptureSettings

    def plan(self, settings: CaptureSettings) -> CellPlan:
        """The cell of some settings. `policy` may name several, or `all`."""
        try:
            return _cell(settings)
        except InvalidInput as error:
            return CellPlan(problem=str(error), engine=ENGINE, device=cpu_device(settings.device_memory_gib))


@dataclass(frozen=True, slots=True)
class _Before:
    """The device just before the capture: bytes free, tokens of a KV pool sized first, and what an elastic one has."""

    free: int
    kv_tokens: int
    planned: int
    backed: int
    tokens_of: Callable[[int], int]


def _cell(settings: CaptureSettings) -> CellPlan:
    from toolkit.forecast.own_traces import capture_traces

    config = load_config(resolve_model(settings.model)).get_text_config()
    mla = getattr(config, "kv_lora_rank", None) is not None
    sizes = resolve_sizes(settings, settings.device_memory_gib * 1024, mla=mla)
    traces = capture_traces(config, settings)
    before = _before(settings, sizes, traces, config)

    def ask(buckets: tuple[int, ...], kv_first: bool = True) -> Forecast:
        return forecast_transformers(
            settings.model,
            buckets,
            backend=settings.resolved_backend,
            compiler=settings.compiler,
            dtype=settings.dtype,
            request_slots=settings.request_slots,
            max_context=settings.max_context,
            kv_cache_tokens=before.kv_tokens,
            kv_first=kv_first,
            static_tokens=max(sizes.buckets),
        )

    forecast = ask(sizes.buckets)
    if not forecast.buckets:
        raise InvalidInput(forecast.notes[0] if forecast.notes else "no bucket is left", "a ladder the engine captures")
    buckets = tuple(sorted(one.num_tokens for one in forecast.buckets))
    now = _situation(settings, buckets, before, mla)
    names = chosen_policies(settings.policy)
    return CellPlan(
        engine=ENGINE,
        device=cpu_device(settings.device_memory_gib),
        buckets=buckets,
        room=Room(now.free_gib, now.free_gib, now.free_gib, now.later_gib),
        kv_cache_tokens=before.kv_tokens,
        more_gib=now.kv_room_gib,
        forecast=forecast,
        policies={name: plan_policy(name, now, partial(ask, kv_first=get_policy(name).kv_first)) for name in names},
        ask=ask,
        key=cell_key(settings, cpu_device(settings.device_memory_gib), sizes.buckets, sizes.mem_fraction_static),
    )


def _situation(settings: CaptureSettings, buckets: tuple[int, ...], before: _Before, mla: bool) -> Situation:
    free, later = before.free / GIB, settings.post_capture_need_gib
    return Situation(
        free_gib=free,
        free_low_gib=free,
        kv_cache_tokens=before.kv_tokens,
        buckets=buckets,
        resolved=resolve(None, settings.device_memory_gib * 1024, 1, mla, prefill_backend="breakable"),
        backend=settings.resolved_backend,
        locked_keys=settings.locked_keys,
        reserve_gib=settings.reserve_gib,
        later_gib=later,
        later_words=f"declared {later:.2f} GiB" if later else "",
        # Memory for one full bucket is behind an elastic pool from the start; a capture has the rest.
        kv_room_gib=max(0, before.planned - before.backed) / GIB,
        kv_tokens=lambda gib: before.tokens_of(before.backed + int(gib * GIB)),
    )


def _before(settings: CaptureSettings, sizes: Sizes, traces: CaptureTraces, config: Any) -> _Before:
    """Charge the allocator model as the engine would, and read it."""
    import torch

    from toolkit.prefill.build import NoMemoryForKV, kv_tokens_that_fit
    from toolkit.prefill.devices.cpu import BACKING_STEP
    from toolkit.prefill.elastic_kv import pool_bytes, row_bytes, tokens_that_fit
    from toolkit.prefill.kv_pool import bytes_per_token

    capacity = int(settings.device_memory_gib * GIB)
    dtype, geometry = getattr(torch, settings.dtype), traces.geometry
    after_weights = capacity - _weights_bytes(traces)
    if after_weights < 0:
        raise InvalidInput(
            f"weights do not fit {cpu_device(settings.device_memory_gib)}",
            f"{settings.model} takes {(capacity - after_weights) / GIB:.2f} GiB",
            "declare more memory",
        )
    try:
        tokens = kv_tokens_that_fit(settings, sizes, geometry, dtype, capacity, after_weights, config)
    except NoMemoryForKV as error:
        raise InvalidInput(str(error), "a fraction that weights leave room in", "raise it") from None
    allocator = CachingAllocator()
    held = traces.runner(allocator, tokens, sizes.buckets)
    free = capacity - allocator.reserved_bytes()
    del held
    if settings.free_memory_gib is not None:
        free = min(free, int(settings.free_memory_gib * GIB))
    per_token, rows = bytes_per_token(geometry, dtype.itemsize), row_bytes(geometry, dtype.itemsize)
    first = max(sizes.buckets, default=1)
    most = max(first, after_weights // per_token) if per_token else first
    return _Before(
        free=free,
        kv_tokens=tokens,
        planned=(tokens + 1) * per_token,
        backed=pool_bytes(rows, first, BACKING_STEP),
        tokens_of=lambda nbytes: tokens_that_fit(rows, nbytes, BACKING_STEP, most),
    )


def _weights_bytes(traces: CaptureTraces) -> int:
    """What the weights take of the device: the allocator hands memory out in steps."""
    from toolkit.prefill.devices.meta import MetaDevice

    allocator = CachingAllocator()
    device = MetaDevice(allocator)
    device.adopt([*traces.model.parameters(), *traces.model.buffers()])
    device.empty_cache()
    return allocator.reserved_bytes()
