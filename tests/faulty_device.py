"""An accounted device on which memory runs out where a test wants it to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.memory.allocator import Block
from toolkit.prefill.devices.cpu import CpuDevice, CpuPool

MIB = 1 << 20


@dataclass
class Fault:
    """Memory runs out in `bucket`, in its `phase`, at its `at`-th allocation there. It happens once.

    `phase` is "warm-up" or "capture". `lost` bytes were taken before, which a private pool does not give back. `act`
    is done instead of an error of our own: the device itself has to notice.
    """

    bucket: int
    phase: str
    at: int = 1
    lost: int = 0
    act: Callable[[], None] | None = None


class FaultyDevice(CpuDevice):
    """Counts allocations by bucket and phase, and refuses the one that a fault names."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.faults: list[Fault] = []
        self.counts: Counter[tuple[int, str]] = Counter()
        self._bucket, self._recorded = 0, False

    def watch(self, event: dict[str, Any]) -> None:
        """An event sink: which bucket is under way."""
        if event["event"] == "bucket_begin":
            self._bucket, self._recorded = event["num_tokens"], False

    def start_recording(self, pool: CpuPool) -> None:
        """The warm-up of the bucket is over."""
        super().start_recording(pool)
        self._recorded = True

    def _charge(self, nbytes: int, pool: str) -> Block:
        key = (self._bucket, "capture" if self._recorded else "warm-up")
        self.counts[key] += 1
        for fault in self.faults:
            if (fault.bucket, fault.phase, fault.at) == (*key, self.counts[key]):
                self.faults.remove(fault)
                if fault.lost:
                    self.allocator.free(self.allocator.malloc(fault.lost, pool))
                if fault.act is None:
                    raise torch.OutOfMemoryError(f"injected at allocation {fault.at} of a {fault.phase}")
                fault.act()
        return super()._charge(nbytes, pool)
