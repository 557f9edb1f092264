"""`full`: one graph a bucket, attention inside over fixed request slots and a fixed context window."""

from __future__ import annotations

import torch

from toolkit.errors import CaptureError
from toolkit.prefill.attention import ForwardContext
from toolkit.prefill.backends.base import BreakableBackend, SegmentRecorder
from toolkit.prefill.batch import PackedBatch
from toolkit.prefill.kv_pool import PADDING_SLOT


class FullBackend(BreakableBackend):
    """Nothing breaks: attention gathers `request_slots` x `max_context` rows whatever the batch needs of them."""

    name = "full"

    def load(self, batch: PackedBatch, num_tokens: int) -> None:
        """Inputs as ever, then who each row belongs to and where each request's keys are."""
        slots, window = self.runner.request_slots, self.runner.max_context
        if len(batch.spans) > slots or any(len(span.slots) > window for span in batch.spans):
            raise CaptureError(f"the batch does not fit {slots} request slots of {window} tokens")
        super().load(batch, num_tokens)
        requests = [-1] * num_tokens
        for number, span in enumerate(batch.spans):
            requests[span.start : span.start + span.length] = [number] * span.length
        positions = (*batch.positions, *(0,) * (num_tokens - batch.num_tokens))
        index = torch.full((slots, window), PADDING_SLOT, dtype=torch.int64)
        for number, span in enumerate(batch.spans):
            index[number, : len(span.slots)] = torch.tensor(span.slots)
        static = self.runner.static_attention
        static.row_request[:num_tokens].copy_(torch.tensor(requests))
        static.row_position[:num_tokens].copy_(torch.tensor(positions))
        static.kv_index.copy_(index.view(-1))

    def context(self, batch: PackedBatch, num_tokens: int, recorder: SegmentRecorder | None = None) -> ForwardContext:
        """Static metadata instead of spans; no hook, so attention stays inside the graph."""
        runner = self.runner
        slots = runner.buffers.slot_mapping[:num_tokens]
        return ForwardContext(runner.kv_pool, runner.buffers, slots, num_tokens, static=runner.static_attention)
