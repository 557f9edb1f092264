"""What a ladder of the toolkit's own engine costs: its runner traced over meta tensors, replayed ladder by ladder.

On the accounted CPU device the figures are exact, since device and forecast share runner, charges and allocator
model. On a GPU the same pool holds up to what library kernels take inside; the driver's memory for each graph and the
libraries' workspaces come on top, as ranges. MiB is 2**20 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from toolkit.errors import InvalidInput
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
from toolkit.memory.allocator import CachingAllocator, segment_size
from toolkit.settings import Backend, CaptureSettings, check_buckets

if TYPE_CHECKING:
    from toolkit.hardware import GpuSpec
    from toolkit.prefill.model_runner import ModelRunner

ENGINE = "transformers"
Order = Literal["descending", "ascending"]
Sharing = Literal["pool and stream", "pool", "nothing"]
ORDERS: tuple[Order, ...] = ("descending", "ascending")
SHARINGS: tuple[Sharing, ...] = ("pool and stream", "pool", "nothing")
