"""SGLang's lines, word for word, old and new."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.serverlogs.events import (
    NO_RANK,
    BucketBar,
    CaptureBegin,
    CaptureEnd,
    CaptureSizes,
    Compiling,
    DisableLine,
    EngineTimings,
    Event,
    GateLine,
    InitDistributed,
    KvPool,
    Limits,
    MambaPool,
    MemoryBaseline,
    Notice,
    PostCaptureSizing,
    PrefillLine,
    Rank,
    WeightsEnd,
)
from toolkit.serverlogs.parse import parse
from toolkit.serverlogs.prefill_batches import parse_prefill_batch


def events(text: str) -> list[Event]:
    return list(parse(text.encode()))


def one(words: str) -> Event:
    (event,) = events(f"[2026-08-27 00:00:00] {words}\n")
    return event


AT = (1, NO_RANK)
LINES = [
    ("Init torch distributed ends. elapsed=0.05 s, mem usage=0.09 GB", InitDistributed(*AT, 0.05, 0.09)),
    ("Init torch distributed ends. mem usage=0.13 GB", InitDistributed(*AT, None, 0.13)),
    ("Init parallel ends. elapsed=13.46 s", InitDistributed(*AT, 13.46, None)),
    ("Memory baseline taken. mem usage=-0.00 GB", MemoryBaseline(*AT, 0.0)),
    (
        "Load weight end. elapsed=12.02 s, type=Qwen3MoeForCausalLM, quant=fp8, fmt=e4m3, avail mem=49.33 GB, "
        "mem usage=29.15 GB.",
        WeightsEnd(*AT, 49.33, 29.15, 12.02, "Qwen3MoeForCausalLM", None, "fp8", "e4m3"),
    ),
    (
        "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=7.37 GB, mem usage=15.02 GB.",
        WeightsEnd(*AT, 7.37, 15.02, None, "LlamaForCausalLM", "torch.bfloat16"),
    ),
    ("KV Cache is allocated. #tokens: 992,896, K size: 68.18 GB, V size: 68.18 GB", KvPool(*AT, 992896, 68.18, 68.18)),
    (
        "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 7, KV size: 0.02 GB",
        KvPool(*AT, 7, kv_gib=0.02, dtype="torch.float8_e4m3fn"),
    ),
    (
        "KV Cache is allocated (VA upper bound). dtype: torch.bfloat16, #tokens: 70, K size: 1.00 GB, V size: 1.50 GB",
        KvPool(*AT, 70, 1.0, 1.5, dtype="torch.bfloat16", upper_bound=True),
    ),
    (
        "KV cache allocated. dtype: torch.bfloat16, #tokens: 512, KV size: 3.50 GB, avail mem=2.25 GB",
        KvPool(*AT, 512, kv_gib=3.5, dtype="torch.bfloat16", free_gib=2.25, after_capture=True),
    ),
    (
        "Mamba Cache is allocated. max_mamba_cache_size: 64, conv_state size: 0.07GB, ssm_state size: 3.05GB "
        "intermediate_ssm_state_cache size: 48.75GB intermediate_conv_window_cache size: 0.43GB ",
        MambaPool(*AT, 64, 0.07, 3.05, 48.75, 0.43),
    ),
    (
        "max_total_num_tokens=392920, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=4096, "
        "context_len=40960, available_gpu_mem=10.54 GB",
        Limits(*AT, 392920, 8192, 16384, 4096, 40960, 10.54),
    ),
    ("max_total_num_tokens=5, chunked_prefill_size=-1, max_prefill_tokens=16384, ", Limits(*AT, 5, -1, 16384)),
    (
        "Engine startup timings (s): load_weight=12.02, scheduler_e2e=52.09, cuda_graph={prefill=22.96, "
        "target_verify=0.00}, tokenizer_e2e=65.82",
        EngineTimings(
            *AT,
            {"load_weight": 12.02, "scheduler_e2e": 52.09, "tokenizer_e2e": 65.82},
            {"prefill": 22.96, "target_verify": 0.0},
        ),
    ),
    # Captures.
    (
        "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], avail mem=12.59 GB",
        CaptureBegin(*AT, "target", "prefill", "CUDA", "new", "breakable", (4, 8), None, 12.59),
    ),
    (
        "Capture draft extend NPU graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2], avail mem=1.00 GB",
        CaptureBegin(*AT, "draft", "extend", "NPU", "new", "full", (1, 2), 4, 1.0),
    ),
    (
        "Capture target verify XPU graph begin. backend=full, num_tokens_per_bs=1, avail mem=1.00 GB",
        CaptureBegin(*AT, "target", "verify", "XPU", "new", "full", None, 1, 1.0),
    ),
    (
        "Capture target decode CPU graph end. bs=[1, 2], elapsed=12.26 s, mem usage=-0.01 GB, avail mem=10.54 GB.",
        CaptureEnd(*AT, "target", "decode", "CPU", "new", 12.26, -0.01, 10.54, (1, 2)),
    ),
    (
        "Capture cuda graph begin. This can take up to several minutes. avail mem=24.14 GB",
        CaptureBegin(*AT, "target", "decode", "CUDA", "old", free_gib=24.14),
    ),
    (
        "Capture draft extend cuda graph begin (step 1). This can take up to several minutes. avail mem=4.14 GB",
        CaptureBegin(*AT, "draft", "extend", "CUDA", "old", free_gib=4.14),
    ),
    (
        "Capture piecewise CUDA graph end. Time elapsed: 17.62 s. mem usage=2.32 GB. avail mem=21.22 GB.",
        CaptureEnd(*AT, "target", "prefill", "CUDA", "old", 17.62, 2.32, 21.22),
    ),
    ("Capture cuda graph bs [1, 2, 4]", CaptureSizes(*AT, "decode", (1, 2, 4), True)),
    ("Capture cuda graph num tokens [4, 8, ...]", CaptureSizes(*AT, "prefill", (4, 8), False)),
    (
        "Compiling a graph for dynamic shape takes 3.38 s",
        Compiling(*AT, "Compiling a graph for dynamic shape takes 3.38 s", 3.38),
    ),
    # Who decided.
    (
        "Disabling auto-selected prefill CUDA graph: only 3.99 GiB is free after model/KV/eager-buffer allocation; at "
        "least 4.00 GiB is required for capture. Set an explicit prefill CUDA graph backend to override this safety "
        "gate.",
        GateLine(*AT, 3.99, 4.0),
    ),
]


@pytest.mark.parametrize(("words", "expected"), LINES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_line_gives_its_numbers(words: str, expected: Event) -> None:
    assert one(words) == expected


DISABLES = [
    (
        "Breakable CUDA graph is incompatible with DeepSeek-V4 (heavy capture-pool memory pressure); disabling prefill "
        "CUDA graph.",
        ("breakable_rule", "DeepSeek-V4 (heavy capture-pool memory pressure)", None),
    ),
    (
        "Disabling breakable prefill CUDA graph by default for pipeline parallelism.",
        ("pipeline_parallel", "pipeline parallelism", None),
    ),
    (
        "Disabling prefill CUDA graph (breakable) by default for the DeepSeek-V3 arch on the trtllm_mla attention "
        "backend (slow).",
        ("trtllm_mla", "DeepSeek-V3 on trtllm_mla attention", None),
    ),
    (
        "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' (e.g. via rules).",
        ("echo", "cuda_graph_config resolved prefill.backend='disabled'", None),
    ),
    (
        "Disable draft prefill CUDA graph because the draft model does not have a 'layers' attribute",
        ("guard", "the draft model does not have a 'layers' attribute", "draft"),
    ),
    (
        "Disable prefill CUDA graph for EAGLE target on tc_piecewise to avoid FP4/MoE decode-replay corruption "
        "(#28386).",
        ("guard", "EAGLE target on tc_piecewise to avoid FP4/MoE decode-replay corruption", None),
    ),
    (
        "Disable prefill CUDA graph capture because no configured capture size fits backend=breakable with "
        "max_capture_tokens=2 (max_capture_requests=1).",
        ("guard", "no configured capture size fits backend=breakable with max_capture_tokens=2", None),
    ),
    (
        "Disable piecewise CUDA graph because --disable-piecewise-cuda-graph is set",
        ("flag", "--disable-piecewise-cuda-graph is set", None),
    ),
    (
        "Disable piecewise CUDA graph because the model is not a language model",
        ("guard", "the model is not a language model", None),
    ),
    (
        "Cuda graph is disabled because of using torch native attention backend",
        ("all_graphs", "using torch native attention backend", None),
    ),
    ("CUDA graph is disabled because --enable-mis is set.", ("all_graphs", "--enable-mis is set", None)),
    (
        "Cuda graph and server warmup are disabled because of using tensor dump mode",
        ("all_graphs", "using tensor dump mode", None),
    ),
]


@pytest.mark.parametrize(
    ("words", "expected"), DISABLES, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_a_line_that_turns_graphs_off_names_its_cause(words: str, expected: tuple[str, str, str | None]) -> None:
    event = one(words)
    assert isinstance(event, DisableLine)
    assert (event.code, event.cause, event.role, event.words) == (*expected, words)


def test_words_that_explain_a_choice_are_kept() -> None:
    event = one("Using tc_piecewise CUDA graph for validated multimodal decoder prefill.")
    assert isinstance(event, Notice) and event.code == "moved_to_tc_piecewise"


def test_post_capture_sizing_in_both_wordings() -> None:
    old = one("Post-capture KV sizing: max_total_num_tokens=700, free memory=2.50 GB")
    new = one("Post-capture KV sizing: full_layer_tokens=700, swa_layer_tokens=560")
    assert isinstance(old, PostCaptureSizing) and (old.tokens, old.free_gib) == (700, 2.5)
    assert isinstance(new, PostCaptureSizing) and (new.tokens, new.swa_tokens) == (700, 560)


# --- bars ---------------------------------------------------------------------------------------------------

BARS = [
    (
        "Capturing num tokens (num_tokens=7680 avail_mem=10.30 GB):   1%|          | 1/58 [00:01<01:13,  1.28s/it]",
        BucketBar(*AT, "prefill", 7680, 10.3, 1, 58, 1.0, 73.0),
    ),
    (
        "Capturing prefill shape (num_tokens=8192, avail_mem=11.78 GB):   0%|          | 0/58 [00:00<?, ?it/s]",
        BucketBar(*AT, "prefill", 8192, 11.78, 0, 58, 0.0, None),
    ),
    ("Capturing prefill shape (num_tokens=2048, avail_mem=1.35 GB)", BucketBar(*AT, "prefill", 2048, 1.35)),
    (
        "Capturing num tokens (num_tokens=8192):   1%|▏ | 1/58 [01:54<1:48:53, 114.62s/it]",
        BucketBar(*AT, "prefill", 8192, None, 1, 58, 114.0, 6533.0),
    ),
    ("Compiling num tokens (num_tokens=20):   0%|          | 0/5", BucketBar(*AT, "compile", 20, None, 0, 5)),
    (
        "Capturing batches (bs=256 avail_mem=10.77 GB):   0%|          | 0/36 [00:00<?]",
        BucketBar(*AT, "decode", 256, 10.77, 0, 36, 0.0),
    ),
    (
        "Capturing batches (avail_mem=10.77 GB): 100%|██████████| 36/36 [00:11<00:00,  3.14it/s]",
        BucketBar(*AT, "decode", None, 10.77, 36, 36, 11.0, 0.0),
    ),
]


@pytest.mark.parametrize(("words", "expected"), BARS, ids=range(len(BARS)))
def test_a_bar_says_which_bucket_and_what_was_free(words: str, expected: BucketBar) -> None:
    assert events(words) == [expected]


def test_bars_without_anything_between_them_and_a_log_line_right_behind() -> None:
    text = (
        "  0%|          | 0/2 [00:00<?, ?it/s]Capturing batches (bs=2 avail_mem=9.29 GB):   0%|  | 0/2 [00:00<?, ?it/s]"
        "Capturing batches (bs=1 avail_mem=9.24 GB): 100%|█| 2/2 [00:01<00:00,  4.70it/s]"
        "[2026-03-04 15:13:15 TP1] Capture cuda graph end. Time elapsed: 1.15 s. mem usage=1.06 GB. avail mem=98.23 GB."
    )
    first, second, end = events(text)
    assert isinstance(first, BucketBar) and isinstance(second, BucketBar)
    assert [(bar.bucket, bar.done) for bar in (first, second)] == [(2, 0), (1, 2)]
    assert end == CaptureEnd(1, Rank(tp=1), "target", "decode", "CUDA", "old", 1.15, 1.06, 98.23)


@pytest.mark.parametrize(("words", "expected"), LINES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_cut_line_has_no_number_that_the_whole_one_has_not(words: str, expected: Event) -> None:
    for end in range(len(words)):
        for event in parse(f"[2026-08-27 00:00:00] {words[:end]}".encode()):
            if type(event) is type(expected):
                numbers = [value for value in _values(event) if isinstance(value, float | int)]
                assert set(numbers) <= {value for value in _values(expected)} | {False, True}, words[:end]


def _values(event: Event) -> list[object]:
    return [getattr(event, name) for name in event.__dataclass_fields__ if name not in ("seconds", "graphs", "ladder")]


def test_limits_that_are_cut_in_their_first_number_are_none() -> None:
    words = "[2026-08-27 00:00:00] max_total_num_tokens=363520, chunked_prefill_size=8192, max_prefill_tokens=16384"
    (found,) = events(words)
    assert isinstance(found, Limits) and found.max_total_num_tokens == 363520
    assert [events(words[:end]) for end in range(30, words.index(","))] == [[]] * (words.index(",") - 30)


# --- prefill batches ----------------------------------------------------------------------------------------


@given(
    st.sampled_from(["Prefill batch, ", "Prefill batch [17], ", "Prefill batch. "]),
    st.lists(
        st.sampled_from(
            [
                *("#new-seq: 2", "#new-token: 700", "#cached-token: 30", "token usage: 0.25", "#running-req: 4"),
                *(
                    "cuda graph: True",
                    "npu graph: False",
                    "cuda graph: Tru",
                    "#pending-token: 0",
                    "full token usage: 1.0",
                ),
            ]
        ),
        unique=True,
        max_size=10,
    ),
)
def test_the_short_way_to_a_prefill_batch_is_the_long_one(head: str, fields: list[str]) -> None:
    for line in (
        head + ", ".join(fields),
        head + ", ".join(("#new-seq: 1", "#new-token: 8", "#cached-token: 0", *fields)),
    ):
        batch = parse_prefill_batch(line)
        found = events("[2026-08-27 00:00:00] " + line)
        if batch is None:
            assert found == []
        else:
            assert found == [PrefillLine(*AT, batch.new_seq, batch.new_token, batch.cached_token, batch.graph)]
