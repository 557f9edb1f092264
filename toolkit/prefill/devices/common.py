"""What both devices share: the frozen garbage collector of a capture."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

MIB = 1 << 20


@contextmanager
def frozen_gc(collect: bool = True) -> Iterator[None]:
    """Keep the garbage collector from walking (and freeing) anything during a capture, after one last collection.

    A collection in mid-capture may free tensors of the outside world into the recorded stretch; SGLang
    freezes it for the same reason. `collect` False leaves the last collection out.
    """
    was_enabled = gc.isenabled()
    if collect:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rows_by_pool(
    segments: Iterable[Mapping[str, Any]], pool_name: Callable[[Mapping[str, Any]], str]
) -> list[dict[str, Any]]:
    """Segments in the form of `torch.cuda.memory_snapshot()` as one row a pool, the default pool first."""
    rows: dict[str, dict[str, Any]] = {}
    for segment in segments:
        name = pool_name(segment)
        row = rows.setdefault(name, {"pool": name, "segments": 0, "reserved_mib": 0.0, "allocated_mib": 0.0})
        row["segments"] += 1
        row["reserved_mib"] += segment["total_size"] / MIB
        in_use = sum(block["size"] for block in segment["blocks"] if block["state"].startswith("active"))
        row["allocated_mib"] += in_use / MIB
    return sorted(rows.values(), key=lambda row: (row["pool"] != "default", row["pool"]))
