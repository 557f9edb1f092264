"""After the whole ladder is captured: does every replay agree with eager?

A graph can go wrong only later, when another bucket has reused its memory. So nothing is checked before the
last bucket is captured, buckets are replayed in random order, and the prompts are fresh.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from toolkit.prefill.batch import PackedBatch, Request, pack
from toolkit.prefill.runners import EventSink, PrefillCudaGraphRunner

if TYPE_CHECKING:
    from toolkit.prefill.model_runner import ModelRunner

TOLERANCE = {torch.bfloat16: 0.08, torch.float16: 0.01, torch.float32: 1e-4}
"""Largest allowed difference to unpadded eager, as a share of the largest magnitude there, by dtype.

Padding, the static window of `full` and fused kernels change the order and the rounding of sums. bf16 keeps 8
bits, so one rounding is 0.4 %; over 30 layers 1.7 % was measured with `full` and 3.8 % with inductor's fused
pieces (SmolLM2, cpu). A replay that read the wrong memory is off by about 100 %.
"""
MAX_REQUESTS = 3
MAX_PREFIX = 24


@dataclass(frozen=True, slots=True)
class BucketCheck:
    """One bucket's comparison. Differences are shares of the largest magnitude of the eager result.

    `bit_equal`: output and KV equal the eager pass over the same padded batch; `padded_diff` is the largest
    difference of any of them. `argmax_agrees`: same next token wherever the two best logits are further apart than
    the tolerance.
    """

    num_tokens: int
    tokens: int
    requests: int
    prefix_tokens: int
    bit_equal: bool
    padded_diff: float
    unpadded_diff: float
    argmax_agrees: bool


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All buckets. `problem` says in one line why the capture counts as failed; None when it passed."""

    buckets: tuple[BucketCheck, ...]
    tolerance: float
    bit_exact_required: bool

    @property
    def bit_equal(self) -> bool:
        """Every bucket equal in every bit."""
        return all(check.bit_equal for check in self.buckets)

    @property
    def max_abs_diff(self) -> float | None:
        """Largest difference to unpadded eager, as a share of the largest magnitude there; None beside a NaN."""
        worst = _largest([0.0, *(check.unpadded_diff for check in self.buckets)])
        return None if math.isnan(worst) else worst

    @property
    def tokens_checked(self) -> int:
        """Tokens replayed and compared."""
        return sum(check.tokens for check in self.buckets)

    @property
    def problem(self) -> str | None:
        """The first disagreement in words."""
        for check in self.buckets:
            where = f"replay of bucket {check.num_tokens} ({check.tokens} tokens)"
            if self.bit_exact_required and not check.bit_equal:
                return f"{where} differs from eager on the same padded batch by {check.padded_diff:.2%}"
            # Written so that a NaN, which compares false with everything, is a problem too.
            if not (check.padded_diff <= self.tolerance and check.unpadded_diff <= self.tolerance):
                worst = _largest([check.padded_diff, check.unpadded_diff])
                return f"{where} differs from eager by {worst:.2%}, over {self.tolerance:.2%}"
            if not check.argmax_agrees:
                return f"{where} leads to another next token than eager"
        return None


def _largest(differences: list[float]) -> float:
    """The largest, and NaN where any is: `max` would lose it or keep it, depending on the order."""
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def check_replays(
    runner: PrefillCudaGraphRunner, vocabulary: int, seed: int = 0, on_event: EventSink | None = None
) -> CheckResult:
    """Replay every captured bucket, in random order, on fresh random prompts and compare with eager twice.

    `on_event` hears of every bucket done: `{"event": "step", "index": i, "total": n}`.
    """
    generator = random.Random(seed)
    order = list(runner.ladder)
    generator.shuffle(order)
    checks = []
    for index, bucket in enumerate(order):
        checks.append(_check_bucket(runner, bucket, vocabulary, generator))
        if on_event is not None:
            on_event({"event": "step", "index": index, "total": len(order)})
    model_runner = runner.model_runner
    return CheckResult(tuple(checks), TOLERANCE[model_runner.buffers.hidden.dtype], model_runner.device.bit_exact)


def _check_bucket(
    runner: PrefillCudaGraphRunner, bucket: int, vocabulary: int, generator: random.Random
) -> BucketCheck:
    model_runner = runner.model_runner
    batch = random_batch(runner, bucket, vocabulary, generator)
    try:
        _poison(model_runner, batch)
        result = runner.run(batch)
        assert result.bucket == bucket, result.reason
        replayed, replayed_kv = result.hidden.clone(), _kv_rows(model_runner, batch)
        runner.backend.load(batch, bucket)
        runner.backend.run_padded(batch, bucket)
        padded, padded_kv = model_runner.buffers.hidden[: batch.num_tokens].clone(), _kv_rows(model_runner, batch)
        unpadded = model_runner.forward_eager(batch)
        pairs = [(replayed, padded), *zip(replayed_kv, padded_kv, strict=True)]
        return BucketCheck(
            num_tokens=bucket,
            tokens=batch.num_tokens,
            requests=len(batch.spans),
            prefix_tokens=sum(span.prefix for span in batch.spans),
            bit_equal=all(torch.equal(one, other) for one, other in pairs),
            padded_diff=_largest([_relative_difference(one, other) for one, other in pairs]),
            unpadded_diff=_relative_difference(replayed, unpadded),
            argmax_agrees=_argmax_agrees(model_runner, replayed, unpadded, batch),
        )
    finally:
        model_runner.kv_pool.release([slot for span in batch.spans for slot in span.slots])


def random_batch(runner: PrefillCudaGraphRunner, bucket: int, vocabulary: int, generator: random.Random) -> PackedBatch:
    """A batch that replays in `bucket`: one to three requests, prefixes already in the pool where they fit."""
    model_runner, ladder = runner.model_runner, runner.ladder
    below = ladder[ladder.index(bucket) - 1] if bucket != ladder[0] else 0
    max_requests, context = model_runner.capture_limits
    room = model_runner.kv_pool.free_slots
    tokens = generator.randint(max(below + 1, (bucket + 1) // 2), bucket)
    least = -(-tokens // context)
    most = max(least, min(MAX_REQUESTS, max_requests, tokens))
    lengths = _split(tokens, generator.randint(least, most), context, generator)
    requests = []
    for length in lengths:
        spare = min(MAX_PREFIX, context - length, (room - tokens) // len(lengths))
        prefix = generator.randint(0, max(0, spare)) if generator.random() < 0.7 else 0
        requests.append((_random_tokens(prefix, vocabulary, generator), _random_tokens(length, vocabulary, generator)))
    return _pack_with_prefixes(model_runner, requests)


def _pack_with_prefixes(
    model_runner: ModelRunner, requests: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> PackedBatch:
    packed: list[Request] = []
    try:
        for prefix, tokens in requests:
            request = Request(prefix)
            packed.append(request)
            if prefix:
                model_runner.forward_eager(pack([request], model_runner.kv_pool))
            request.tokens = tokens
        return pack(packed, model_runner.kv_pool)
    except BaseException:
        # Memory may run out in a pass over a prefix; the pool must not lose its slots for it.
        model_runner.kv_pool.release([slot for request in packed for slot in request.slots])
        raise


def _split(total: int, parts: int, longest: int, generator: random.Random) -> list[int]:
    """`parts` lengths from 1 to `longest` that add up to `total`."""
    lengths = [total // parts + (number < total % parts) for number in range(parts)]
    for number in range(parts - 1):
        room = min(lengths[number] - 1, longest - lengths[number + 1])
        moved = generator.randint(0, max(0, room))
        lengths[number] -= moved
        lengths[number + 1] += moved
    return lengths


def _random_tokens(count: int, vocabulary: int, generator: random.Random) -> tuple[int, ...]:
    return tuple(generator.randrange(vocabulary) for _ in range(count))


def _poison(model_runner: ModelRunner, batch: PackedBatch) -> None:
    """NaN where the replay must write, so that one that does nothing cannot pass."""
    model_runner.buffers.hidden.fill_(float("nan"))
    slots = torch.tensor(batch.slots).to(model_runner.device.torch_device)
    for rows in (*model_runner.kv_pool.keys, *model_runner.kv_pool.values):
        rows.index_fill_(0, slots, float("nan"))


def _kv_rows(model_runner: ModelRunner, batch: PackedBatch) -> list[torch.Tensor]:
    slots = torch.tensor(batch.slots).to(model_runner.device.torch_device)
    pool = model_runner.kv_pool
    return [rows.index_select(0, slots) for rows in (*pool.keys, *pool.values)]


def _relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    scale = float(other.float().abs().max()) or 1.0
    return float((one.float() - other.float()).abs().max()) / scale


def _argmax_agrees(model_runner: ModelRunner, replayed: torch.Tensor, eager: torch.Tensor, batch: PackedBatch) -> bool:
    scores = model_runner.logits(eager, batch.last_rows)
    ours = model_runner.logits(replayed, batch.last_rows)
    if scores.shape[-1] < 2:
        return True  # one word in the vocabulary: there is no other answer
    best = scores.topk(2, dim=-1)
    tolerance = TOLERANCE[model_runner.buffers.hidden.dtype] * scores.abs().amax(dim=-1)
    clear = (best.values[:, 0] - best.values[:, 1]) > tolerance
    return bool((~clear | (ours.argmax(dim=-1) == best.indices[:, 0])).all())


def next_token(runner: PrefillCudaGraphRunner, prompt: str) -> tuple[str | None, str]:
    """(the next token as text, why) for a prompt, from replayed graphs only; None when it would run eager."""
    model_runner = runner.model_runner
    if model_runner.tokenizer is None:
        return None, "the model came without a tokenizer, as random weights do, so no prompt can be run"
    tokens = tuple(model_runner.tokenizer(prompt)["input_ids"])
    if len(tokens) > model_runner.kv_pool.free_slots:
        return None, f"the prompt has {len(tokens)} tokens, more than the KV pool holds"
    batch = pack([Request(tokens)], model_runner.kv_pool)
    try:
        bucket, reason = runner.choose(batch)
        if bucket is None:
            return None, f"the prompt would run eager: {reason}"
        hidden = runner.run(batch).hidden
        best = int(model_runner.logits(hidden, batch.last_rows).argmax())
        return str(model_runner.tokenizer.decode([best])), reason
    finally:
        model_runner.kv_pool.release(batch.slots)
