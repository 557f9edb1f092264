"""What a prefill costs and what a ladder takes, as a run measured it."""

from __future__ import annotations

from toolkit.ladder_models import CostModel, LadderLaw
from toolkit.runs.record import BucketFigures, RunRecord

_SHARED_WITH_OTHERS = ("the machine was busy", "other processes used the device")
"""How the notes of a run begin or go on that say its figures are not its own alone (runs/execute.py)."""


def measured_cost(record: RunRecord) -> CostModel | None:
    """Milliseconds eager and replayed, None where the run did not time at least two buckets."""
    if len({point.num_tokens for point in record.speed}) < 2:
        return None
    timed = len({point.num_tokens for point in record.speed})
    return CostModel.from_speed(record.speed, f"{timed} buckets timed on {_where(record)}")


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
    return LadderLaw.from_steps(steps, _extrapolated(record, len(steps)), once=passing)


def measured_time(record: RunRecord) -> LadderLaw | None:
    """Seconds of a ladder's capture, None where nothing was captured."""
    steps = [(bucket.num_tokens, bucket.elapsed_s) for bucket in _captured(record)]
    return LadderLaw.from_steps(steps, _extrapolated(record, len(steps)), grows=False) if steps else None


def measured_notes(record: RunRecord) -> list[str]:
    """What to know before a server is set up by this run: that its device is no GPU, and that others used it too."""
    notes = [f"run {record.id}: {note}" for note in record.notes if any(sign in note for sign in _SHARED_WITH_OTHERS)]
    if record.device.get("kind") == "cpu":
        notes.insert(
            0,
            f"run {record.id} is of a CPU: its times are no times of a GPU, and its memory is accounted, not measured; "
            "for a GPU server give a run on that GPU, or a plan (--model and --gpu)",
        )
    return notes


def _extrapolated(record: RunRecord, buckets: int) -> str:
    """Where a law comes from: other ladders than the one captured are priced by lines through its buckets."""
    return f"extrapolated from {buckets} buckets captured on {_where(record)}"


def _captured(record: RunRecord) -> list[BucketFigures]:
    """Buckets in order of capture, which is largest first."""
    return sorted(record.buckets, key=lambda bucket: -bucket.num_tokens)


def _where(record: RunRecord) -> str:
    return f"{record.device_label} with {record.settings.get('model', 'n/a')}, run {record.id}"
