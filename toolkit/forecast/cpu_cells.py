"""Cells of a policy map on the accounted CPU device, where captures can really be executed without a GPU.

The situation before the capture is put together as `toolkit.prefill.build` does it, over meta tensors: the same
allocator model is charged with the same weights, KV pool and static buffers. Forecasts have no range there.
"""

from __future__ import annotations

from functools import partial

from toolkit.catalogue import load_config, resolve_model
from toolkit.errors import InvalidInput
from toolkit.forecast.before_capture import BeforeCapture, before_capture
from toolkit.forecast.cells import CellPlan, cell_key
from toolkit.forecast.outcomes import PolicyOutcome, Situation, plan_policy
from toolkit.forecast.own_engine import ENGINE, forecast_for
from toolkit.forecast.plan_settings import chosen_policies
from toolkit.forecast.terms import Forecast
from toolkit.forecast.verdicts import Room
from toolkit.memory.ledger import GIB, resolve_sizes
from toolkit.memory.rules import resolve
from toolkit.policies import get_policy, reserve_gib
from toolkit.settings import CaptureSettings

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


def _cell(settings: CaptureSettings) -> CellPlan:
    from toolkit.forecast.own_traces import capture_traces

    config = load_config(resolve_model(settings.model)).get_text_config()
    mla = getattr(config, "kv_lora_rank", None) is not None
    sizes = resolve_sizes(settings, settings.device_memory_gib * 1024, mla=mla)
    traces = capture_traces(config, settings)
    before = before_capture(settings, sizes, traces, config, int(settings.device_memory_gib * GIB))

    def ask(buckets: tuple[int, ...], kv_first: bool = True) -> Forecast:
        # A smaller pool than one full bucket is refused before any capture where it comes first.
        beside = {"kv_cache_tokens": max(before.kv_tokens, max(sizes.buckets)), "static_tokens": max(sizes.buckets)}
        return forecast_for(settings, buckets, kv_first=kv_first, **beside)

    forecast = ask(sizes.buckets)
    if not forecast.buckets:
        raise InvalidInput(forecast.notes[0] if forecast.notes else "no bucket is left", "a ladder the engine captures")
    buckets = tuple(sorted(one.num_tokens for one in forecast.buckets))
    first, last = (_situation(settings, buckets, before, mla, kv_first=each) for each in (True, False))

    def outcome(name: str) -> PolicyOutcome:
        kv_first = get_policy(name).kv_first
        return plan_policy(name, first if kv_first else last, partial(ask, kv_first=kv_first))

    return CellPlan(
        engine=ENGINE,
        device=cpu_device(settings.device_memory_gib),
        buckets=buckets,
        room=Room(first.free_gib, first.free_gib, first.free_gib, first.later_gib),
        kv_cache_tokens=before.kv_tokens,
        more_gib=last.kv_last.room_gib,
        reserve_gib=reserve_gib(last.free_gib, settings.reserve_gib),
        forecast=forecast,
        policies={name: outcome(name) for name in chosen_policies(settings.policy)},
        ask=ask,
        key=cell_key(settings, cpu_device(settings.device_memory_gib), sizes.buckets, sizes.mem_fraction_static),
    )


def _situation(
    settings: CaptureSettings, buckets: tuple[int, ...], before: BeforeCapture, mla: bool, *, kv_first: bool
) -> Situation:
    later, free = settings.post_capture_need_gib, before.free_gib if kv_first else before.free_kv_last_gib
    assert free is not None  # of the CPU device it is known
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
        kv_last=before.kv_last,
    )
