"""Capture traces of the toolkit's own engine for any bucket: its real runner, captured over meta tensors.

Layers of one kind ask the same of the allocator, so a few of each kind are traced and the rest are repeats, wherever
the trace itself shows that they are. Sizes are bytes. Nothing here needs weights or a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput, PrefillLabError, one_line
from toolkit.memory.allocator import CachingAllocator
from toolkit.memory.capture_trace import CaptureTrace, RecordingAllocator, Repeat
from toolkit.settings import MAX_BUCKET_TOKENS, Backend, CaptureSettings

if TYPE_CHECKING:
    from toolkit.memory.trace import AffineTraces
    from toolkit.prefill.guards import GuardFacts
    from toolkit.prefill.kv_pool import LayerGeometry
    from toolkit.prefill.model_runner import ModelRunner

LOW, HIGH = 4, 16384
"""Tokens between which buckets are interpolated: the ladders servers choose. Others are traced one by one."""
_TRACED_PERIODS = 5
"""The first may be special and two are compared; what all layers share may end in the last, from its start on."""


_ONE_AT_A_TIME = threading.RLock()
"""While a model is traced it has only its first layers, and widgets ask from threads of their own."""


class CaptureTraces:
    """What capturing a bucket of a model asks of the allocator, from as few recordings as are safe."""

    def __init__(self, config: Any, settings: CaptureSettings) -> None:
        import torch

        from toolkit.prefill.attention import register_attention
        from toolkit.prefill.model_runner import resolve_language_model
        from toolkit.weights import meta_model

        self._settings = settings
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self.model = meta_model(config, self._dtype, register_attention())
        # Now and not when they are asked for: while one thread traces, the body has only its first layers.
        self.weights = [*self.model.parameters(), *self.model.buffers()]
        self._body: Any = resolve_language_model(self.model)
        self._depth = _depth(self._body)
        self.geometry = self._geometry()
        self._facts: GuardFacts | None = None
        self._affine: AffineTraces[CaptureTrace] | None = None
        self._made: dict[int, CaptureTrace] = {}

    def at(self, num_tokens: int) -> CaptureTrace:
        """The trace of one bucket. The first call makes the recordings."""
        from toolkit.memory.trace import AffineTraces

        with _ONE_AT_A_TIME:
            if self._affine is None:
                self._graphs = self._graph_runner()
                requests, context = self._graphs.model_runner.capture_limits
                self._affine = AffineTraces(self._record, LOW, min(HIGH, requests * context))
            if num_tokens not in self._made:
                self._made[num_tokens] = self._affine.at(num_tokens)
            return self._made[num_tokens]

    def runner(self, allocator: CachingAllocator, kv_tokens: int, buckets: tuple[int, ...]) -> ModelRunner:
        """Weights, KV pool and static buffers as the engine allocates them, and the runner that holds them.

        Without any `kv_tokens` the pool is not in the allocator, as one that is sized after the capture is not.
        """
        from toolkit.prefill.build import assemble
        from toolkit.prefill.devices.meta import MetaDevice
        from toolkit.prefill.kv_pool import KVPool

        device = MetaDevice(allocator)
        device.adopt(self.weights)
        place = device if kv_tokens else MetaDevice(CachingAllocator())
        pool = KVPool(place, self.geometry, kv_tokens, self._dtype)
        runner = assemble(self._settings, device, self.model, pool, buckets)
        device.empty_cache()
        return runner

    def guard_facts(self, buckets: tuple[int, ...], kv_tokens: int) -> GuardFacts:
        """What the engine's guards look at when these buckets are to be captured beside a KV pool of that size."""
        from toolkit.prefill.setup import guard_facts

        if self._facts is None:
            with _ONE_AT_A_TIME:
                self._facts = guard_facts(self.runner(CachingAllocator(), 1, (1,)))
        tokens = min(self._facts.capture_requests * self._facts.context_length, kv_tokens)
        return replace(self._facts, buckets=buckets, capture_tokens=tokens)

    def _graph_runner(self) -> Any:
        from toolkit.prefill.backends import BACKENDS
        from toolkit.prefill.runners import EagerRunner, PrefillCudaGraphRunner

        self._allocator = RecordingAllocator()
        runner = self.runner(self._allocator, MAX_BUCKET_TOKENS, (MAX_BUCKET_TOKENS,))
        backend = BACKENDS[Backend(runner.backend)](runner)
        return PrefillCudaGraphRunner(runner, backend, EagerRunner(runner))

    def _record(self, num_tokens: int) -> CaptureTrace:
        with _ONE_AT_A_TIME, _shortened(self._body, self._depth.traced), _refusing(self.model):
            trace = self._allocator.record(
                lambda: self._graphs.capture((num_tokens,), lambda event: None, lambda: False)
            )
        folded = _fold(trace, self._depth) if self._depth.copies else trace
        if folded is None:  # layers that look the same and do not act so: trace all of them
            self._depth = _whole(self._depth.layers)
            return self._record(num_tokens)
        return folded

    def _geometry(self) -> list[LayerGeometry]:
        import torch

        from toolkit.prefill.attention import probe_geometry
        from toolkit.prefill.model_runner import model_geometry

        if self._body is None or not hasattr(self._body, "layers"):
            return []
        if self._dtype is not torch.bfloat16:
            return model_geometry(self.model.config)
        with _ONE_AT_A_TIME, _shortened(self._body, self._depth.traced), _refusing(self.model):
            geometry = probe_geometry(self._body)
        while len(geometry) < self._depth.layers:
            geometry.append(geometry[-self._depth.period])
        return geometry


_MADE: dict[tuple[object, ...], CaptureTraces] = {}
_KEPT = 16


def capture_traces(config: Any, settings: CaptureSettings) -> CaptureTraces:
    """The traces of a Transformers config, made once. Of the settings those count that change what is allocated."""
    backend = settings.resolved_backend
    window = (settings.request_slots, settings.max_context) if backend is Backend.FULL else ()
    key = (type(config), config.to_json_string(), backend, settings.compiler, settings.dtype, *window)
    with _ONE_AT_A_TIME:
        if key not in _MADE:
            while len(_MADE) >= _KEPT:
                del _MADE[next(iter(_MADE))]
            _MADE[key] = CaptureTraces(config, settings)
        return _MADE[key]


# --- a few layers instead of all ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Depth:
    """Of `layers` layers, those from `head` on repeat after `period`; the first `traced` stand for all."""

    layers: int
    head: int
    period: int
    traced: int

    @property
    def copies(self) -> int:
        """Periods that are not traced."""
        return (self.layers - self.traced) // self.period


def _whole(layers: int) -> _Depth:
    return _Depth(layers, 0, 1, layers)


def _depth(body: Any) -> _Depth:
    """The fewest layers at the start of a body that stand for all of it."""
    kinds = [_kind(layer, index) for index, layer in enumerate(getattr(body, "layers", ()))]
    count = len(kinds)
    best = _whole(count)
    for period in range(1, count // _TRACED_PERIODS + 1):
        different = [index for index in range(count - period) if kinds[index] != kinds[index + period]]
        head = different[-1] + 1 if different else 0
        traced = head + _TRACED_PERIODS * period + (count - head) % period
        if traced < best.traced:
            best = _Depth(count, head, period, traced)
    return best


def _kind(layer: Any, index: int) -> tuple[Any, ...]:
    """Everything about a layer that may change what it allocates, apart from its number."""
    named = getattr(getattr(layer, "config", None), "layer_types", None) or []
    facts: list[Any] = [named[index] if index < len(named) else None]
    for name, module in layer.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        plain.pop("layer_idx", None)
        facts.append((name, type(module), tuple(plain.items())))
    facts += [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in layer.named_parameters()]
    return tuple(facts)


@contextmanager
def _shortened(body: Any, count: int) -> Iterator[None]:
    """The body with its first layers only."""
    layers = body.layers
    body.layers = layers[:count]
    try:
        yield
    finally:
        body.layers = layers


@contextmanager
def _refusing(model: Any) -> Iterator[None]:
    """What goes wrong in a model's own code becomes one line."""
    try:
        yield
    except PrefillLabError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{type(model).__name__} cannot be traced without weights ({one_line(str(error))[:200]})",
            "models that read no result on the host, which no graph can capture either",
            "capture it to see what the engine says",
        ) from error


def _fold(trace: CaptureTrace, depth: _Depth) -> CaptureTrace | None:
    """The trace of all layers; None where those traced do not repeat each other."""
    steps = list(trace.steps)
    marks = [position for position, step in enumerate(steps) if step == "layer"]
    passes, rest = divmod(len(marks), depth.traced)
    if rest:
        return None
    for number in reversed(range(passes)):  # from the back, so that positions stay what they are
        start = number * depth.traced + depth.head
        second, third, end = (marks[start + periods * depth.period] for periods in (1, 2, 3))
        repeat = _repeat(trace.sizes, steps[second:third], steps[third:end], depth.copies)
        if repeat is None:
            return None
        steps.insert(end, repeat)
    return CaptureTrace(trace.sizes, tuple(steps))


def _repeat(sizes: tuple[int, ...], before: list[Any], layer: list[Any], copies: int) -> Repeat | None:
    """`layer` once more, if it does what the one before did and nothing outlives the one behind."""
    earlier, first, count = _from_own_start(before)
    events, own, same = _from_own_start(layer)
    ended = {~event for event in _events(layer) if event < 0}
    left = set(range(first, first + count)) - {~event for event in _events(before)} - ended
    alike = events == earlier and sizes[first : first + count] == sizes[own : own + same]
    if not alike or not count or own - first != count or left or min(ended, default=first) < first:
        return None
    return Repeat(tuple(layer), own, count, copies)


def _events(steps: list[Any]) -> list[int]:
    return [event for step in steps if not isinstance(step, str) for event in step]


def _from_own_start(steps: list[Any]) -> tuple[list[Any], int, int]:
    """Steps with allocations numbered from their own first; that first, and how many there are."""
    made = [event for event in _events(steps) if event >= 0]
    first = min(made, default=0)

    def shifted(event: int) -> tuple[bool, int]:
        return (True, event - first) if event >= 0 else (False, ~event - first)

    return [step if isinstance(step, str) else [shifted(e) for e in step] for step in steps], first, len(made)
