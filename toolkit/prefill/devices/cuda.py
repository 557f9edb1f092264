"""The CUDA device: real graphs, a real private pool, real free memory."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from toolkit.errors import CaptureError
from toolkit.hardware import list_gpus, other_gpu_processes
from toolkit.prefill.devices import cuda_virtual
from toolkit.prefill.devices.base import Pool
from toolkit.prefill.devices.common import frozen_gc, rows_by_pool

MIB = 1 << 20
GIB = 1 << 30
_MALLOC_STEP = 2 * MIB  # the driver hands memory out in steps of 2 MiB


@dataclass(eq=False)
class CudaPool:
    """A private pool of the caching allocator, by its handle."""

    handle: tuple[int, int]


class CudaGraph:
    """`torch.cuda.CUDAGraph` on the capture stream of its device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured = False
        self._nodes: int | None = None
        self._pool: tuple[int, int] = (0, 0)

    @property
    def node_count(self) -> int | None:
        """Nodes of the raw graph; None when the CUDA bindings for Python are not installed."""
        return self._nodes

    def begin(self, pool: Pool) -> None:
        """Start a stream capture. Only inside `device.capturing()`, which provides the stream."""
        if not isinstance(pool, CudaPool):
            raise CaptureError("this pool is not one of the CUDA device")
        if self._graph is not None:
            raise CaptureError("this graph holds a capture already; make a new graph for another")
        if self._device.open_graph is not None:
            raise CaptureError("a capture is already under way; captures cannot be nested")
        if torch.cuda.current_stream(self._device.torch_device) != self._device.stream:
            raise CaptureError("a capture must begin inside device.capturing(), on its stream")
        # keep_graph: the raw graph is kept until its nodes are counted; it is instantiated in `end`.
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._pool = pool.handle
        self._graph.capture_begin(pool=cast(Any, pool.handle))
        self._device.open_graph = self

    def end(self) -> None:
        """End the capture and instantiate the graph."""
        if self._graph is None or self._device.open_graph is not self:
            raise CaptureError("end was called on a graph that is not being captured")
        self._device.open_graph = None
        self._graph.capture_end()
        self._nodes = _count_nodes(self._graph)
        self._graph.instantiate()
        self._captured = True

    def abandon(self) -> None:
        """End a capture that failed; whatever the driver says about it no longer matters."""
        if self._device.open_graph is self:
            self._device.open_graph = None
            try:
                assert self._graph is not None
                self._graph.capture_end()
            except RuntimeError:
                # Up to torch 2.11 an invalidated capture leaves the allocator recording into the pool, and
                # nothing is ever given back to the driver again.
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        with contextlib.suppress(RuntimeError):
            if self._graph is not None:
                self._graph.reset()
        self._graph, self._captured = None, False

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        if self._graph is None or not self._captured:
            raise CaptureError("this graph was never captured, so there is nothing to replay")
        self._graph.replay()


class CudaDevice:
    """One CUDA GPU. Memory figures are the driver's; the framework's own cache counts as used."""

    kind = "cuda"
    bit_exact = False
    backing_step = cuda_virtual.STEP

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        torch.empty(1, device=self.torch_device)  # creates the context, so that the baseline includes it
        torch.cuda.empty_cache()
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.label = self.name = str(properties.name)
        self.total_bytes = torch.cuda.mem_get_info(self.torch_device)[1]
        self._uuid = f"GPU-{getattr(properties, 'uuid', '')}"
        self.total_mib = next((gpu.total_mib for gpu in list_gpus() if gpu.uuid == self._uuid), self.total_bytes / MIB)
        self.stream = torch.cuda.Stream(self.torch_device)
        self.open_graph: CudaGraph | None = None
        self._ballast: list[torch.Tensor] = []
        self.reset_peak()

    def facts(self) -> dict[str, Any]:
        """Name, memory, compute capability and CUDA version; no host names."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return {
            "kind": self.kind,
            "label": self.label,
            "name": self.name,
            "total_gib": self.total_bytes / GIB,
            "nvidia_smi_mib": self.total_mib,
            "compute_capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
        }

    def free_bytes(self) -> int:
        """What the driver says is free, for all processes together."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def empty_cache(self) -> None:
        """Give unused cached blocks back to the driver."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Start both peaks anew: the allocator's own, and the lowest free memory sampled."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._least_free = self.free_bytes()
        self._used_at_reset = self.total_bytes - self._least_free
        self._reserved_at_reset = torch.cuda.memory_reserved(self.torch_device)

    def peak_used_bytes(self) -> int:
        """The larger of the lowest free memory sampled and what the allocator's own peak implies."""
        self.note_memory()
        grown = torch.cuda.max_memory_reserved(self.torch_device) - self._reserved_at_reset
        return max(self.total_bytes - self._least_free, self._used_at_reset + grown)

    def note_memory(self) -> None:
        """Sample free memory."""
        self._least_free = min(self._least_free, self.free_bytes())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros, so that slots never written hold no garbage NaN."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self.torch_device)

    def reserve(self, shape: Sequence[int], dtype: torch.dtype, backed_bytes: int) -> cuda_virtual.CudaReservation:
        """Through the driver's virtual memory; the allocator knows nothing of it."""
        torch.cuda.empty_cache()
        return cuda_virtual.CudaReservation(self.index, shape, dtype, backed_bytes)

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Weights are on the device already; nothing to charge."""

    def leave_free(self, nbytes: int) -> int:
        """Allocate ballast so that `nbytes` stay free, or less than one step of the driver (2 MiB) more."""
        self.empty_cache()
        taken = max(0, (self.free_bytes() - nbytes) // _MALLOC_STEP * _MALLOC_STEP)
        if taken:
            self._ballast.append(torch.empty(taken, dtype=torch.uint8, device=self.torch_device))
        return taken

    def drop_ballast(self) -> None:
        """Free the ballast."""
        self._ballast.clear()
        self.empty_cache()

    def new_pool(self) -> CudaPool:
        """A fresh private pool."""
        return CudaPool(torch.cuda.graph_pool_handle())

    def release_pool(self, pool: Pool) -> None:
        """Collect dead graphs, then let the allocator give the pool's segments back."""
        gc.collect()
        self.empty_cache()

    def pool_reserved_bytes(self, pool: Pool) -> int | None:
        """Segments of the pool in the allocator's snapshot."""
        assert isinstance(pool, CudaPool)
        segments = torch.cuda.memory_snapshot()
        return sum(int(s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) == tuple(pool.handle))

    def memory_by_pool(self) -> list[dict[str, Any]]:
        """The allocator's snapshot, by pool."""

        def name(segment: Mapping[str, Any]) -> str:
            pool = tuple(segment["segment_pool_id"])
            return "default" if pool == (0, 0) else f"graph-pool-{pool[1]}"

        return rows_by_pool(torch.cuda.memory_snapshot(), name)

    def new_graph(self) -> CudaGraph:
        """An empty graph."""
        return CudaGraph(self)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """One side stream for warm-up and capture, garbage collection frozen."""
        current = torch.cuda.current_stream(self.torch_device)
        self.stream.wait_stream(current)
        with frozen_gc(), torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)
        self.synchronize()

    def accounted(self) -> AbstractContextManager[None]:
        """Real memory needs no accounting."""
        return nullcontext()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """The allocator's error, or the driver's (seen in capture_end when graphs are instantiated)."""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()

    def call_compiled(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Compiled kernels are captured like any others."""
        return function(*args)

    def synchronize(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize(self.torch_device)

    def time(self, function: Callable[[], object]) -> float:
        """Wall seconds between two synchronisations: what a caller waits, launch overhead included."""
        self.synchronize()
        start = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - start

    def other_processes(self) -> int | None:
        """Other processes NVML reports on this GPU; None where NVML does not tell."""
        return other_gpu_processes(self._uuid)


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    error, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())[:3]
    return int(count) if error == runtime.cudaError_t.cudaSuccess else None
