"""The backends on a tiny llama: what a bucket consists of, that its replay is eager to the bit, who is chosen."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_facts import facts
from tiny_models import (
    GIB,
    VOCABULARY,
    CpuDevice,
    batch_of,
    capture,
    captured,
    make_runner,
    random_tokens,
    release,
    tiny_runner,
)

from toolkit.bundled import BUNDLED_ID
from toolkit.catalogue import resolve_model
from toolkit.errors import CaptureError
from toolkit.ladder import generate_prefill_buckets
from toolkit.prefill.attention import register_attention
from toolkit.prefill.backends.base import BreakableBackend, CapturedBucket
from toolkit.prefill.batch import PackedBatch, Request, Span, pack
from toolkit.prefill.check import check_replays
from toolkit.prefill.kv_pool import PADDING_SLOT
from toolkit.prefill.runners import EagerRunner, PrefillCudaGraphRunner
from toolkit.weights import load_model

BACKENDS = ("full", "breakable", "tc_piecewise")
LADDER = (1, 4, 8, 16, 24, 48)
LAYERS = 2
SEGMENTS = {"full": 1, "breakable": LAYERS + 1, "tc_piecewise": LAYERS + 1}


@pytest.fixture(scope="module", params=BACKENDS)
def graphs(request: pytest.FixtureRequest) -> PrefillCudaGraphRunner:
    """The whole ladder captured, once a backend."""
    return captured(tiny_runner("llama", backend=request.param, buckets=LADDER))


def prefixed_batch(graphs: PrefillCudaGraphRunner, tokens: int, seed: int = 0) -> PackedBatch:
    """`tokens` new tokens in up to three requests, two of them with a prefix in the pool, in scattered slots."""
    runner, generator = graphs.model_runner, random.Random(seed)
    hole, requests, left = runner.kv_pool.allocate(7), [], tokens
    for prefix in (9, 0, 5)[: min(3, tokens)]:
        request = Request(random_tokens(prefix, generator))
        if prefix:
            runner.forward_eager(pack([request], runner.kv_pool))
        length = left if len(requests) == min(3, tokens) - 1 else left // 3 or 1
        request.tokens, left = random_tokens(length, generator), left - length
        requests.append(request)
    runner.kv_pool.release(hole)
    return pack(requests, runner.kv_pool)


def kv_of(graphs: PrefillCudaGraphRunner, batch: PackedBatch) -> list[torch.Tensor]:
    pool = graphs.model_runner.kv_pool
    return [rows[list(batch.slots)].clone() for rows in (*pool.keys, *pool.values)]


def spoil(graphs: PrefillCudaGraphRunner, batch: PackedBatch) -> None:
    """NaN wherever the next run has to write, the padding slot excepted."""
    runner = graphs.model_runner
    for static in (runner.buffers.hidden, runner.buffers.queries, runner.buffers.attended):
        static.fill_(torch.nan)
    for rows in (*runner.kv_pool.keys, *runner.kv_pool.values):
        rows[list(batch.slots)] = torch.nan


# --- what a capture consists of -----------------------------------------------------------------------------


def test_a_bucket_has_one_segment_or_one_more_than_there_are_breaks(graphs: PrefillCudaGraphRunner) -> None:
    expected = SEGMENTS[graphs.backend.name]
    assert [figure.num_tokens for figure in graphs.figures] == sorted(LADDER, reverse=True)
    assert {figure.segments for figure in graphs.figures} == {expected}
    for bucket in graphs.captured.values():
        assert len(bucket.steps) == 2 * expected - 1  # a break between any two graphs
        assert bucket.graph_nodes == sum(graph.node_count or 0 for graph in bucket.graphs) > 20
    assert graphs.ladder == list(LADDER)


def test_every_attention_is_a_break_and_no_graph_holds_one(graphs: PrefillCudaGraphRunner) -> None:
    recorded = [call.function for graph in graphs.captured[8].graphs for call in graph._tape.calls]
    names = [str(function) for function in recorded if "prefill_lab" in str(function)]
    assert len(names) == (LAYERS if graphs.backend.name == "full" else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ladder_is_captured_largest_first_into_one_pool_with_the_collector_frozen(backend: str) -> None:
    device, pools, enabled = CpuDevice(GIB), [], []
    runner = tiny_runner("llama", backend=backend, buckets=(4, 16, 8), device=device)
    start = device.start_recording
    device.start_recording = lambda pool: (pools.append(pool), enabled.append(gc.isenabled()), start(pool))
    events: list[dict[str, Any]] = []
    assert gc.isenabled()
    result = capture(runner, events)
    assert gc.isenabled()
    assert [event["num_tokens"] for event in events if event["event"] == "bucket"] == [16, 8, 4]
    assert (len(set(map(id, pools))), len(pools)) == (1, 3 * SEGMENTS[backend])
    assert not any(enabled)
    assert isinstance(result.runner, PrefillCudaGraphRunner)
    assert pools[0] is result.runner.pool
    assert runner.kv_pool.free_slots == runner.kv_pool.num_tokens  # the dummies have gone


# --- replay is eager ----------------------------------------------------------------------------------------


def test_after_the_whole_ladder_every_bucket_replays_eager_to_the_bit(graphs: PrefillCudaGraphRunner) -> None:
    order = list(LADDER) * 2
    random.Random(5).shuffle(order)
    for seed, bucket in enumerate(order):
        for tokens in {bucket, bucket // 2 + 1, max(1, bucket - 1)}:
            batch = prefixed_batch(graphs, tokens, seed)
            if graphs.choose(batch)[0] != bucket:
                release(graphs.model_runner, batch)
                continue
            graphs.backend.load(batch, bucket)
            spoil(graphs, batch)
            graphs.backend.run_padded(batch, bucket)
            expected, expected_kv = graphs.model_runner.buffers.hidden[:tokens].clone(), kv_of(graphs, batch)
            assert expected.isfinite().all()
            spoil(graphs, batch)
            result = graphs.run(batch)
            assert (result.runner, result.bucket) == ("graph", bucket)
            assert torch.equal(result.hidden, expected)
            assert all(map(torch.equal, kv_of(graphs, batch), expected_kv))
            eager = graphs.eager_runner.run(batch).hidden
            assert torch.allclose(result.hidden, eager, rtol=0, atol=1e-4 * float(eager.abs().max()))
            release(graphs.model_runner, batch)


def test_padding_reaches_no_request(graphs: PrefillCudaGraphRunner) -> None:
    """Whatever lies in the padding slot or in the rows behind the batch, the answer is the same."""
    runner, batch = graphs.model_runner, prefixed_batch(graphs, 13)
    before = graphs.run(batch).hidden.clone()
    for rows in (*runner.kv_pool.keys, *runner.kv_pool.values):
        rows[PADDING_SLOT] = 1e4
    assert torch.equal(graphs.run(batch).hidden, before)
    release(runner, batch)


@pytest.mark.parametrize("seed", range(3))
def test_the_check_passes_on_good_graphs_and_returns_every_slot(graphs: PrefillCudaGraphRunner, seed: int) -> None:
    free = graphs.model_runner.kv_pool.free_slots
    result = check_replays(graphs, VOCABULARY, seed)
    assert result.problem is None
    assert result.bit_equal
    assert result.bit_exact_required
    assert result.max_abs_diff is not None and result.max_abs_diff < 1e-5
    assert sorted(check.num_tokens for check in result.buckets) == list(LADDER)
    assert any(check.prefix_tokens for check in result.buckets)
    assert any(check.requests > 1 for check in result.buckets)
    assert graphs.model_runner.kv_pool.free_slots == free


# --- a wrong replay is found --------------------------------------------------------------------------------


def _nothing_runs(graphs: PrefillCudaGraphRunner, bucket: CapturedBucket) -> None:
    bucket.steps[:] = []


def _last_graph_missing(graphs: PrefillCudaGraphRunner, bucket: CapturedBucket) -> None:
    bucket.steps[-1] = lambda: None


def _output_off_by_little(graphs: PrefillCudaGraphRunner, bucket: CapturedBucket) -> None:
    # The unit in the last place, of one value in the first row.
    hidden = graphs.model_runner.buffers.hidden
    bucket.steps.append(lambda: hidden[0, 0].copy_(torch.nextafter(hidden[0, 0], torch.tensor(torch.inf))))


def _kv_off_by_little(graphs: PrefillCudaGraphRunner, bucket: CapturedBucket) -> None:
    runner = graphs.model_runner
    bucket.steps.append(lambda: runner.kv_pool.values[1].index_fill_(0, runner.buffers.slot_mapping[:1], 0.5))


def _input_moved(graphs: PrefillCudaGraphRunner, bucket: CapturedBucket) -> None:
    ids = graphs.model_runner.buffers.input_ids
    bucket.steps.insert(0, lambda: ids[:2].copy_(ids[:2].flip(0) + 1))


BREAKAGES: list[Callable[[PrefillCudaGraphRunner, CapturedBucket], None]] = [
    *(_nothing_runs, _last_graph_missing, _output_off_by_little, _kv_off_by_little, _input_moved),
]


@pytest.mark.parametrize(
    ("breakage", "bit_exact"),
    [
        *((each, True) for each in BREAKAGES),
        *((each, False) for each in BREAKAGES if each is not _output_off_by_little),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else {True: "bits", False: "tolerance"}[value],
)
def test_a_broken_replay_is_a_problem(
    graphs: PrefillCudaGraphRunner,
    breakage: Callable[..., None],
    bit_exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that cannot promise bits (CUDA) finds all but the last unit of the last place."""
    monkeypatch.setattr(graphs.model_runner.device, "bit_exact", bit_exact)
    bucket = graphs.captured[16]
    good = list(bucket.steps)
    try:
        breakage(graphs, bucket)
        problems = [check_replays(graphs, VOCABULARY, seed).problem for seed in range(3)]
    finally:
        bucket.steps[:] = good
    assert all(problem and problem.startswith("replay of bucket 16 ") for problem in problems), problems
    assert check_replays(graphs, VOCABULARY).problem is None


@pytest.mark.parametrize("backend", ["breakable", "tc_piecewise"])
def test_graphs_in_another_order_are_refused_or_found(backend: str) -> None:
    graphs = captured(tiny_runner("llama", backend=backend, buckets=(8, 16)))
    steps = graphs.captured[16].steps
    steps[0], steps[2] = steps[2], steps[0]
    with pytest.raises(CaptureError, match="order they were captured"):
        check_replays(graphs, VOCABULARY)
    steps[0], steps[2] = steps[2], steps[0]
    steps[1], steps[3] = steps[3], steps[1]  # the attention of the wrong layer
    assert check_replays(graphs, VOCABULARY).problem is not None


# --- inductor -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inductor() -> Iterator[tuple[PrefillCudaGraphRunner, Any]]:
    runner = tiny_runner("llama", backend="tc_piecewise", compiler="inductor", buckets=(4, 8, 16))
    result = capture(runner)
    assert isinstance(result.runner, PrefillCudaGraphRunner), result.reason
    yield result.runner, result


def test_compiled_pieces_replay_to_the_bit_and_agree_with_eager(inductor: tuple[PrefillCudaGraphRunner, Any]) -> None:
    graphs, _ = inductor
    for seed in range(2):
        result = check_replays(graphs, VOCABULARY, seed)
        assert result.problem is None
        assert result.bit_equal
    assert {figure.segments for figure in graphs.figures} == {LAYERS + 1}
    # Opaque: one call a piece, beside what passes its results on.
    assert all((figure.graph_nodes or 99) < 20 for figure in graphs.figures)


def test_memory_of_compiled_pieces_is_not_known(inductor: tuple[PrefillCudaGraphRunner, Any]) -> None:
    graphs, result = inductor
    assert graphs.model_runner.device.pool_reserved_bytes(graphs.pool) is None
    assert (result.outcome, result.memory_usage_gib, result.peak_usage_gib) == ("captured", None, None)
    for figure in graphs.figures:
        assert (figure.added_mib, figure.cumulative_mib, figure.free_after_gib) == (None, None, None)
        assert figure.capture_s > 0


# --- who is chosen ------------------------------------------------------------------------------------------


def batch_like(*lengths: int, prefix: int = 0) -> PackedBatch:
    """Shapes without a pool: choosing looks at nothing else."""
    spans = tuple(Span(0, length, prefix, tuple(range(1, prefix + length + 1))) for length in lengths)
    return PackedBatch((0,) * sum(lengths), (0,) * sum(lengths), (1,) * sum(lengths), spans)


def chooser(ladder: list[int], backend: str = "breakable", **limits: int) -> PrefillCudaGraphRunner:
    runner = tiny_runner("llama", backend=backend, buckets=(4,), **{"context_length": 1 << 20, **limits})
    graphs = PrefillCudaGraphRunner(runner, BreakableBackend(runner), EagerRunner(runner))
    graphs.captured = {bucket: CapturedBucket(bucket) for bucket in ladder}
    return graphs


def replay_fact(case: str) -> str:
    (decision,) = (row["decision"] for row in facts("replay") if row["case"] == case)
    return decision


def test_the_token_counts_that_run_eager_are_those_of_the_release() -> None:
    """SGLang 0.5.23, executed: the default ladder to 8192, and the ladder 512, 1024, 4096."""
    default = chooser(generate_prefill_buckets(8192))
    eager = [tokens for tokens in range(1, 8194) if default.choose(batch_like(tokens))[0] is None]
    assert f"{eager} n={len(eager)}" == replay_fact("default_ladder_8192_eager_token_counts")
    coarse = chooser([512, 1024, 4096])
    told = [tuple(map(int, pair)) for pair in re.findall(r"\((\d+), (\d+)\)", replay_fact(
        "buckets_512_1024_4096_eager_ranges"
    ))]  # fmt: skip
    expected = {tokens for first, last in told for tokens in range(first, last + 1)}
    assert {tokens for tokens in range(1, 4098) if coarse.choose(batch_like(tokens))[0] is None} == expected
    assert replay_fact("buckets_8192_only_3208_tokens") == "eager"
    assert chooser([8192]).choose(batch_like(3208))[0] is None
    assert replay_fact("multi_request_bs8") == "graph"
    assert default.choose(batch_like(*[5] * 8))[0] == 48


@given(st.sets(st.integers(1, 300), max_size=10), st.integers(1, 320))
def test_the_nearest_bucket_is_chosen_or_eager_for_a_reason(buckets: set[int], tokens: int) -> None:
    graphs = _CHOOSER
    graphs.captured = {bucket: CapturedBucket(bucket) for bucket in buckets}
    bucket, why = graphs.choose(batch_like(tokens))
    enough = [each for each in buckets if each >= tokens]
    if not enough:
        assert (bucket, why) == (None, f"{tokens} tokens exceed the largest bucket {max(buckets, default=0)}")
    elif min(enough) > 2 * tokens:
        assert (bucket, why) == (None, f"bucket {min(enough)} is more than twice the {tokens} tokens")
    else:
        assert (bucket, why) == (min(enough), f"{tokens} tokens padded to bucket {min(enough)}")


_CHOOSER = chooser([])


def test_full_serves_only_what_fits_its_slots_and_window() -> None:
    """SGLang 0.5.23 (full_bs_over_slots): more requests than slots run eager; ours has a window besides."""
    assert replay_fact("full_bs_over_slots") == "eager"
    graphs = chooser([8, 16, 64], "full", request_slots=3, max_context=20)
    assert graphs.choose(batch_like(4, 4, 4))[0] == 16
    assert graphs.choose(batch_like(3, 3, 3, 3)) == (None, "4 requests up to 3 tokens do not fit 3 x 20")
    assert graphs.choose(batch_like(10, prefix=10))[0] == 16
    assert graphs.choose(batch_like(10, prefix=11)) == (None, "1 requests up to 21 tokens do not fit 3 x 20")
    breakable = chooser([8, 16, 64], request_slots=3, max_context=20)
    assert breakable.choose(batch_like(3, 3, 3, 3))[0] == 16
    assert breakable.choose(batch_like(10, prefix=300))[0] == 16


def test_what_no_bucket_serves_runs_eager_and_says_so(graphs: PrefillCudaGraphRunner) -> None:
    for tokens in (2, 49):  # bucket 4 holds 2 tokens at exactly twice; 49 exceed the largest
        batch = batch_of(graphs.model_runner, tokens)
        result = graphs.run(batch)
        assert (result.runner, result.bucket) == (("graph", 4) if tokens == 2 else ("eager", None))
        assert result.hidden.shape == (tokens, 32)
        release(graphs.model_runner, batch)


def test_after_a_release_everything_runs_eager() -> None:
    graphs = captured(tiny_runner("llama", buckets=(8,)))
    batch = batch_of(graphs.model_runner, 8)
    replayed = graphs.run(batch).hidden.clone()
    graphs.release()
    result = graphs.run(batch)
    assert (result.runner, result.reason) == ("eager", "8 tokens exceed the largest bucket 0")
    assert torch.allclose(result.hidden, replayed, atol=1e-5)


# --- the real model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_smollm2_is_captured_and_replays_to_the_bit(backend: str) -> None:
    source = resolve_model(BUNDLED_ID)
    loaded = load_model(
        source, weights="random", dtype=torch.bfloat16, device=torch.device("cpu"),
        attn_implementation=register_attention(),
    )  # fmt: skip
    graphs = captured(make_runner(loaded.model, backend=backend, device=CpuDevice(4 * GIB), buckets=(8, 32)))
    assert {figure.segments for figure in graphs.figures} == {1 if backend == "full" else 31}
    result = check_replays(graphs, loaded.model.config.vocab_size)
    assert result.problem is None
    assert result.bit_equal
    if backend == "tc_piecewise":
        assert len(graphs.backend.pieces) == 31 + 30  # type: ignore[attr-defined]
