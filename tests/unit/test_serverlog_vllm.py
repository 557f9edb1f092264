"""vLLM's lines, word for word."""

from __future__ import annotations

import pytest

from toolkit.serverlogs.events import NO_RANK, BucketBar, Compiling, EngineStart, Event, OutOfMemory, Rank, ServerReady
from toolkit.serverlogs.events_vllm import (
    VllmAvailableKv,
    VllmGraphEstimate,
    VllmGraphFinished,
    VllmGraphProfile,
    VllmKvTokens,
    VllmModelLoaded,
    VllmPool,
    VllmStartupMemory,
)
from toolkit.serverlogs.parse import parse

AT = (1, NO_RANK)
LINES = [
    ("Model loading took 5.2 GiB memory and 10.455804 seconds", VllmModelLoaded(*AT, 5.2, 10.455804)),
    ("Model loading took 5.2 GiB and 10.455804 seconds", VllmModelLoaded(*AT, 5.2, 10.455804)),
    ("Loading model weights took 7.5100 GB", VllmModelLoaded(*AT, 7.51, None)),
    ("Graph capturing finished in 69 secs.", VllmGraphFinished(*AT, 69.0, None)),
    ("Graph capturing finished in 1 secs, took -0.19 GiB", VllmGraphFinished(*AT, 1.0, -0.19)),
    ("Available KV cache memory: 7.94 GiB", VllmAvailableKv(*AT, 7.94)),
    ("Available KV cache memory: -0.67 GiB", VllmAvailableKv(*AT, -0.67)),
    ("GPU KV cache size: 12,624 tokens", VllmKvTokens(*AT, 12624)),
    (
        "GPU KV cache size: 1,196,643 tokens, Maximum concurrency for 1,048,576 tokens per request: 1.14x",
        VllmKvTokens(*AT, 1196643, 1048576, 1.14),
    ),
    ("Maximum concurrency for 4,096 tokens per request: 3.08x", VllmKvTokens(*AT, None, 4096, 3.08)),
    (
        "Profiling CUDA graph memory: PIECEWISE=51 (largest=512), FULL=35 (largest=256)",
        VllmGraphProfile(*AT, 51, 512, 35, 256),
    ),
    ("Profiling CUDA graph memory: FULL=3 (largest=4)", VllmGraphProfile(*AT, None, None, 3, 4)),
    ("Estimated CUDA graph memory: 118.65 GiB total", VllmGraphEstimate(*AT, 118.65)),
    (
        "CUDA graph pool memory: -0.19 GiB (actual), 2.43 GiB (estimated), difference: 2.62 GiB (1378.9%).",
        VllmPool(*AT, -0.19, 2.43, 2.62),
    ),
    (
        "Free memory on device (93.79/94.97 GiB) on startup. Desired GPU memory utilization is (0.975, 92.6 GiB). "
        "Actual usage is 83.1 GiB for consumed memory (weights + non-torch), 1.24 GiB for peak activation, and 0.2 "
        "GiB for CUDAGraph memory. Current kv cache memory in use is 7.94 GiB.",
        VllmStartupMemory(*AT, 93.79, 94.97, 0.975, 92.6, 83.1, 1.24, 0.2, 7.94),
    ),
    ("torch.compile took 33.09 s in total", Compiling(*AT, "torch.compile took 33.09 s in total", 33.09)),
    ("Application startup complete.", ServerReady(*AT, "uvicorn")),
]


@pytest.mark.parametrize(("words", "expected"), LINES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_line_gives_its_numbers(words: str, expected: Event) -> None:
    assert list(parse(f"INFO 04-20 20:13:33 [gpu_model_runner.py:4820] {words}\n")) == [expected]


@pytest.mark.parametrize(("words", "expected"), LINES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_cut_line_has_no_number_that_the_whole_one_has_not(words: str, expected: Event) -> None:
    for end in range(len(words)):
        for event in parse(f"(EngineCore pid=7) INFO 04-20 20:13:33 [x.py:1] {words[:end]}".encode()):
            if type(event) is type(expected):
                found = {getattr(event, name) for name in event.__dataclass_fields__}
                numbers = {value for value in found if isinstance(value, float | int)}
                assert numbers <= {getattr(expected, name) for name in expected.__dataclass_fields__}, words[:end]


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("(EngineCore pid=28132) INFO 04-20 20:13:33 [core.py:1] ", NO_RANK),
        ("(EngineCore_DP1 pid=212) INFO 04-20 20:13:33 [core.py:1] ", Rank(dp=1)),
        ("(Worker_TP0 pid=1159) INFO 09-04 11:00:17 [gpu_worker.py:792] ", Rank(tp=0)),
        ("(Worker_TP1) [model_runner.py] ", Rank(tp=1)),
        ("(Worker_TP0_EP2 pid=1159) INFO 09-04 11:00:17 [gpu_worker.py:792] ", Rank(tp=0, ep=2)),
        ("(Worker_PP1_TP3 pid=1159) INFO 09-04 11:00:17 [gpu_worker.py:792] ", Rank(pp=1, tp=3)),
        ("(VllmWorker TP3 pid=1159) INFO 09-04 11:00:17 [gpu_worker.py:792] ", Rank(tp=3)),
        (
            "(RayWorkerWrapper pid=263, ip=10.0.16.95) INFO 01-30 11:53:53 model_runner.py:1115] ",
            Rank(worker="pid 263"),
        ),
        ("vllm-openai_1 | (Worker_TP1 pid=3) INFO 06-05 16:30:08 [x.py:1] ", Rank(tp=1, server="vllm-openai_1")),
        ("2026-04-19 11:23:01.201 | (Worker_TP1 pid=207) INFO 04-19 09:23:01 [x.py:829] ", Rank(tp=1)),
    ],
)
def test_what_stands_before_the_words_names_the_rank(prefix: str, rank: Rank) -> None:
    assert [event.rank for event in parse(f"{prefix}Available KV cache memory: 7.94 GiB\n")] == [rank]


def test_the_engine_says_its_version_and_arguments() -> None:
    (event,) = parse(
        "(EngineCore pid=1) INFO 04-20 20:13:21 [core.py:105] Initializing a V1 LLM engine (v0.19.0) with config: "
        "model='some/model', speculative_config=None, tokenizer='other', dtype=torch.float16, max_seq_len=4096, "
        "tensor_parallel_size=2, enforce_eager=False, kv_cache_dtype=auto, seed=0\n"
    )
    assert isinstance(event, EngineStart)
    assert (event.engine, event.version) == ("vllm", "0.19.0")
    expected = dict(
        model="some/model", speculative_config=None, dtype="float16", max_seq_len=4096, kv_cache_dtype="auto"
    )
    assert event.values == {**expected, "tensor_parallel_size": 2, "enforce_eager": False}


def test_bars_name_the_kind_of_graph() -> None:
    text = (
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|████| 51/51 [00:03<00:00, 15.20it/s]\n"
        "Capturing CUDA graphs (decode, FULL):  42%|████  | 15/35 [00:01<00:02,  9.34it/s]\n"
        "Capturing CUDA graph shapes: 100%|████| 35/35 [00:21<00:00,  1.60it/s]\n"
    )
    assert list(parse(text)) == [
        BucketBar(1, NO_RANK, "prefill", None, None, 51, 51, 3.0, 0.0),
        BucketBar(2, NO_RANK, "decode", None, None, 15, 35, 1.0, 2.0),
        BucketBar(3, NO_RANK, "prefill", None, None, 35, 35, 21.0, 0.0),
    ]


def test_errors_behind_a_level_and_a_file_are_seen() -> None:
    (event,) = parse(
        "(EngineCore pid=9) ERROR 02-04 00:18:05 [core.py:572] torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 1.50 GiB. GPU 0 has a total capacity of 15.47 GiB of which 102.75 MiB is free.\n"
    )
    assert isinstance(event, OutOfMemory)
    assert (event.source, event.tried_gib, event.total_gib) == ("allocator", 1.5, 15.47)
