"""EagerRunner and PrefillCudaGraphRunner: who runs a packed batch, and how graphs are captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import CaptureCancelled, OutOfMemoryAtBucket
from toolkit.ladder import choose_bucket, exceeds_replay_limit
from toolkit.policies import Halt
from toolkit.prefill.backends.base import CapturedBucket, PrefillBackend
from toolkit.prefill.batch import PackedBatch

if TYPE_CHECKING:
    import torch

    from toolkit.prefill.devices.base import Pool
    from toolkit.prefill.model_runner import ModelRunner

WARMUP_PASSES = 2
"""Eager passes before each capture, as SGLang runs them: lazy initialisation must not happen inside a graph."""
MIB = 1 << 20
GIB = 1 << 30
EventSink = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """One batch done. `hidden` is [T, hidden_size]; from a graph it is static memory, good until the next replay."""

    hidden: torch.Tensor
    runner: str
    bucket: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class BucketCapture:
    """What capturing one bucket took: seconds, and MiB of the device (None where the pool cannot be known)."""

    num_tokens: int
    elapsed_s: float
    warmup_s: float
    capture_s: float
    added_mib: float | None
    cumulative_mib: float | None
    free_after_gib: float | None
    segments: int
    graph_nodes: int | None


class EagerRunner:
    """Runs every batch as it comes, without graphs."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner

    def run(self, batch: PackedBatch, reason: str = "no graphs were captured") -> RunResult:
        """Hidden states of the batch, unpadded."""
        return RunResult(self.model_runner.forward_eager(batch), "eager", None, reason)


class PrefillCudaGraphRunner:
    """Pads a batch to the nearest captured bucket and replays it; runs eager where that cannot or should not be."""

    def __init__(self, model_runner: ModelRunner, backend: PrefillBackend, eager_runner: EagerRunner) -> None:
        self.model_runner = model_runner
        self.backend = backend
        self.eager_runner = eager_runner
        self.pool: Pool = model_runner.device.new_pool()
        self.captured: dict[int, CapturedBucket] = {}
        self.figures: list[BucketCapture] = []
        self.pool_bytes: int | None = 0
        """What the pool held after the last bucket that was captured; None where nobody knows."""

    @property
    def ladder(self) -> list[int]:
        """Captured buckets, smallest first."""
        return sorted(self.captured)

    def capture(
        self,
        buckets: tuple[int, ...],
        on_event: EventSink,
        cancelled: Callable[[], bool],
        halt: Callable[[int, float, float], Halt | None] | None = None,
    ) -> Halt | None:
        """Capture `buckets`, largest first, into one pool on one stream. Returns why it stopped early, or None.

        `halt(captured, free_at_start_gib, free_gib)` is asked after each bucket and says why to go no further.
        Raises OutOfMemoryAtBucket, CaptureCancelled (asked between buckets) or CaptureError; buckets captured before
        stay until `release`.
        """
        device = self.model_runner.device
        with device.capturing():
            free_at_start = free_before = device.free_bytes()
            for index, num_tokens in enumerate(sorted(buckets, reverse=True)):
                if cancelled():
                    raise CaptureCancelled(f"cancelled before bucket {num_tokens}, {index} captured")
                on_event(_begin_event(index, len(buckets), num_tokens, free_before))
                free_before = self._capture_one(num_tokens, free_at_start, free_before)
                on_event({"event": "bucket", "index": index, "total": len(buckets), **_as_dict(self.figures[-1])})
                why = halt(index + 1, free_at_start / GIB, free_before / GIB) if halt is not None else None
                if why is not None:
                    return why
        return None

    def _capture_one(self, num_tokens: int, free_at_start: int, free_before: int) -> int:
        runner, device = self.model_runner, self.model_runner.device
        batch = runner.dummy_batch(num_tokens)
        try:
            self.backend.load(batch, num_tokens)
            warmup_s = sum(
                device.time(lambda: self.backend.run_padded(batch, num_tokens)) for _ in range(WARMUP_PASSES)
            )
            device.note_memory()
            device.empty_cache()
            capture_s = device.time(lambda: self._keep(self.backend.capture(batch, num_tokens, self.pool)))
            device.note_memory()
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            # torch.compile tells where in its graph it was, over many lines.
            raise OutOfMemoryAtBucket(num_tokens, str(error).split("While executing")[0]) from None
        finally:
            runner.kv_pool.release(batch.slots)
        device.empty_cache()
        free = device.free_bytes()
        self.pool_bytes = device.pool_reserved_bytes(self.pool)
        known = self.pool_bytes is not None
        bucket = self.captured[num_tokens]
        self.figures.append(
            BucketCapture(
                num_tokens=num_tokens,
                elapsed_s=warmup_s + capture_s,
                warmup_s=warmup_s,
                capture_s=capture_s,
                added_mib=(free_before - free) / MIB if known else None,
                cumulative_mib=(free_at_start - free) / MIB if known else None,
                free_after_gib=free / GIB if known else None,
                segments=bucket.segments,
                graph_nodes=bucket.graph_nodes,
            )
        )
        return free

    def _keep(self, bucket: CapturedBucket) -> None:
        self.captured[bucket.num_tokens] = bucket

    def choose(self, batch: PackedBatch) -> tuple[int | None, str]:
        """(bucket to replay or None for eager, why). Pure; the rules are SGLang's."""
        tokens = batch.num_tokens
        bucket = choose_bucket(self.ladder, tokens)
        requests, context = self.model_runner.capture_limits
        longest = max(len(span.slots) for span in batch.spans)
        if bucket is None:
            return None, f"{tokens} tokens exceed the largest bucket {max(self.captured, default=0)}"
        if exceeds_replay_limit(bucket, tokens):
            return None, f"bucket {bucket} is more than twice the {tokens} tokens"
        if len(batch.spans) > requests or longest > context:
            return None, f"{len(batch.spans)} requests up to {longest} tokens do not fit {requests} x {context}"
        return bucket, f"{tokens} tokens padded to bucket {bucket}"

    def run(self, batch: PackedBatch) -> RunResult:
        """Hidden states of the batch, replayed or eager; the result says which and why."""
        bucket, reason = self.choose(batch)
        if bucket is None:
            return self.eager_runner.run(batch, reason)
        self.backend.load(batch, bucket)
        self.backend.replay(self.captured[bucket], batch)
        hidden = self.model_runner.buffers.hidden[: batch.num_tokens]
        return RunResult(hidden, "graph", bucket, reason)

    def release(self) -> None:
        """Drop every graph and give the pool back; the runner runs everything eager from now on."""
        self.captured.clear()
        self.model_runner.device.release_pool(self.pool)

    def start_again(self) -> None:
        """Drop every graph and what was measured of it; the next capture goes into a new pool."""
        self.release()
        self.figures.clear()
        self.pool, self.pool_bytes = self.model_runner.device.new_pool(), 0


def _begin_event(index: int, total: int, num_tokens: int, free: int) -> dict[str, Any]:
    return {
        "event": "bucket_begin",
        "index": index,
        "total": total,
        "num_tokens": num_tokens,
        "free_gib": free / GIB,
    }


def _as_dict(figures: BucketCapture) -> dict[str, Any]:
    return {name: getattr(figures, name) for name in BucketCapture.__slots__}
