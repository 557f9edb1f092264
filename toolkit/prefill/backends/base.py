"""What every capture backend shares: buckets as lists of graphs and breaks, captured and replayed in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from toolkit.prefill.attention import AttentionSpec, ForwardContext, active_context, forward_context
from toolkit.prefill.batch import PackedBatch
from toolkit.prefill.devices.base import Graph, Pool

if TYPE_CHECKING:
    from toolkit.prefill.model_runner import ModelRunner

Step = Callable[[], None]


@dataclass
class CapturedBucket:
    """One bucket: graphs, and between them the eager steps of its breaks."""

    num_tokens: int
    graphs: list[Graph] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def segments(self) -> int:
        """Graphs of this bucket: one for `full`, layers + 1 when every attention breaks."""
        return len(self.graphs)

    @property
    def graph_nodes(self) -> int | None:
        """Nodes over all segments; None where the platform does not tell."""
        counts = [graph.node_count for graph in self.graphs]
        return sum(count for count in counts if count is not None) if None not in counts else None

    def replay(self) -> None:
        """Run every step in the order of the capture."""
        for step in self.steps:
            step()


class SegmentRecorder:
    """Records one bucket: a graph is open all the time except inside a break."""

    def __init__(self, runner: ModelRunner, pool: Pool, num_tokens: int) -> None:
        self._device = runner.device
        self._pool = pool
        self.bucket = CapturedBucket(num_tokens)
        self._open: Graph | None = None

    def begin(self) -> None:
        """Open the next segment."""
        graph = self._device.new_graph()
        graph.begin(self._pool)
        self._open = graph

    def end(self) -> None:
        """Close the segment and keep it."""
        assert self._open is not None
        graph, self._open = self._open, None
        graph.end()
        self.bucket.graphs.append(graph)
        self.bucket.steps.append(graph.replay)

    def abandon(self) -> None:
        """Close the open segment after a failure; the bucket is lost."""
        if self._open is not None:
            graph, self._open = self._open, None
            graph.abandon()

    def break_with(self, step: Step) -> None:
        """End the segment, run `step` eagerly now and at this place in every replay, open the next segment."""
        self.end()
        with self._device.accounted():
            step()
        self.bucket.steps.append(step)
        self.begin()


class Break:
    """Attention as a break: K, V and queries leave the segment into static memory, the answer comes back there.

    `recorder` None runs the same code without capturing, which is what warm-up passes and the padded eager
    reference do.
    """

    def __init__(self, recorder: SegmentRecorder | None = None) -> None:
        self._recorder = recorder

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """`query` [T, q_heads, k_dim], `key`, `value` [T, kv_heads, dim] -> a view of static memory."""
        context = active_context()
        layer = context.pool.layers[spec.layer]
        context.pool.store(spec.layer, key, value, context.slot_mapping)
        staged = context.buffers.query_view(query.shape[0], layer)
        staged.copy_(query)
        out = context.buffers.attended_view(query.shape[0], layer)

        def step() -> None:
            torch.ops.prefill_lab.attend_into(staged, out, *spec.arguments)

        if self._recorder is None:
            step()
        else:
            self._recorder.break_with(step)
        return out


class PrefillBackend(Protocol):
    """How a padded bucket is run, captured and replayed."""

    name: str

    def load(self, batch: PackedBatch, num_tokens: int) -> None:
        """Copy a batch into the static memory a bucket of `num_tokens` reads."""

    def run_padded(self, batch: PackedBatch, num_tokens: int) -> None:
        """The padded forward without any graph: warm-up, and the reference a replay must equal bit by bit."""

    def capture(self, batch: PackedBatch, num_tokens: int, pool: Pool) -> CapturedBucket:
        """Capture a bucket with a loaded dummy batch."""

    def replay(self, bucket: CapturedBucket, batch: PackedBatch) -> None:
        """Replay a bucket on a loaded batch; the result is in `buffers.hidden`."""


class BreakableBackend:
    """Segments broken at every attention, which runs eager between them (SGLang's default since 0.5.15)."""

    name = "breakable"

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def load(self, batch: PackedBatch, num_tokens: int) -> None:
        """Token ids, positions and slots, padded."""
        self.runner.buffers.load(batch, num_tokens)

    def context(self, batch: PackedBatch, num_tokens: int, recorder: SegmentRecorder | None = None) -> ForwardContext:
        """What attention looks at while this batch runs in this bucket."""
        runner = self.runner
        slots = runner.buffers.slot_mapping[:num_tokens]
        return ForwardContext(
            runner.kv_pool, runner.buffers, slots, num_tokens, spans=batch.spans, hook=Break(recorder)
        )

    def run_body(self, num_tokens: int) -> None:
        """Body and copy into the one output buffer."""
        buffers = self.runner.buffers
        hidden = self.runner.forward(buffers.input_ids[:num_tokens], buffers.position_ids[:num_tokens])
        buffers.hidden[:num_tokens].copy_(hidden)

    def run_padded(self, batch: PackedBatch, num_tokens: int) -> None:
        """Same code, same shapes, no graph."""
        with torch.no_grad(), self.runner.device.accounted(), forward_context(self.context(batch, num_tokens)):
            self.run_body(num_tokens)

    def capture(self, batch: PackedBatch, num_tokens: int, pool: Pool) -> CapturedBucket:
        """Layers + 1 segments. Raises torch.OutOfMemoryError or CaptureError with nothing left open."""
        recorder = SegmentRecorder(self.runner, pool, num_tokens)
        try:
            with torch.no_grad(), forward_context(self.context(batch, num_tokens, recorder)):
                self.record(recorder, num_tokens)
        except BaseException:
            recorder.abandon()
            raise
        return recorder.bucket

    def record(self, recorder: SegmentRecorder, num_tokens: int) -> None:
        """What runs between the first begin and the last end."""
        recorder.begin()
        self.run_body(num_tokens)
        recorder.end()

    def replay(self, bucket: CapturedBucket, batch: PackedBatch) -> None:
        """Graphs and breaks in order; breaks attend for the requests of `batch`."""
        with torch.no_grad(), forward_context(self.context(batch, bucket.num_tokens)):
            bucket.replay()
