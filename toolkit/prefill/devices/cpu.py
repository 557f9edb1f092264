"""The CPU device: real capture and replay of ATen calls, with memory that is accounted, never measured.

A declared capacity is charged with weights, KV pool, static buffers, eager intermediates and graph pools, each
through the allocator model, so that the same capture runs out of memory at the same bucket. Every figure says
so: `cpu (accounted)`. Nothing here pretends to be the speed of a GPU.
"""

from __future__ import annotations

import math
import mmap
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.errors import CaptureError
from toolkit.memory.allocator import AllocatorOutOfMemory, Block, CachingAllocator
from toolkit.memory.trace import tensors_in
from toolkit.prefill.attention import declared_workspace_bytes
from toolkit.prefill.devices.base import Pool
from toolkit.prefill.devices.common import frozen_gc, rows_by_pool
from toolkit.prefill.devices.tape import Tape, TapeSession, check_capturable

LABEL = "cpu (accounted)"
GIB = 1 << 30
BACKING_STEP = 2 << 20
"""What a GPU's driver maps memory in (`cuMemGetAllocationGranularity` of current cards)."""
ATTENTION_OPS = frozenset({torch.ops.prefill_lab.attention.default, torch.ops.prefill_lab.attend_into.default})
"""The operators that declare their workspace."""
# Memory is mapped, not filled: a page costs real memory only once it is written. Linux's value of
# MAP_NORESERVE, which Python's mmap module names only since 3.13.
_MAP_NORESERVE = 0x4000 if hasattr(mmap, "MAP_POPULATE") else 0


@dataclass(eq=False)
class CpuPool:
    """A private pool: a key into the allocator model, and what its tapes share."""

    key: str
    session: TapeSession = field(default_factory=TapeSession)
    opaque: bool = False


class CpuReservation:
    """Pages mapped without being charged; `back` charges them, outside the allocator as on a GPU."""

    def __init__(self, device: CpuDevice, tensor: torch.Tensor) -> None:
        self._device, self.tensor, self.backed_bytes = device, tensor, 0
        self._held = [0]  # shared with the finalizer, which must not keep this object alive
        weakref.finalize(tensor.untyped_storage(), device.give_back_outside, self._held).atexit = False

    def back(self, nbytes: int) -> None:
        """Charge up to `nbytes` of the tensor, in whole steps."""
        wanted = -(-min(nbytes, self.tensor.nbytes) // BACKING_STEP) * BACKING_STEP
        if wanted > self.backed_bytes:
            self._device.take_outside(wanted - self.backed_bytes)
            self.backed_bytes = self._held[0] = wanted


class CpuGraph:
    """One tape as a graph."""

    def __init__(self, device: CpuDevice) -> None:
        self._device = device
        self._tape: Tape | None = None

    @property
    def node_count(self) -> int | None:
        """Recorded ATen calls; views of static tensors are constants and do not count."""
        return len(self._tape.calls) if self._tape else None

    def begin(self, pool: Pool) -> None:
        """Start recording into `pool`."""
        if not isinstance(pool, CpuPool):
            raise CaptureError("this pool is not one of the CPU device")
        if self._tape is not None:
            raise CaptureError("this graph holds a capture already; make a new graph for another")
        self._device.start_recording(pool)
        self._tape = self._device.recording

    def end(self) -> None:
        """Stop recording and build the program."""
        if self._tape is None or self._device.recording is not self._tape:
            raise CaptureError("end was called on a graph that is not being captured")
        self._device.stop_recording()
        self._tape.close()

    def abandon(self) -> None:
        """Stop recording after a failure; the graph stays empty."""
        if self._tape is not None and self._device.recording is self._tape:
            self._device.stop_recording()
        self._tape = None

    def replay(self) -> None:
        """Run the recorded calls on the same static tensors."""
        if self._tape is None:
            raise CaptureError("this graph was never captured, so there is nothing to replay")
        self._tape.run()


class _Watch(TorchDispatchMode):
    """Sees every ATen call: charges what it allocates, and records it while a tape runs."""

    def __init__(self, device: CpuDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def enter(self) -> None:
        """Put the mode on top of the stack."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Take the mode off the stack; it must be on top."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._device.run_watched(func, args, kwargs or {})


class CpuDevice:
    """The accounted CPU device. `capacity_bytes` is what the imagined card offers to this process."""

    kind = "cpu"
    label = LABEL
    bit_exact = True
    backing_step = BACKING_STEP

    def __init__(self, capacity_bytes: int) -> None:
        self.torch_device = torch.device("cpu")
        self.total_bytes = capacity_bytes
        self.total_mib = capacity_bytes / (1 << 20)
        self.allocator = CachingAllocator(capacity_bytes)
        self._ballast = 0
        self.recording: Tape | None = None
        self._pool: CpuPool | None = None
        self._pools = 0
        self._watch: _Watch | None = None
        self._known: Any = WeakIdKeyDictionary()

    def facts(self) -> dict[str, Any]:
        """Kind, label and declared total; threads, because times depend on them."""
        return {
            "kind": self.kind,
            "label": self.label,
            "name": "CPU",
            "total_gib": self.total_bytes / GIB,
            "threads": torch.get_num_threads(),
        }

    # Memory: every figure comes from the allocator model.

    def free_bytes(self) -> int:
        """Capacity less reserved segments and ballast."""
        return self.total_bytes - self.allocator.external_bytes - self.allocator.reserved_bytes()

    def empty_cache(self) -> None:
        """Give free segments of the default pool back."""
        self.allocator.empty_cache()

    def reset_peak(self) -> None:
        """Start the peak at what is reserved now."""
        self.allocator.reset_peak()

    def peak_used_bytes(self) -> int:
        """The most that was reserved at once since `reset_peak`, ballast included."""
        return self.allocator.peak_reserved_bytes + self.allocator.external_bytes

    def note_memory(self) -> None:
        """Nothing to do: the model sees every change."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zero pages mapped on demand: charged in full, real memory only where written."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if nbytes == 0:
            return torch.zeros(tuple(shape), dtype=dtype)
        block = self._charge(nbytes, "default")
        try:
            tensor = _mapped(nbytes, shape, dtype)
        except torch.OutOfMemoryError:
            self.allocator.free(block)
            raise
        weakref.finalize(tensor.untyped_storage(), self.allocator.free, block).atexit = False
        self._known[tensor.untyped_storage()] = True
        return tensor

    def reserve(self, shape: Sequence[int], dtype: torch.dtype, backed_bytes: int) -> CpuReservation:
        """The maximum is mapped now and charged later."""
        tensor = _mapped(max(1, math.prod(shape)) * dtype.itemsize, shape, dtype)
        self._known[tensor.untyped_storage()] = True
        reservation = CpuReservation(self, tensor)
        reservation.back(backed_bytes)
        return reservation

    def take_outside(self, nbytes: int) -> None:
        """Charge memory outside the allocator. Raises torch.OutOfMemoryError."""
        free = self.free_bytes()
        if nbytes > free:
            raise torch.OutOfMemoryError(
                f"{LABEL} out of memory. Tried to map {_size(nbytes)}; the device has a declared capacity "
                f"of {self.total_bytes / GIB:.2f} GiB of which {_size(free)} is free."
            )
        self.allocator.external_bytes += nbytes

    def give_back_outside(self, held: list[int]) -> None:
        """The end of a reservation: what was charged for it is free again."""
        self.allocator.external_bytes -= held[0]

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Charge weights that were loaded by someone else; shared storages count once."""
        for tensor in tensors:
            self._charge_storage(tensor.untyped_storage(), "default")

    def leave_free(self, nbytes: int) -> int:
        """Declare memory outside the framework as used, to the byte."""
        taken = max(0, self.free_bytes() - nbytes)
        self.allocator.external_bytes += taken
        self._ballast += taken
        return taken

    def drop_ballast(self) -> None:
        """What `leave_free` declared as used is free again."""
        self.allocator.external_bytes -= self._ballast
        self._ballast = 0

    def _charge(self, nbytes: int, pool: str) -> Block:
        try:
            return self.allocator.malloc(nbytes, pool)
        except AllocatorOutOfMemory as error:
            raise torch.OutOfMemoryError(
                f"{LABEL} out of memory. Tried to allocate {_size(error.requested_bytes)} for a tensor of "
                f"{_size(nbytes)}; the device has a declared "
                f"capacity of {self.total_bytes / GIB:.2f} GiB of which {_size(error.free_bytes)} is free."
            ) from None

    def _charge_storage(self, storage: torch.UntypedStorage, pool: str) -> None:
        if storage in self._known or storage.nbytes() == 0:
            return
        block = self._charge(storage.nbytes(), pool)
        self._known[storage] = True
        weakref.finalize(storage, self.allocator.free, block).atexit = False

    # Pools and graphs.

    def new_pool(self) -> CpuPool:
        """A fresh private pool of the allocator model."""
        self._pools += 1
        return CpuPool(f"graph-pool-{self._pools}")

    def release_pool(self, pool: Pool) -> None:
        """Give the pool's segments back."""
        assert isinstance(pool, CpuPool)
        pool.session = TapeSession()
        if self.allocator.reserved_bytes(pool.key):
            self.allocator.release_pool(pool.key)
            self.allocator.empty_cache()

    def pool_reserved_bytes(self, pool: Pool) -> int | None:
        """Bytes of the pool in the model; None once compiled code ran in it, whose inside nobody sees."""
        assert isinstance(pool, CpuPool)
        return None if pool.opaque else self.allocator.reserved_bytes(pool.key)

    def memory_by_pool(self) -> list[dict[str, Any]]:
        """The allocator model's segments, by pool."""
        return rows_by_pool(self.allocator.snapshot(), lambda segment: _pool_name(segment["segment_pool_id"]))

    def new_graph(self) -> CpuGraph:
        """An empty tape."""
        return CpuGraph(self)

    def start_recording(self, pool: CpuPool) -> None:
        """Open a tape on `pool`; one at a time."""
        if self.recording is not None:
            raise CaptureError("a capture is already under way; captures cannot be nested")
        if self._watch is not None:
            raise CaptureError("a capture cannot begin inside accounted eager work")
        self.allocator.begin_capture(pool.key, keep_cache=True)
        self._pool, self.recording = pool, pool.session.new_tape()
        self._enter_watch()

    def stop_recording(self) -> None:
        """Close the tape that is open."""
        assert self._pool is not None
        self._leave_watch()
        self.allocator.end_capture(self._pool.key)
        self._pool = self.recording = None

    def capturing(self) -> AbstractContextManager[None]:
        """A CPU has no streams; only the garbage collector is frozen."""
        return frozen_gc()

    @contextmanager
    def accounted(self) -> Iterator[None]:
        """Charge what eager work allocates to the default pool."""
        if self._watch is not None:
            yield
            return
        self._enter_watch()
        try:
            yield
        finally:
            self._leave_watch()

    def _enter_watch(self) -> None:
        self._watch = _Watch(self)
        self._watch.enter()

    def _leave_watch(self) -> None:
        assert self._watch is not None
        self._watch.leave()
        self._watch = None

    def run_watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one ATen call, charge what it made, and record it when a tape is open."""
        if self.recording is not None:
            check_capturable(func, args, kwargs)
        if func in ATTENTION_OPS:
            self.allocator.free(self._charge(declared_workspace_bytes(args), self._pool_key))
        result = func(*args, **kwargs)
        self._charge_outputs(result, (args, kwargs))
        if self.recording is not None:
            self.recording.record(func, args, kwargs, result)
        return result

    @property
    def _pool_key(self) -> str:
        return self._pool.key if self._pool is not None else "default"

    def _charge_outputs(self, result: Any, inputs: Any) -> None:
        given = {id(tensor.untyped_storage()) for tensor in tensors_in(inputs)}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if id(storage) not in given:
                self._charge_storage(storage, self._pool_key)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """The declared capacity was exceeded, or this machine's main memory was."""
        return isinstance(error, (torch.OutOfMemoryError, MemoryError))

    def call_compiled(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run compiled code unwatched and record it as one opaque call; its pool is n/a from then on."""
        if self._watch is None:
            return function(*args)
        self._watch.leave()
        try:
            result = function(*args)
        finally:
            self._watch.enter()
        self._charge_outputs(result, args)
        if self.recording is not None and self._pool is not None:
            self._pool.opaque = True
            self.recording.record(function, tuple(args), {}, result)
        return result

    # Time and others.

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def time(self, function: Callable[[], object]) -> float:
        """Wall seconds of one call."""
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def other_processes(self) -> int | None:
        """The accounted device belongs to this process alone."""
        return 0


def _mapped(nbytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zero pages as a tensor. Raises torch.OutOfMemoryError when this machine has no such addresses left."""
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        raise torch.OutOfMemoryError(f"this machine cannot map {nbytes} bytes ({error})") from None
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes].view(dtype).view(tuple(shape))


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.2f} MiB"


def _pool_name(pool: Any) -> str:
    return "default" if pool in ((0, 0), "default") else str(pool)
