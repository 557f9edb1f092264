"""What an SGLang server's prefill ladder will cost: derived pool, fitted rest, each with a range and a source.

The order of things in SGLang (backend files of July to September 2026): each bucket is first run eagerly twice, which
leaves its buffers in the cache of torch's default pool, then recorded into one private pool shared by all buckets, on
one stream, without emptying that cache. Only when the ladder is done does the server empty it. So free memory
bottoms out in the capture and comes back at the end: a Qwen3-30B-A3B ladder printed 1.71 GiB of usage and had needed
2.71. `BucketForecast.cumulative` is what is gone at that moment, the cache included, as the server's progress bar
shows it; `Forecast.total` is what remains gone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolkit.errors import InvalidInput
from toolkit.forecast.calibration import Calibration, Coefficient, Coefficients, FeedForward, load_calibration
from toolkit.forecast.sglang_body import BodyShape, BodyTape, Weights, body_shape, body_tape
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
from toolkit.memory.allocator import DEFAULT_POOL, CachingAllocator, PoolId
from toolkit.settings import Backend, check_buckets

ENGINE = "sglang"
Order = Literal["descending", "ascending"]
ORDERS: tuple[Order, ...] = ("descending", "ascending")
FRESH_ADDRESSES: tuple[Order, ...] = ("descending", "ascending")
"""Where new segments land; real GPUs mostly descend, so that is the figure expected."""
CAPTURED = (Backend.BREAKABLE, Backend.TC_PIECEWISE, Backend.FULL)
WARM_UPS = 2
"""Eager passes before each recording, SGLang's `BreakableCudaGraphBackend.capture_one`."""
_STREAM, _POOL = 1, "graphs"


@dataclass(frozen=True, slots=True)
class PoolStep:
    """After one bucket: bytes torch holds in the default pool (the warm-up's cache) and in the graphs' pool."""

    num_tokens: int
    eager_bytes: int
    pool_bytes: int


def forecast_sglang(
    config: Any,
    buckets: Sequence[int],
    *,
    backend: Backend | str = Backend.BREAKABLE,
    tp: int = 1,
    dtype: str = "bfloat16",
    weights: Weights = "bf16",
    order: Order = "descending",
    decode_first: bool = False,
    calibration: Calibration | None = None,
) -> Forecast:
    """What capturing these buckets costs one rank.

    Args:
        config: a published config, as a mapping or a Transformers config.
        buckets: token counts, in any order.
        backend: `breakable`, `tc_piecewise` or `full`.
        tp: ranks that share the layers.
        dtype: of the activations.
        weights: how the linear layers are stored.
        order: in which buckets are captured; SGLang's is largest first.
        decode_first: whether decode graphs were captured before, as in releases up to about June 2026. They have then
            paid for what is loaded on first use.
        calibration: a fit; None takes the stored one.

    Raises:
        InvalidInput: a value makes no sense, or the model has layers the engine does not know.
    """
    backend = _check(backend, order)
    calibration = calibration or load_calibration()
    shape = body_shape(config, tp, dtype, weights, compiled=backend is Backend.TC_PIECEWISE)
    ladder = tuple(sorted(check_buckets(list(buckets)), reverse=order == "descending"))
    forecast = forecast_body(shape, ladder, backend, calibration.coefficients, decode_first=decode_first)
    return replace(forecast, notes=_notes(backend, calibration, decode_first))


def forecast_body(
    shape: BodyShape, ladder: tuple[int, ...], backend: Backend, fitted: Coefficients, *, decode_first: bool = False
) -> Forecast:
    """The forecast of one rank's body, without the notes.

    Args:
        shape: of one rank's body.
        ladder: buckets in order of capture.
        backend: one that captures.
        fitted: what no derivation gives.
        decode_first: whether decode graphs were captured before.
    """
    constant = fitted.first_use_mib[kind_of(shape)]
    first_use = Range(0.0, 0.0, constant.high - constant.mid) if decode_first else constant.times(1)
    retained, driver = _retained(shape, backend, ladder), _driver(shape, backend, fitted)
    steps = list(zip(*(pool_steps(shape, ladder, fresh) for fresh in FRESH_ADDRESSES), strict=True))
    cumulative = [
        _pool_range(step) + _warm_up(step, fitted) + retained + driver.times(position) + first_use
        for position, step in enumerate(steps, 1)
    ]
    mib = (_pool_range(steps[-1]), retained, driver.times(len(ladder)), first_use)
    seconds = _seconds(fitted, len(ladder)) if backend is Backend.BREAKABLE else ()
    terms = _terms(backend, mib, driver, constant)
    return Forecast(ENGINE, terms, _bucket_forecasts(ladder, cumulative), capture_s=seconds)


def segments(shape: BodyShape, backend: Backend) -> int:
    """Graphs of one bucket: every attention breaks the body, except in `full`."""
    return 1 if backend is Backend.FULL else len(shape.layers) + 1


def kind_of(shape: BodyShape) -> FeedForward:
    """`moe` if any layer has experts: its graphs then have more kernels."""
    return "moe" if "moe" in shape.layers else "dense"


def _driver(shape: BodyShape, backend: Backend, fitted: Coefficients) -> Coefficient:
    """MiB the driver keeps for the graphs of one bucket."""
    if backend is Backend.FULL:
        one, count, unit = fitted.driver_mib_per_full_layer, len(shape.layers), "layers"
    else:
        one, count, unit = fitted.driver_mib_per_segment[kind_of(shape)], segments(shape, backend), "segments"
    source = f"{one.mid:.3f} MiB for each of {count} {unit} and bucket; {one.source}"
    return Coefficient(mid=one.mid * count, low=one.low * count, high=one.high * count, source=source)


# --- torch's half, derived ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def pool_steps(shape: BodyShape, ladder: tuple[int, ...], fresh_addresses: Order) -> tuple[PoolStep, ...]:
    """The ladder through the model of torch's allocator, in the order given, as SGLang captures it.

    Args:
        shape: of one rank's body.
        ladder: buckets in order of capture.
        fresh_addresses: where new segments land; it breaks ties between blocks.
    """
    allocator, tape, steps = CachingAllocator(fresh_addresses=fresh_addresses), body_tape(shape), []
    for num_tokens in ladder:
        warm_up(allocator, tape, num_tokens)
        record(allocator, tape, num_tokens, _POOL, _STREAM)
        reserved = (allocator.reserved_bytes(DEFAULT_POOL), allocator.reserved_bytes(_POOL))
        steps.append(PoolStep(num_tokens, *reserved))
    return tuple(steps)


def warm_up(allocator: CachingAllocator, tape: BodyTape, num_tokens: int) -> None:
    """The eager passes before a recording: their buffers stay in the cache."""
    for _ in range(WARM_UPS):
        _run(allocator, tape, num_tokens, DEFAULT_POOL, _STREAM)


def record(allocator: CachingAllocator, tape: BodyTape, num_tokens: int, pool: PoolId, stream: int) -> None:
    """One bucket's recording, without emptying the cache (SGLang calls `capture_begin` itself)."""
    allocator.begin_capture(pool, stream, keep_cache=True)
    _run(allocator, tape, num_tokens, pool, stream)
    allocator.end_capture(pool)


def _run(allocator: CachingAllocator, tape: BodyTape, num_tokens: int, pool: PoolId, stream: int) -> None:
    for block in tape.at(num_tokens).replay(allocator, pool, stream):
        allocator.free(block)  # the output is copied into a buffer that all buckets share, or held by a weak reference


def _pool_range(steps: tuple[PoolStep, ...]) -> Range:
    sizes = [step.pool_bytes / MIB for step in steps]
    return Range(sizes[0], min(sizes), max(sizes))


def _warm_up(steps: tuple[PoolStep, ...], fitted: Coefficients) -> Range:
    return fitted.warm_up_factor.times(steps[0].eager_bytes / MIB)


def _retained(shape: BodyShape, backend: Backend, ladder: tuple[int, ...]) -> Range:
    """What stays alive beside the pool: the buffer that takes every bucket's last hidden state."""
    row = shape.hidden * shape.itemsize / MIB
    shared = max(ladder) * row
    if backend is Backend.TC_PIECEWISE:
        return ZERO
    return Range(shared, shared, sum(ladder) * row if backend is Backend.FULL else shared)


# --- putting it together ------------------------------------------------------------------------------------


def _check(backend: Backend | str, order: str) -> Backend:
    if backend not in CAPTURED:
        allowed = f"a forecast is for a backend that captures: {', '.join(CAPTURED)}"
        raise InvalidInput(f"backend {str(backend)!r} has no forecast", allowed, "resolve auto first")
    if order not in ORDERS:
        raise InvalidInput(f"order {order!r} is unknown", f"{', '.join(ORDERS)}", "SGLang's is descending")
    return Backend(backend)


def _bucket_forecasts(ladder: tuple[int, ...], cumulative: list[Range]) -> tuple[BucketForecast, ...]:
    forecasts, before, peak = [], ZERO, ZERO
    for num_tokens, gone in zip(ladder, cumulative, strict=True):
        peak = Range(max(peak.mid, gone.mid), max(peak.low, gone.low), max(peak.high, gone.high))
        forecasts.append(BucketForecast(num_tokens, gone - before, gone, peak))
        before = gone
    return tuple(forecasts)


def _terms(
    backend: Backend, mib: tuple[Range, Range, Range, Range], driver: Coefficient, first_use: Coefficient
) -> tuple[Term, ...]:
    sources = (
        "derived: SGLang's fused body replayed through the allocator model, all buckets in one pool and stream; "
        "range: descending and ascending addresses",
        _RETAINED_SOURCES[backend],
        f"fitted: {driver.source}",
        f"fitted: kernels loaded on first use and library workspaces; {first_use.source}",
    )
    named = zip((GRAPH_POOL, RETAINED, DRIVER, WORKSPACE), mib, sources, strict=True)
    context = Term(CONTEXT, ZERO, "taken before the weights; the capture adds nothing, the ledger has it")
    return (*(Term(name, one, source) for name, one, source in named), context)


_RETAINED_SOURCES = {
    Backend.BREAKABLE: "derived: one output buffer for the largest bucket, shared by all "
    "(SGLang runner_backend/breakable_cuda_graph_backend.py, August 2026); before public PR #32678 each bucket kept "
    "its inputs as well, 0.87 GiB on one model",
    Backend.TC_PIECEWISE: "derived: none; outputs and boundary buffers lie in the pool and are held by weak references",
    Backend.FULL: "derived: one shared output buffer since public PR #38038 (September 2026), an output per bucket "
    "before: the upper bound",
}


def _notes(backend: Backend, calibration: Calibration, decode_first: bool) -> tuple[str, ...]:
    notes = [
        calibration.error_history(),
        "cumulative and peak include the eager warm-up's cache, which the server gives back when the ladder is done; "
        "the total does not",
        "fitted on H100 and H200 (one row on a larger card); small cards and models were seen to need less on first "
        "use, and one run of Qwen3-0.6B took far more than this method says (data/field, pr39713)",
    ]
    if decode_first:
        notes.append("decode graphs were captured first, and what is loaded on first use is counted as theirs")
    if backend is Backend.FULL:
        notes.append("no public figure of full prefill graphs names model and buckets; driver memory: decode graphs'")
    if backend is not Backend.BREAKABLE:
        notes.append(f"no capture time: the public times of {backend} include compilation, 0.2 to 2.6 s a bucket")
    else:
        notes.append(f"capture times: {calibration.coefficients.later_bucket_s.source}")
    return tuple(notes)


def _seconds(fitted: Coefficients, count: int) -> tuple[float, ...]:
    return (fitted.first_bucket_s.mid, *[fitted.later_bucket_s.mid] * (count - 1))
