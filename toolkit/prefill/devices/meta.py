"""The meta device: the accounting of the CPU device over meta tensors, for what a capture takes without doing it.

Runners and backends run on it as they are. Nothing is computed and nothing recorded on a tape; what they allocate,
free and tell the device is what counts, and the allocator writes it down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from toolkit.memory.allocator import CachingAllocator
from toolkit.memory.capture_trace import RecordingAllocator
from toolkit.prefill.devices.common import frozen_gc
from toolkit.prefill.devices.cpu import ATTENTION_OPS, CpuDevice, CpuPool
from toolkit.prefill.devices.tape import Tape, TapeSession

_NO_LIMIT = 1 << 60


class MetaDevice(CpuDevice):
    """A device without memory of its own: every charge goes to `allocator`, no tensor has storage."""

    kind = "meta"
    label = "meta (accounted)"

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__(_NO_LIMIT)
        self.torch_device = torch.device("meta")
        self.allocator = allocator

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without storage, charged in full."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)
        self.adopt([tensor])
        return tensor

    def new_pool(self) -> CpuPool:
        """A pool whose graphs stay empty."""
        pool = super().new_pool()
        pool.session = _BlankSession()
        return pool

    def run_watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As on the CPU device; a recording allocator is told where layers attend."""
        if func in ATTENTION_OPS and isinstance(self.allocator, RecordingAllocator):
            self.allocator.mark_layer()
        return super().run_watched(_META_KERNELS.get(func, func), args, kwargs)

    def capturing(self) -> AbstractContextManager[None]:
        """Garbage stays where it is: collecting it takes longer than the capture, and it is no part of a trace."""
        return frozen_gc(collect=False)

    def time(self, function: Callable[[], object]) -> float:
        """Zero: a pass without data says nothing about time."""
        function()
        return 0.0


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Products of experts in any dtype: torch's meta kernel takes bf16 alone, the CPU and CUDA ones do not."""
    product: torch.Tensor = torch.ops.aten._grouped_mm.default(first.bfloat16(), second.bfloat16(), *args, **kwargs)
    return product.to(first.dtype)


_META_KERNELS: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped_mm}


class _BlankTape(Tape):
    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Not kept: there is nothing to replay."""

    def close(self) -> None:
        """No program."""


class _BlankSession(TapeSession):
    def new_tape(self) -> Tape:
        """A tape that keeps nothing."""
        return _BlankTape(self, "meta")
