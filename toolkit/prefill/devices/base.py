"""The seam: what a device must offer so that every backend and runner is written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Pool(Protocol):
    """A private memory pool that graphs share. Opaque: made by `Device.new_pool`, given back by `release_pool`."""


class Graph(Protocol):
    """One captured stretch of work. Between `begin` and `end` calls are recorded; `replay` runs them again.

    What a graph reads or writes outside itself must stay at its address while the graph lives.
    """

    @property
    def node_count(self) -> int | None:
        """Recorded nodes (kernels on CUDA, ATen calls on CPU); None where the platform does not tell."""

    def begin(self, pool: Pool) -> None:
        """Start recording into `pool`. Raises CaptureError when a recording is already under way."""

    def end(self) -> None:
        """Stop recording. Raises CaptureError when none is under way."""

    def abandon(self) -> None:
        """Stop recording after a failure and leave the graph empty. Never raises."""

    def replay(self) -> None:
        """Run what was recorded, on the same addresses. Raises CaptureError when nothing was."""


class Reservation(Protocol):
    """Addresses of a long-lived tensor whose memory comes later; they do not move when it does."""

    tensor: torch.Tensor
    """The whole tensor. Only its first `backed_bytes` may be touched; they are zero where never written."""
    backed_bytes: int
    """Bytes of device memory behind it, whole steps of `Device.backing_step`."""

    def back(self, nbytes: int) -> None:
        """Put memory behind the first `nbytes`. Raises torch.OutOfMemoryError, with nothing changed."""


class Device(Protocol):
    """A place to capture on. Bytes everywhere; GiB only where a person reads."""

    kind: str
    label: str
    torch_device: torch.device
    total_bytes: int
    total_mib: float
    """What nvidia-smi says the card has; servers pick their defaults by it."""
    bit_exact: bool
    """Whether a replay must equal eager on the same padded batch in every bit."""
    backing_step: int
    """Bytes: memory comes behind a reservation in multiples of this."""

    def facts(self) -> dict[str, Any]:
        """Kind, label, total GiB and driver facts for the record; no host names."""

    def free_bytes(self) -> int:
        """Bytes free on the device right now, cached blocks of the framework counted as used."""

    def empty_cache(self) -> None:
        """Give cached, unused blocks back, so that `free_bytes` means what is really free."""

    def reset_peak(self) -> None:
        """Forget the highest use seen so far."""

    def peak_used_bytes(self) -> int:
        """Highest use of the device since `reset_peak`, sampled where the platform has no counter of its own."""

    def note_memory(self) -> None:
        """Take one sample for `peak_used_bytes`."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A long-lived tensor (KV pool, static buffer), charged in full, zero where never written.

        Raises torch.OutOfMemoryError when it does not fit.
        """

    def reserve(self, shape: Sequence[int], dtype: torch.dtype, backed_bytes: int) -> Reservation:
        """Addresses for a tensor, with memory behind its first `backed_bytes` only.

        Raises DeviceUnavailable where addresses cannot be reserved without memory, and torch.OutOfMemoryError.
        """

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Charge tensors that were made elsewhere (weights). Raises torch.OutOfMemoryError."""

    def leave_free(self, nbytes: int) -> int:
        """Occupy memory until `nbytes` are free, or less than one allocation step more; returns the bytes taken.

        Undone by `drop_ballast`.
        """

    def drop_ballast(self) -> None:
        """Give back what `leave_free` took."""

    def new_pool(self) -> Pool:
        """A fresh private pool."""

    def release_pool(self, pool: Pool) -> None:
        """Give a pool back. Every graph captured into it must be gone."""

    def pool_reserved_bytes(self, pool: Pool) -> int | None:
        """Bytes of device memory the pool holds; None where they cannot be known."""

    def memory_by_pool(self) -> list[dict[str, Any]]:
        """One row a pool of the allocator: name, segments, reserved MiB, allocated MiB. The default pool is first."""

    def new_graph(self) -> Graph:
        """An empty graph."""

    def capturing(self) -> AbstractContextManager[None]:
        """The surroundings of a whole ladder capture: one capture stream, garbage collection frozen."""

    def accounted(self) -> AbstractContextManager[None]:
        """Eager work inside counts towards the device's memory. A device with real memory needs no help."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception means that device memory ran out (allocator or driver)."""

    def call_compiled(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call code whose inside cannot be watched (compiled kernels), inside or outside a recording."""

    def synchronize(self) -> None:
        """Wait for everything submitted."""

    def time(self, function: Callable[[], object]) -> float:
        """Seconds one call takes on the device, everything submitted before it excluded."""

    def other_processes(self) -> int | None:
        """How many other processes use the device; None where it cannot be known."""
