"""SGLang's lines, 0.5.5 to 0.5.23: literal beginning -> what the rest of the line says.

Wording as printed by the public releases; see `prefixes` for what may stand before it. A rule returns nothing when
the line begins like its own and goes on otherwise: such a line counts as unknown.
"""

from __future__ import annotations

import re

from toolkit.serverlogs import failures
from toolkit.serverlogs.events import (
    CaptureBegin,
    CaptureEnd,
    CaptureSizes,
    Compiling,
    DisableLine,
    EngineTimings,
    Event,
    GateLine,
    InitBegin,
    InitDistributed,
    KvPool,
    Limits,
    MambaPool,
    MemoryBaseline,
    MemoryPoolEnd,
    Notice,
    PostCaptureSizing,
    PrefillLine,
    Rank,
    ServerReady,
    WeightsBegin,
    WeightsEnd,
)
from toolkit.serverlogs.failures import Parser
from toolkit.serverlogs.prefill_batches import parse_prefill_batch
from toolkit.serverlogs.server_args import sglang_start
from toolkit.serverlogs.words import integers, number, whole, word

_MOST_WORDS = 500
Events = tuple[Event, ...]


# --- memory -------------------------------------------------------------------------------------------------


def _init_begin(text: str, line: int, rank: Rank) -> Events:
    return (InitBegin(line, rank),)


def _init_end(text: str, line: int, rank: Rank) -> Events:
    return (InitDistributed(line, rank, number(text, "elapsed=", "s"), number(text, "mem usage=")),)


def _baseline(text: str, line: int, rank: Rank) -> Events:
    return (MemoryBaseline(line, rank, number(text, "mem usage="), number(text, "avail mem=")),)


def _weights_begin(text: str, line: int, rank: Rank) -> Events:
    return (WeightsBegin(line, rank, number(text, "avail mem=")),)


def _weights_end(text: str, line: int, rank: Rank) -> Events:
    return (
        WeightsEnd(
            line,
            rank,
            free_gib=number(text, "avail mem="),
            usage_gib=number(text, "mem usage="),
            elapsed_s=number(text, "elapsed=", "s"),
            model_type=word(text, "type="),
            dtype=word(text, ", dtype="),
            quant=word(text, ", quant="),
            quant_format=word(text, ", fmt="),
        ),
    )


def _kv_pool(text: str, line: int, rank: Rank) -> Events:
    return (
        KvPool(
            line,
            rank,
            tokens=whole(text, "#tokens:"),
            k_gib=number(text, " K size:"),
            v_gib=number(text, " V size:"),
            kv_gib=number(text, " KV size:"),
            dtype=word(text, "dtype: "),
            free_gib=number(text, "avail mem="),
            upper_bound="VA upper bound" in text,
            after_capture=text.startswith("KV cache allocated"),
        ),
    )


def _mamba_pool(text: str, line: int, rank: Rank) -> Events:
    return (
        MambaPool(
            line,
            rank,
            slots=whole(text, "max_mamba_cache_size:"),
            conv_gib=number(text, " conv_state size:"),
            ssm_gib=number(text, " ssm_state size:"),
            intermediate_ssm_gib=number(text, "intermediate_ssm_state_cache size:"),
            intermediate_conv_gib=number(text, "intermediate_conv_window_cache size:"),
        ),
    )


def _pool_end(text: str, line: int, rank: Rank) -> Events:
    return (MemoryPoolEnd(line, rank, number(text, "avail mem=")),)


def _limits(text: str, line: int, rank: Rank) -> Events:
    tokens = whole(text, "max_total_num_tokens=")
    if tokens is None:
        return ()  # cut inside its first number: where the log ends, no word that the server came up
    return (
        Limits(
            line,
            rank,
            tokens,
            whole(text, "chunked_prefill_size="),
            whole(text, "max_prefill_tokens="),
            whole(text, "max_running_requests="),
            whole(text, "context_len="),
            number(text, "available_gpu_mem="),
        ),
    )


# Always two decimals: with fewer the line is cut.
_TIMING = re.compile(r"(?<!\w)([a-z_0-9]{1,40})=(\d{1,9}\.\d\d)(?![\d.])", re.ASCII)


def _timings(text: str, line: int, rank: Rank) -> Events:
    engine, _, rest = text.partition("cuda_graph={")
    inside, _, after = rest.partition("}")
    graphs = {name: float(value) for name, value in _TIMING.findall(inside)}
    seconds = {name: float(value) for name, value in _TIMING.findall(f"{engine} {after}")}
    return (EngineTimings(line, rank, seconds, graphs),)


def _post_capture(text: str, line: int, rank: Rank) -> Events:
    tokens = whole(text, "full_layer_tokens=")
    return (
        PostCaptureSizing(
            line,
            rank,
            text[:_MOST_WORDS],
            tokens if tokens is not None else whole(text, "max_total_num_tokens="),
            whole(text, "swa_layer_tokens=", ""),
            number(text, "free memory="),
        ),
    )


# --- captures -----------------------------------------------------------------------------------------------

_CAPTURE = re.compile(
    r"Capture (?:(target|draft) )?(?:(prefill|decode|verify|extend|piecewise) )?([A-Za-z]{2,8}) graph "
    r"(begin|end|bs|num tokens|failed)(?!\w)"
)
_OLD_WORDS = ("This can take up", "Time elapsed")


def _capture(text: str, line: int, rank: Rank) -> Events:
    match = _CAPTURE.match(text)
    if match is None:
        return ()
    role, named, graph, what = match[1] or "target", match[2], match[3].upper(), match[4]
    phase = {None: "decode", "piecewise": "prefill"}.get(named, named or "")
    if what == "failed":
        return failures.graph_failed(text, line, rank)
    if what in ("bs", "num tokens"):
        listed = integers(text, f"graph {what} [")
        return (CaptureSizes(line, rank, "decode" if what == "bs" else "prefill", *listed),) if listed else ()
    old = named in (None, "piecewise") or any(words in text for words in _OLD_WORDS)
    wording = "old" if old else "new"
    listed = integers(text, "num_tokens=[" if phase == "prefill" else "bs=[")
    ladder = listed[0] if listed and listed[1] else None
    if what == "begin":
        per_request = whole(text, "num_tokens_per_req=")
        per_request = per_request if per_request is not None else whole(text, "num_tokens_per_bs=")
        backend = word(text + " ", "backend=") if text[-1:].isalpha() else word(text, "backend=")
        free = number(text, "avail mem=")
        return (CaptureBegin(line, rank, role, phase, graph, wording, backend, ladder, per_request, free),)
    elapsed = number(text, "elapsed: " if "elapsed: " in text else "elapsed=", "s")
    usage, free = number(text, "mem usage="), number(text, "avail mem=")
    return (CaptureEnd(line, rank, role, phase, graph, wording, elapsed, usage, free, ladder),)


_TAKES = re.compile(r"(?:takes|took) (\d{1,9}(?:\.\d{1,6})?) ?s")


def _compiling(text: str, line: int, rank: Rank) -> Events:
    took = _TAKES.search(text[:_MOST_WORDS])
    return (Compiling(line, rank, text[:_MOST_WORDS], float(took[1]) if took else None),)


# --- who decided --------------------------------------------------------------------------------------------

_BECAUSE = (" because of ", " because ", " for ")


def _cause(text: str) -> str:
    """What stands after the first `because`, without its example and its full stop."""
    starts = [(at, len(mark)) for mark in _BECAUSE if (at := text.find(mark)) >= 0]
    at, length = min(starts, key=lambda found: (found[0], -found[1])) if starts else (0, 0)
    return text[at + length : at + length + _MOST_WORDS].partition(" (")[0].rstrip(". ")


def _disabled(code: str, text: str, line: int, rank: Rank, cause: str, role: str | None = None) -> Events:
    return (DisableLine(line, rank, code, text[:_MOST_WORDS], cause, role),)


def _breakable(text: str, line: int, rank: Rank) -> Events:
    start = "Breakable CUDA graph is incompatible with "
    if text.startswith(start):
        return _disabled("breakable_rule", text, line, rank, text[len(start) :].partition(";")[0].rstrip(". "))
    if "not enabled for this prefill CP configuration" in text:
        return _disabled("breakable_rule", text, line, rank, "prefill context parallel configuration")
    return ()


def _disabling(text: str, line: int, rank: Rank) -> Events:
    if text.startswith("Disabling auto-selected prefill CUDA graph"):
        free, limit = number(text, "only "), number(text, "at least ")
        return (GateLine(line, rank, free, limit),)
    if text.startswith("Disabling breakable prefill CUDA graph by default for pipeline parallelism"):
        return _disabled("pipeline_parallel", text, line, rank, "pipeline parallelism")
    if text.startswith("Disabling prefill CUDA graph (") and "trtllm_mla" in text:
        return _disabled("trtllm_mla", text, line, rank, "DeepSeek-V3 on trtllm_mla attention")
    if text.startswith(("Disabling prefill CUDA graph", "Disabling piecewise CUDA graph")):
        return _disabled("guard", text, line, rank, _cause(text))
    return ()


_DISABLE = re.compile(
    r"Disable (?:(target|draft) )?(?:prefill|piecewise) (?:CUDA|cuda) graph (?:capture )?(?:because|for) "
)
_ECHO = "cuda_graph_config "


def _disable(text: str, line: int, rank: Rank) -> Events:
    match = _DISABLE.match(text)
    if match is None:
        return ()
    cause = _cause(text)
    if _ECHO.startswith(cause):
        return ()  # cut before it says which it is
    code = "echo" if cause.startswith(_ECHO) else "flag" if cause.startswith("-") else "guard"
    return _disabled(code, text, line, rank, cause, match[1])


def _all_off(text: str, line: int, rank: Rank) -> Events:
    return _disabled("all_graphs", text, line, rank, _cause(text))


def _notice(code: str) -> Parser:
    def parse(text: str, line: int, rank: Rank) -> Events:
        return (Notice(line, rank, code, text[:_MOST_WORDS]),)

    return parse


_POST_CAPTURE = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING="


def _post_capture_asked(text: str, line: int, rank: Rank) -> Events:
    value = text[text.find(_POST_CAPTURE) + len(_POST_CAPTURE) :][:5].strip("'\" \t").lower()
    asked = value.startswith(("1", "true", "yes"))
    return (Notice(line, rank, "post_capture_asked", text[:_MOST_WORDS]),) if asked else ()


# --- serving ------------------------------------------------------------------------------------------------


def _ready(text: str, line: int, rank: Rank) -> Events:
    return (ServerReady(line, rank),)


# The start that nearly all such lines share: a shorter way to the same numbers as `parse_prefill_batch`.
_USUAL_BATCH = re.compile(
    r"Prefill batch, #new-seq: (\d{1,18}), #new-token: (\d{1,18}), #cached-token: (\d{1,18}), ", re.ASCII
)
_GRAPH, _REPLAYED = " graph: ", {"True": True, "False": False}


def _prefill_batch(text: str, line: int, rank: Rank) -> Events:
    usual = _USUAL_BATCH.match(text)
    if usual is not None:
        seq, tokens, cached = usual.groups()
        at = text.find(_GRAPH, usual.end()) + len(_GRAPH)
        replayed = _REPLAYED.get(text[at : at + 5].rstrip(",. ")) if at >= len(_GRAPH) else None
        return (PrefillLine(line, rank, int(seq), int(tokens), int(cached), replayed),)
    batch = parse_prefill_batch(text)
    return (PrefillLine(line, rank, batch.new_seq, batch.new_token, batch.cached_token, batch.graph),) if batch else ()


RULES: tuple[tuple[str, Parser], ...] = (
    ("server_args=", sglang_start),
    ("Init torch distributed begin", _init_begin),
    ("Init parallel begin", _init_begin),
    ("Init torch distributed ends", _init_end),
    ("Init parallel ends", _init_end),
    ("Memory baseline taken", _baseline),
    ("Load weight begin", _weights_begin),
    ("Load weight end", _weights_end),
    ("KV Cache is allocated", _kv_pool),
    ("KV cache allocated", _kv_pool),
    ("Mamba Cache is allocated", _mamba_pool),
    ("Memory pool end", _pool_end),
    ("Capture ", _capture),
    ("Compiling a graph", _compiling),
    ("Entering DeepGEMM JIT", _compiling),
    ("Try DeepGEMM JIT", _compiling),
    ("DeepGEMM JIT code", _compiling),
    ("DeepGEMM warmup", _compiling),
    ("FlashInfer autotune", _compiling),
    ("Running FlashInfer autotune", _compiling),
    ("Triton kernel ", _compiling),
    ("Breakable CUDA graph is", _breakable),
    ("Disabling ", _disabling),
    ("Disable ", _disable),
    ("Cuda graph is disabled because", _all_off),
    ("CUDA graph is disabled because", _all_off),
    ("Cuda graph and server warmup are disabled", _all_off),
    ("Using tc_piecewise CUDA graph", _notice("moved_to_tc_piecewise")),
    ("cuda_graph_config[prefill].backend='full' is experimental", _notice("full_is_experimental")),
    # Its parts have lines of their own, so this total is no pool.
    ("SWAKVPool mem usage", _notice("swa_pool_total")),
    ("max_total_num_tokens=", _limits),
    ("Engine startup timings", _timings),
    ("Post-capture KV sizing", _post_capture),
    *((f"{before}{_POST_CAPTURE}", _post_capture_asked) for before in ("", "export ", "+ export ", "environment: ")),
    ("Prefill batch", _prefill_batch),
    ("The server is fired up", _ready),
)
# Known, frequent, and of no use here.
IGNORED = (
    *("Decode batch", "Registering ", "Loading safetensors", "Multi-thread loading", "install_torch_compiled"),
    *("HTTP Request:", "Tuning ", "Tree cache initialized", "Using KV cache dtype"),
    'File "',  # of a traceback
)
