"""Stand-ins for the engine that a test's child process runs: about processes and queues, not about captures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from toolkit.runs.record import RunRecord
from toolkit.settings import CaptureSettings

LADDER = [64, 48, 32]
Emit = Callable[[dict[str, Any]], None]


def record(settings: CaptureSettings, run_id: str, created: str, **changes: Any) -> RunRecord:
    values = {"outcome": "captured", "runner": "PrefillCudaGraphRunner", "reason": "all buckets", **changes}
    shared = {"settings": settings.model_dump(mode="json"), "device": {"label": "stand-in"}, "software": {}}
    return RunRecord(id=run_id, created=created, **shared, **values)


def announce(emit: Emit) -> None:
    emit({"event": "stage", "name": "load weights", "detail": "stand-in"})
    emit({"event": "facts", "device": {"label": "cpu (accounted)"}, "kv_cache_tokens": 1234})
    emit({"event": "ladder", "buckets": sorted(LADDER)})
    emit({"event": "stage", "name": "capture", "detail": None})
    emit({"event": "log", "line": "Capture target prefill CUDA graph begin."})


def bucket(emit: Emit, index: int) -> dict[str, Any]:
    place = {"num_tokens": LADDER[index % 3], "index": index, "total": len(LADDER)}
    emit({"event": "bucket_begin", "free_gib": 3.9, **place})
    times = {"elapsed_s": 0.3, "warmup_s": 0.1, "capture_s": 0.2, "added_mib": 1.5, "cumulative_mib": 1.5}
    figures = {"segments": 31, "graph_nodes": None, **place, **times}
    emit({"event": "bucket", **figures})
    return {key: value for key, value in figures.items() if key not in ("index", "total")}


def three_buckets(settings: CaptureSettings, emit: Emit, cancelled: Any, *, run_id: str, created: str) -> RunRecord:
    announce(emit)
    return record(settings, run_id, created, buckets=[bucket(emit, index) for index in range(3)])


def until_cancelled(
    settings: CaptureSettings, emit: Emit, cancelled: Callable[[], bool], *, run_id: str, created: str
) -> RunRecord:
    announce(emit)
    done = []
    while not cancelled():
        done = [bucket(emit, 0)]
        time.sleep(0.02)
    ended = {"outcome": "cancelled", "runner": None, "reason": "between two buckets", "buckets": done}
    return record(settings, run_id, created, **ended)


def nonsense(settings: CaptureSettings, emit: Emit, cancelled: Any, *, run_id: str, created: str) -> RunRecord:
    """What no engine would say: events that are none, a figure that is no number, and then the end."""
    announce(emit)
    for event in ({"noevent": 1}, [1], {"event": "bucket", "num_tokens": "x"}):
        emit(event)  # type: ignore[arg-type]
    emit({"event": "facts", "free_before_gib": float("nan")})
    raise SystemExit(3)
