"""What a ladder of the toolkit's own engine costs: its runner traced over meta tensors, replayed ladder by ladder.

On the accounted CPU device the figures are exact, since device and forecast share runner, charges and allocator
model. On a GPU the same pool holds up to what library kernels take inside; the driver's memory for each graph and the
libraries' workspaces come on top, as ranges. MiB is 2**20 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.catalogue import load_config, resolve_model
from toolkit.forecast.own_ladder import Order, ladder_steps, ordered
from toolkit.forecast.own_traces import CaptureTraces, capture_traces
from toolkit.forecast.terms import (
    CONTEXT,
    DRIVER,
    GRAPH_POOL,
    MIB,
    RETAINED,
    WORKSPACE,
    ZERO,
    BucketForecast,
    Forecast,
    Range,
    Term,
)
from toolkit.memory.allocator import round_size, segment_size
from toolkit.settings import Backend, CaptureSettings, check_buckets

if TYPE_CHECKING:
    from toolkit.hardware import GpuSpec

ENGINE = "transformers"
DRIVER_MIB_PER_SEGMENT = Range(0.14, 0.12, 0.16)
_DRIVER_SOURCE = (
    "0.12 to 0.16 MiB a graph: public per-bucket figures of servers whose graphs break at attention, 3.6 MB over 29 "
    "segments (7B dense), 3.4 MB over 25 (0.5B), 7.55 MiB over 49 (30B mixture of experts)"
)
_WORKSPACE_BYTES = {"hopper": 32 << 20}
_PLAIN_WORKSPACE_BYTES = 8_519_680
_WORKSPACE_SOURCE = (
    "one cuBLAS workspace of the capture stream (torch's default: 8,519,680 bytes, 32 MiB on Hopper), allocated by the "
    "first matrix product and kept; at most with the rest of its segment"
)
_UNKNOWN = Range.exact(math.nan)
_EXACT = "exact: the engine's runner traced over meta tensors and replayed through the CPU device's allocator model"
_FULL_ON_GPU = (
    "full: attention runs inside the graph, and on a GPU its kernel may allocate more than the workspace that is "
    "declared and counted here: with CUDA's allocator SmolLM2's pool was seen at 82 MiB where this says 40"
)
_ON_GPU = (
    "derived: the engine's runner traced over meta tensors and replayed through the allocator model, attention as "
    "declared; range: descending and ascending addresses"
)


def forecast_transformers(
    model: Any,
    buckets: Sequence[int],
    *,
    backend: Backend | str = Backend.BREAKABLE,
    compiler: str = "eager",
    dtype: str = "bfloat16",
    request_slots: int = 4,
    max_context: int = 2048,
    order: Order = "descending",
    kv_cache_tokens: int | None = None,
    kv_first: bool = True,
    static_tokens: int | None = None,
    gpu: GpuSpec | None = None,
) -> Forecast:
    """What capturing these buckets costs the toolkit's own engine, on one device.

    Args:
        model: a Transformers config (one rank's, see `toolkit.memory.rank_local`), or what names a model anywhere
            else: a catalogue id, a path.
        buckets: token counts, in any order.
        backend: `full`, `breakable`, `tc_piecewise`, or `auto`.
        compiler: of tc_piecewise; with `inductor` the pool is n/a.
        dtype: of weights and activations.
        request_slots: of `full`: requests of its static window.
        max_context: of `full`: tokens of each request of that window.
        order: in which buckets are captured; the engine's is largest first.
        kv_cache_tokens: slots of the KV pool. On the CPU device warm-up passes may use gaps beside it, so the peak
            needs it; None assumes a pool for one full bucket. `no_size_fits` drops buckets above it.
        kv_first: whether the KV pool is sized before the capture. One that comes after has no gaps beside it.
        static_tokens: rows of the static buffers, which lie beside that pool on the CPU device: the largest bucket of
            the ladder that the engine was started with. None is the largest of `buckets`.
        gpu: the card; None is the accounted CPU device.

    Raises:
        InvalidInput: a value makes no sense.
        ModelUnavailable: the model cannot be found or built.
    """
    settings = CaptureSettings.create(
        backend=backend, compiler=compiler, dtype=dtype, request_slots=request_slots, max_context=max_context
    )
    config = load_config(resolve_model(model)) if isinstance(model, str) else model
    traces = capture_traces(config.get_text_config(), settings)
    wanted = tuple(check_buckets(list(buckets)))
    fitting, notes = _fitting(traces, wanted, kv_cache_tokens)
    if not fitting:
        return Forecast(ENGINE, (), (), notes)
    ladder = ordered(fitting, order)
    if settings.resolved_backend is Backend.TC_PIECEWISE and compiler == "inductor":
        return _not_available(ladder, notes)
    if gpu is None:
        beside = ((kv_cache_tokens or max(wanted)) if kv_first else 0, static_tokens or max(wanted))
        return _on_cpu(traces, ladder, beside, (*notes, *_cpu_notes(kv_cache_tokens)))
    if settings.resolved_backend is Backend.FULL:
        notes = (*notes, _FULL_ON_GPU)
    return _on_gpu(traces, ladder, gpu, notes)


def forecast_for(settings: CaptureSettings, buckets: Sequence[int], **moment: Any) -> Forecast:
    """`forecast_transformers` for what a capture is asked to do; `moment` are its arguments about the device."""
    return forecast_transformers(
        settings.model,
        buckets,
        backend=settings.resolved_backend,
        compiler=settings.compiler,
        dtype=settings.dtype,
        request_slots=settings.request_slots,
        max_context=settings.max_context,
        **moment,
    )


def _fitting(
    traces: CaptureTraces, buckets: tuple[int, ...], kv_tokens: int | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The buckets the engine captures, and what its guards say of the others."""
    from toolkit.prefill.guards import first_blocked, fitting_buckets

    facts = traces.guard_facts(buckets, kv_tokens or max(buckets))
    blocked = first_blocked(facts)
    if blocked is not None:
        return (), (f"nothing is captured: {blocked.reason}",)
    fitting = fitting_buckets(facts)
    dropped = [bucket for bucket in buckets if bucket not in fitting]
    limit = f"{facts.capture_tokens} tokens that request slots, context and KV pool allow"
    return fitting, (f"not captured: {dropped}, above the {limit}",) if dropped else ()


# --- the accounted CPU device -------------------------------------------------------------------------------


def _on_cpu(
    traces: CaptureTraces, ladder: tuple[int, ...], beside: tuple[int, int], notes: tuple[str, ...]
) -> Forecast:
    """`beside` is what stands in memory already: tokens of the KV pool, and rows of the static buffers."""
    kv_tokens, static_tokens = beside
    steps = ladder_steps(traces, ladder, kv_tokens, static_tokens=static_tokens)
    taken = [(Range.exact(step.reserved / MIB), Range.exact(step.peak / MIB)) for step in steps]
    retained = steps[-1].in_use / MIB
    nothing = "nothing on the CPU device: there is no driver and no such library"
    terms = (
        Term(GRAPH_POOL, Range.exact(steps[-1].reserved / MIB - retained), _EXACT),
        Term(RETAINED, Range.exact(retained), "exact: tensors alive when the ladder is done"),
        Term(DRIVER, ZERO, nothing),
        Term(WORKSPACE, ZERO, nothing),
        Term(CONTEXT, ZERO, nothing),
    )
    return Forecast(ENGINE, terms, _bucket_forecasts(ladder, taken), notes)


def _cpu_notes(kv_tokens: int | None) -> tuple[str, ...]:
    if kv_tokens is not None:
        return ()
    return ("the peak is that beside a KV pool for one full bucket; with the real one it may differ by a few MiB",)


def _not_available(ladder: tuple[int, ...], notes: tuple[str, ...]) -> Forecast:
    source = "n/a: with the inductor compiler nobody sees what compiled code allocates"
    unknown = tuple(BucketForecast(num_tokens, _UNKNOWN, _UNKNOWN, _UNKNOWN) for num_tokens in ladder)
    return Forecast(ENGINE, (Term(GRAPH_POOL, _UNKNOWN, source),), unknown, (*notes, source))


# --- a GPU --------------------------------------------------------------------------------------------------


def _on_gpu(traces: CaptureTraces, ladder: tuple[int, ...], gpu: GpuSpec, notes: tuple[str, ...]) -> Forecast:
    runs = list(zip(ladder_steps(traces, ladder, None), ladder_steps(traces, ladder, None, "ascending"), strict=True))
    driver, workspace, taken = ZERO, _workspace(gpu), []
    for one, other in runs:
        before, driver = driver, driver + _driver(traces.at(one.num_tokens).segments)
        gone = _range(one.reserved, other.reserved) + driver + workspace
        # The peak may lie in the warm-up, before this bucket's graphs, or among them: at least what is gone after it.
        peak = _range(one.peak, other.peak) + workspace + Range(driver.mid, before.low, driver.high)
        taken.append((gone, Range(max(peak.mid, gone.mid), max(peak.low, gone.low), max(peak.high, gone.high))))
    last = runs[-1]
    retained = _range(*(step.in_use for step in last))
    terms = (
        Term(GRAPH_POOL, _range(*(step.reserved - step.in_use for step in last)), _ON_GPU),
        Term(RETAINED, retained, "derived: tensors alive when the ladder is done; outputs go to one static buffer"),
        Term(DRIVER, driver, _DRIVER_SOURCE),
        Term(WORKSPACE, workspace, _WORKSPACE_SOURCE),
        Term(CONTEXT, ZERO, "taken before the weights; the capture adds nothing, the ledger has it"),
    )
    return Forecast(ENGINE, terms, _bucket_forecasts(ladder, taken), notes)


def _driver(segments: int) -> Range:
    one = DRIVER_MIB_PER_SEGMENT
    return Range(one.mid * segments, one.low * segments, one.high * segments)


def _workspace(gpu: GpuSpec) -> Range:
    nbytes = _WORKSPACE_BYTES.get(gpu.architecture, _PLAIN_WORKSPACE_BYTES)
    return Range(nbytes / MIB, nbytes / MIB, segment_size(round_size(nbytes)) / MIB)


def _range(descending: int, ascending: int) -> Range:
    both = descending / MIB, ascending / MIB
    return Range(both[0], min(both), max(both))


def _bucket_forecasts(ladder: tuple[int, ...], taken: list[tuple[Range, Range]]) -> tuple[BucketForecast, ...]:
    """Buckets from (cumulative, peak) of each."""
    forecasts, before = [], ZERO
    for num_tokens, (cumulative, peak) in zip(ladder, taken, strict=True):
        forecasts.append(BucketForecast(num_tokens, cumulative - before, cumulative, peak))
        before = cumulative
    return tuple(forecasts)
