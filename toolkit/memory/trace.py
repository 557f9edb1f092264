"""Allocation traces: what one forward allocates and frees, in order, found on meta tensors without weights or GPU.

A trace holds sizes and order, no addresses: those are the allocator's business, and `AllocationTrace.replay` hands
the trace to `toolkit.memory.allocator`. Sizes of a forward grow with the token count along straight lines, so a few
traces give every bucket (`AffineTraces`). All sizes are bytes. Nothing here touches torch.cuda.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.memory.allocation import AllocationTrace

__all__ = ["AffineTraces", "AllocationTrace", "record_allocations"]

WorkspaceBytes = Callable[[Any, tuple[Any, ...]], int]

# Where a library (cuBLAS) is asked for a product and brings its workspace along. Grouped products of experts are
# torch's own kernels.
_MATRIX_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul"}
    | {"_addmm_activation", "_scaled_mm"}
)


# --- recording ----------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Sees every ATen call: notes the storages it makes, and when each dies."""

    def __init__(self, device: str, workspace_bytes: WorkspaceBytes | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        self.events: list[int] = []
        self.first_product: int | None = None
        self.open = True
        self._device, self._workspace_bytes = device, workspace_bytes
        self._alive: set[int] = set()  # storages that were noted, by the address of their C++ half

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._workspace_bytes is not None and (nbytes := self._workspace_bytes(func, args)):
            self._end(self._begin(nbytes))
        result = func(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._watch(storage)
        if self.first_product is None and _name(func) in _MATRIX_PRODUCTS:
            self.first_product = len(self.events)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != self._device or storage.nbytes() == 0:
            return
        self._alive.add(storage._cdata)
        weakref.finalize(storage, self._died, storage._cdata, self._begin(storage.nbytes())).atexit = False

    def _died(self, address: int, number: int) -> None:
        self._alive.discard(address)  # another storage may get it
        if self.open:
            self._end(number)

    def _begin(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        self.events.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def _end(self, number: int) -> None:
        self.events.append(~number)


def record_allocations(
    fn: Callable[[], object], *, device: str = "meta", workspace_bytes: WorkspaceBytes | None = None
) -> AllocationTrace:
    """The trace of one call of `fn`, whose result counts as alive at the end.

    Tensors that existed before are inputs and no part of it; what `fn` keeps elsewhere (a cache) stays alive. Where a
    first call makes lasting things, make that call before. Run it under `torch.no_grad()` for inference: autograd
    would keep what a backward pass needs.

    Args:
        fn: the forward, without arguments.
        device: type of the device whose tensors count, `meta` or `cpu`; small ones elsewhere do not.
        workspace_bytes: given an operator and its arguments, bytes it takes and gives back inside the call, for
            operators that say so (attention); None counts outputs alone.
    """
    # A mode imports it at the first call it sees, and exceptions in there keep the frames that were active, and with
    # them whatever `fn` had in its hands. Imported now, it keeps nothing of ours.
    importlib.import_module("torch._dynamo")
    recorder = _Recorder(device, workspace_bytes)
    with _still_gc():
        with recorder:
            result = fn()
        recorder.open = False
    del result
    return AllocationTrace(tuple(recorder.sizes), tuple(recorder.events), recorder.first_product)


@contextmanager
def _still_gc() -> Iterator[None]:
    """No garbage collection inside: it would end storages at a moment that is nobody's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else ""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the arguments or the result of an operator, however they are nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


# --- every bucket from a few traces -------------------------------------------------------------------------


class _Sized(Protocol):
    """A trace of any kind: sizes in bytes, and whatever else it holds that is not to depend on the token count."""

    @property
    def sizes(self) -> tuple[int, ...]: ...


_Trace = TypeVar("_Trace", bound=_Sized)


class AffineTraces(Generic[_Trace]):
    """Traces of one forward for any token count, from as few recordings as are safe.

    Two are made, at both ends of the range. Every size must lie on a line of whole bytes: a number of bytes a token,
    and none or some beside it. Steps, thresholds and products of token counts give themselves away there. Then a third
    recording between the ends confirms the lines. Counts between the ends are interpolated, to the byte, if all of
    that holds. Otherwise, and outside the range, each count is recorded itself.

    Attributes:
        is_affine: whether counts between the ends are interpolated.
    """

    def __init__(self, record: Callable[[int], _Trace], low: int, high: int, *, confirm: bool = True) -> None:
        """Make the recordings.

        Args:
            record: the trace of a token count.
            low: the smallest count that is wanted.
            high: the largest count that is wanted.
            confirm: False leaves the third recording out, for bodies that are known to be affine.
        """
        self._record, self._low, self._high = record, low, high
        self._recorded: dict[int, _Trace] = {}
        self._lines = _lines((low, self._exact(low)), (high, self._exact(high))) if low < high else None
        # No simple fraction of the range, and odd for its usual ends: a size that moves in steps shows there.
        middle = low + (high - low) * 3 // 7
        if confirm and self._lines is not None and self._between(middle) != self._exact(middle):
            self._lines = None
        self.is_affine = self._lines is not None

    @property
    def recorded(self) -> tuple[int, ...]:
        """The token counts that were recorded so far, ascending."""
        return tuple(sorted(self._recorded))

    def at(self, num_tokens: int) -> _Trace:
        """The trace of that many tokens."""
        inside = self._lines is not None and self._low < num_tokens < self._high
        return self._between(num_tokens) if inside else self._exact(num_tokens)

    def _exact(self, num_tokens: int) -> _Trace:
        if num_tokens not in self._recorded:
            self._recorded[num_tokens] = self._record(num_tokens)
        return self._recorded[num_tokens]

    def _between(self, num_tokens: int) -> _Trace:
        assert self._lines is not None
        sizes = tuple(base + per_token * num_tokens for base, per_token in self._lines)
        return _with_sizes(self._exact(self._low), sizes)


def _with_sizes(trace: _Trace, sizes: tuple[int, ...]) -> _Trace:
    return replace(trace, sizes=sizes)  # type: ignore[type-var]


def _lines(small: tuple[int, _Trace], large: tuple[int, _Trace]) -> list[tuple[int, int]] | None:
    """(bytes, bytes a token) of each allocation, from traces of two token counts; None where that does not fit."""
    (low, first), (high, last) = small, large
    if len(first.sizes) != len(last.sizes) or _with_sizes(first, ()) != _with_sizes(last, ()):
        return None  # they differ in more than sizes
    lines = []
    for from_size, to_size in zip(first.sizes, last.sizes, strict=True):
        per_token, rest = divmod(to_size - from_size, high - low)
        base = from_size - per_token * low
        if rest or per_token < 0 or base < 0:
            return None
        lines.append((base, per_token))
    return lines
