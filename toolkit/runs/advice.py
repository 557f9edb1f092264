"""What to do next, computed from what a run met. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.ladder import generate_prefill_buckets
from toolkit.settings import CaptureSettings

_MORE_FREE_GIB = 0.25


def advise(fields: Mapping[str, Any], settings: CaptureSettings) -> list[str]:
    """Advice for an outcome, most useful first; empty when there is nothing to mend."""
    adviser = _ADVISERS.get(str(fields.get("outcome")))
    return adviser(fields, settings) if adviser else []


def _after_oom(fields: Mapping[str, Any], settings: CaptureSettings) -> list[str]:
    if fields.get("reason_code") == "no_memory_for_kv":
        return ["raise --mem-fraction, or use a device with more memory: weights alone exceed the fraction"]
    if fields.get("reason_code") == "out_of_memory_before_capture":
        return [
            "weights, KV pool and static buffers do not fit: use a device with more memory (on the CPU: "
            "--device-memory), a smaller model, or a lower --mem-fraction if the KV pool was the one too large"
        ]
    advice = []
    fraction, bucket = fields.get("mem_fraction_static"), fields.get("oom_bucket")
    # Where larger buckets were captured before, leaving those out gives back what they took.
    most = bucket if bucket and fields.get("buckets") else (bucket or 0) // 2
    ladder = _lower_ladder(most, settings)
    if ladder:
        advice.append(
            f"lower the ceiling: {ladder} (the largest bucket pays for the pool, so leaving out small buckets does "
            "not help)"
        )
    lower = _lower_fraction(fraction, fields)
    if lower is not None:
        advice.append(f"lower the fraction: --mem-fraction {lower:.3f} leaves the capture {_MORE_FREE_GIB:g} GiB more")
    if settings.free_memory_gib is not None:
        advice.append(f"leave more free: --free-memory {settings.free_memory_gib * 2:g}")
    advice.append("or run without prefill graphs: --backend disabled")
    return advice


def _lower_fraction(fraction: float | None, fields: Mapping[str, Any]) -> float | None:
    """A fraction that leaves `_MORE_FREE_GIB` more, in steps that the allocator's rounding cannot swallow."""
    total: float | None = (fields.get("ledger") or {}).get("total_gib")
    if not fraction or not total or fraction - _MORE_FREE_GIB / total < 0.05:
        return None
    return round(fraction - _MORE_FREE_GIB / total, 3)


def _lower_ladder(most: int, settings: CaptureSettings) -> str | None:
    """The option for a ladder of buckets up to `most`: a ceiling, or the buckets where those were given."""
    ceiling = generate_prefill_buckets(most)[-1:]
    if settings.buckets is None:
        return f"--max-tokens {ceiling[0]}" if ceiling else None
    smaller = [each for each in settings.buckets if each <= most] or ceiling
    return f"--buckets {','.join(map(str, smaller))}" if smaller else None


def _after_skip(fields: Mapping[str, Any], settings: CaptureSettings) -> list[str]:
    if fields.get("reason_code") != "gate_low_memory":
        return []
    return [
        "name the backend to bypass the old gate: --backend breakable",
        "or use today's behaviour, which always attempts the capture: --policy ungated; with so little free it may run "
        "out of memory, and a lower ceiling needs less",
    ]


def _after_mismatch(fields: Mapping[str, Any], settings: CaptureSettings) -> list[str]:
    if fields.get("reason_code") != "replay_mismatch":
        return []
    return ["do not serve with these graphs; run with --dtype fp32 to see whether rounding is the cause"]


_ADVISERS = {"oom": _after_oom, "skipped": _after_skip, "failed": _after_mismatch}
