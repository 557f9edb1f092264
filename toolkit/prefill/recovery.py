"""After an unexpected out of memory: keep the buckets that are still valid, or give everything back.

A private pool cannot give back a part of itself: what a failed bucket had taken stays in it as long as one graph lives.
So where the pool grew, the buckets that were fine are captured once more into a new one.
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.errors import CaptureCancelled, OutOfMemoryAtBucket
from toolkit.prefill.check import check_replays
from toolkit.prefill.runners import EventSink, PrefillCudaGraphRunner


def keep_valid(
    runner: PrefillCudaGraphRunner, pool_bytes: int | None, emit: EventSink, cancelled: Callable[[], bool]
) -> str | None:
    """Leave the runner with valid graphs alone, its pool no larger than `pool_bytes`, or with none at all.

    `pool_bytes` is what the pool held before the bucket that failed, None where nobody knows. Returns why everything
    was dropped, or None when buckets were kept. Raises CaptureCancelled.
    """
    problem = _kept(runner, pool_bytes, emit, cancelled)
    if problem is not None:
        runner.release()
        runner.figures.clear()
    runner.model_runner.device.empty_cache()
    return problem


def _kept(
    runner: PrefillCudaGraphRunner, pool_bytes: int | None, emit: EventSink, cancelled: Callable[[], bool]
) -> str | None:
    device = runner.model_runner.device
    if not runner.captured:
        return "it was the first bucket"
    device.empty_cache()
    now = device.pool_reserved_bytes(runner.pool)
    if now is None or pool_bytes is None:
        return "what the pool holds is not known"
    try:
        if now > pool_bytes:
            buckets = tuple(runner.ladder)
            grown = (now - pool_bytes) / (1 << 20)
            emit({"event": "note", "text": f"the failed bucket left {grown:.0f} MiB in the pool: captured once more"})
            runner.start_again()
            runner.capture(buckets, lambda event: None, cancelled)
        vocabulary = int(runner.model_runner.model.config.get_text_config().vocab_size)
        return check_replays(runner, vocabulary).problem
    except CaptureCancelled:
        raise
    except OutOfMemoryAtBucket as error:
        return f"they could not be captured again ({error})"
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise
    return "an eager pass does not fit beside them, so nobody can say whether they are valid"
