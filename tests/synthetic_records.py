"""Made-up run records for tests of what is shown. Nothing here was measured; every label says `synthetic`."""

from __future__ import annotations

from typing import Any

from toolkit.ladder import generate_prefill_buckets
from toolkit.runs.record import BucketFigures, RunRecord, SpeedPoint

CPU_LABEL = "synthetic cpu (accounted)"
SMALL = [8, 16, 32, 64, 128, 256, 512]


def made_up_buckets(ladder: list[int], free_gib: float, *, first_extra_s: float = 0.9) -> list[BucketFigures]:
    """Captured largest first: the first bucket pays for the pool and the warm-up, later ones little."""
    rows, total = [], 0.0
    for number, tokens in enumerate(sorted(ladder, reverse=True)):
        added = tokens / 20 if number == 0 else 0.5 + tokens / 900
        total += added
        warm, capture = 0.02 + tokens / 4000 + first_extra_s * (number == 0), 0.05 + tokens / 3000
        rows.append(
            BucketFigures(
                num_tokens=tokens,
                elapsed_s=warm + capture + 0.01,
                warmup_s=warm,
                capture_s=capture,
                added_mib=added,
                cumulative_mib=total,
                free_after_gib=free_gib - total / 1024,
                segments=31,
                graph_nodes=930,
            )
        )
    return rows


def made_up_record(**changes: Any) -> RunRecord:
    """A captured run of a small ladder on the accounted CPU; `settings` are merged."""
    ladder = changes.pop("ladder", SMALL)
    settings = {"model": "synthetic-135m", "backend": "auto", "policy": "ungated", "dtype": "bfloat16"}
    settings |= changes.pop("settings", {})
    free = changes.get("free_before_gib", 3.97)
    buckets = made_up_buckets(ladder, free or 3.97)
    used = sum(bucket.added_mib or 0 for bucket in buckets) / 1024
    values: dict[str, Any] = {
        "id": "20260101-000000-5eed",
        "created": "2026-01-01T00:00:00Z",
        "settings": settings,
        "device": {"kind": "cpu", "label": CPU_LABEL},
        "software": {"torch": "0.0-synthetic"},
        "outcome": "captured",
        "runner": "PrefillCudaGraphRunner",
        "reason": "capture is always attempted; 3.97 GiB free is only logged",
        "reason_code": "ungated",
        "free_before_gib": free,
        "free_after_gib": (free or 3.97) - used,
        "mem_usage_gib": used,
        "peak_usage_gib": used + 0.01,
        "capture_time_s": sum(bucket.elapsed_s for bucket in buckets),
        "capture_order": [bucket.num_tokens for bucket in buckets],
        "ledger": {
            "context_gib": 0.5,
            "weights_gib": 0.25,
            "kv_cache_gib": 3.2,
            "static_buffers_gib": 0.01,
            "prefill_graph_gib": used,
            "ballast_gib": None,
            "free_gib": 4.04 - used,
        },
        "buckets": buckets,
        "speed": [SpeedPoint(num_tokens=n, eager_ms=20 + n / 2, replay_ms=18 + n / 2.05) for n in ladder],
        "log": ["Capture target prefill CUDA graph begin. backend=breakable"],
    }
    return RunRecord(**{**values, **changes})


def skipped_record(**changes: Any) -> RunRecord:
    """What the old gate leaves behind: no bucket, the eager runner."""
    nothing = dict.fromkeys(("free_after_gib", "mem_usage_gib", "peak_usage_gib", "capture_time_s"))
    return made_up_record(
        **{
            **nothing,
            "outcome": "skipped",
            "runner": "EagerRunner",
            "reason": "the old gate skipped the capture: 3.97 GiB free, under 4.00 GiB",
            "reason_code": "gate_low_memory",
            "settings": {"policy": "gated"},
            "ladder": [],
            "speed": [],
            **changes,
        }
    )


def oom_record(**changes: Any) -> RunRecord:
    """Out of memory at 640 tokens, with the larger buckets captured."""
    ladder = [n for n in generate_prefill_buckets(8192) if n > 640]
    return made_up_record(
        **{
            "outcome": "oom",
            "runner": None,
            "reason": "out of memory while bucket 640 was captured",
            "reason_code": None,
            "oom_bucket": 640,
            "ladder": ladder,
            "speed": [],
            "free_before_gib": 1.5,
            "free_after_gib": None,
            **changes,
        }
    )
