"""What a prefill costs and what a ladder takes, as a run measured it."""

from __future__ import annotations

from toolkit.ladder_models import CostModel, LadderLaw
from toolkit.runs.record import BucketFigures, RunRecord


def measured_cost(record: RunRecord) -> CostModel | None:
    """Milliseconds eager and replayed, None where the run did not time at least two buckets."""
    if len({point.num_tokens for point in record.speed}) < 2:
        return None
    return CostModel.from_speed(record.speed, _where(record))


def measured_memory(record: RunRecord) -> LadderLaw | None:
    """GiB of a ladder's capture, None where the run does not say what each bucket added.

    What was in use beyond the end of the capture, at its worst moment, is added to every ladder.
    """
    steps = [
        (bucket.num_tokens, bucket.added_mib / 1024) for bucket in _captured(record) if bucket.added_mib is not None
    ]
    if len(steps) < max(len(record.buckets), 1):
        return None
    peak, end = record.peak_usage_gib, record.mem_usage_gib
    passing = max(peak - end, 0.0) if peak is not None and end is not None else 0.0
    return LadderLaw.from_steps(steps, f"measured on {_where(record)}", once=passing)


def measured_time(record: RunRecord) -> LadderLaw | None:
    """Seconds of a ladder's capture, None where nothing was captured."""
    steps = [(bucket.num_tokens, bucket.elapsed_s) for bucket in _captured(record)]
    return LadderLaw.from_steps(steps, f"measured on {_where(record)}", grows=False) if steps else None


def _captured(record: RunRecord) -> list[BucketFigures]:
    """Buckets in order of capture, which is largest first."""
    return sorted(record.buckets, key=lambda bucket: -bucket.num_tokens)


def _where(record: RunRecord) -> str:
    return f"{record.device_label} with {record.settings.get('model', 'n/a')}, run {record.id}"
