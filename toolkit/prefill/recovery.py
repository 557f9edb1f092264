"""After an unexpected out of memory: keep the buckets that are still valid, or give everything back.

A private pool cannot give back a part of itself: what a failed bucket had taken stays in it as long as one graph lives.
So where the pool grew, the buckets that were fine are captured once more into a new one.
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.errors import CaptureCancelled, OutOfMemoryAtBucket
from toolkit.policies import Decision, mib_or_gib
from toolkit.prefill.check import check_replays
from toolkit.prefill.runners import GIB, MIB, EventSink, PrefillCudaGraphRunner


def keep_valid(
    runner: PrefillCudaGraphRunner, decision: Decision, emit: EventSink, cancelled: Callable[[], bool]
) -> str | None:
    """Leave the runner with valid graphs alone, its pool no larger than before the failed bucket, or with none at all.

    Kept buckets leave free what `decision` says has to stay free. Returns why everything was dropped, or None when
    buckets were kept. Raises CaptureCancelled, and what goes wrong besides memory; the caller drops everything then.
    """
    device = runner.model_runner.device
    problem = _kept(runner, emit, cancelled)
    device.empty_cache()
    free_gib = device.free_bytes() / GIB
    if problem is None and free_gib < decision.kept_gib:
        problem = f"{mib_or_gib(free_gib)} are free beside them, {mib_or_gib(decision.kept_gib)} have to stay free"
    if problem is not None:
        runner.release()
        runner.figures.clear()
        device.empty_cache()
    return problem


def _kept(runner: PrefillCudaGraphRunner, emit: EventSink, cancelled: Callable[[], bool]) -> str | None:
    device, pool_bytes = runner.model_runner.device, runner.pool_bytes
    if not runner.captured:
        return "it was the first bucket"
    device.empty_cache()
    now = device.pool_reserved_bytes(runner.pool)
    if now is None or pool_bytes is None:
        return "what the pool holds is not known"
    try:
        if now > pool_bytes:
            buckets = tuple(runner.ladder)
            grown = (now - pool_bytes) / MIB
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
