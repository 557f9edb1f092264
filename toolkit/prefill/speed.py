"""Replay against eager, by bucket, in interleaved pairs on the device at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from toolkit.prefill.runners import EventSink, PrefillCudaGraphRunner


@dataclass(frozen=True, slots=True)
class SpeedFigure:
    """Median milliseconds of one prefill body that fills the bucket exactly, eager and replayed."""

    num_tokens: int
    eager_ms: float
    replay_ms: float


def spread(ladder: Sequence[int], count: int) -> list[int]:
    """At most `count` buckets spread evenly over the ladder, smallest and largest always among them."""
    if len(ladder) <= count:
        return list(ladder)
    step = (len(ladder) - 1) / (count - 1)
    return [ladder[round(index * step)] for index in range(count)]


def measure_speed(
    runner: PrefillCudaGraphRunner, buckets: Sequence[int], pairs: int = 3, on_event: EventSink | None = None
) -> list[SpeedFigure]:
    """Time `pairs` interleaved pairs a bucket, after one pass of each that does not count.

    `on_event` hears of every bucket done: `{"event": "step", "index": i, "total": n}`.
    """
    figures = []
    for index, bucket in enumerate(buckets):
        figures.append(_measure(runner, bucket, pairs))
        if on_event is not None:
            on_event({"event": "step", "index": index, "total": len(buckets)})
    return figures


def _measure(runner: PrefillCudaGraphRunner, bucket: int, pairs: int) -> SpeedFigure:
    model_runner, device = runner.model_runner, runner.model_runner.device
    batch = model_runner.dummy_batch(bucket)
    try:
        runner.run(batch)
        runner.eager_runner.run(batch)
        eager, replay = [], []
        for _ in range(pairs):
            eager.append(device.time(lambda: runner.eager_runner.run(batch)))
            replay.append(device.time(lambda: runner.run(batch)))
        return SpeedFigure(bucket, 1000 * median(eager), 1000 * median(replay))
    finally:
        model_runner.kv_pool.release(batch.slots)
