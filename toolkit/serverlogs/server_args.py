"""The arguments a server prints when it starts, as far as they decide about graphs and memory. A bounded reading:
the line is one long `repr`, of which only the wanted names are looked up.
"""

from __future__ import annotations

import re

from toolkit.serverlogs.events import EngineStart, Event, Rank, Value
from toolkit.serverlogs.words import integers

# SGLang's names, old and new builds.
_SGLANG = """
    model_path mem_fraction_static chunked_prefill_size max_prefill_tokens max_total_tokens max_running_requests
    context_length tp_size pp_size dp_size ep_size attn_cp_size dcp_size attention_backend prefill_attention_backend
    decode_attention_backend kv_cache_dtype quantization dtype device page_size enable_dp_attention
    enable_torch_compile enable_lora enable_memory_saver enable_deterministic_inference enable_hierarchical_cache
    cpu_offload_gb disaggregation_mode moe_a2a_backend deepep_mode enable_two_batch_overlap enable_eplb
    speculative_algorithm speculative_num_draft_tokens disable_cuda_graph disable_decode_cuda_graph
    disable_prefill_cuda_graph cuda_graph_backend_prefill cuda_graph_backend_decode cuda_graph_max_bs_prefill
    cuda_graph_max_bs_decode cuda_graph_bs_prefill cuda_graph_bs_decode cuda_graph_max_bs cuda_graph_bs
    disable_piecewise_cuda_graph enable_piecewise_cuda_graph enforce_piecewise_cuda_graph
    piecewise_cuda_graph_max_tokens piecewise_cuda_graph_tokens piecewise_cuda_graph_compiler enable_mis
    language_only encoder_only nnodes dist_init_addr base_gpu_id gpu_id_step
"""
_VLLM = """
    model tensor_parallel_size pipeline_parallel_size data_parallel_size dtype max_seq_len quantization
    kv_cache_dtype enforce_eager enable_prefix_caching enable_chunked_prefill speculative_config
"""
WANTED = {"sglang": tuple(_SGLANG.split()), "vllm": tuple(_VLLM.split())}
_PHASES = ("prefill", "decode")

_ARGUMENTS = "ServerArgs("
_TEXT = re.compile(r"'([^'\\\n]{0,1000})'|\"([^\"\\\n]{0,1000})\"")
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,18}(?:e-?\d{1,3})?)?(?=[,)\]}\s])")
_NAME = re.compile(r"([A-Za-z_][\w.]{0,100})(?=[,)\]}\s])", re.ASCII)
_CONSTANTS: dict[str, Value] = {"True": True, "False": False, "None": None}
_VERSION = re.compile(r"engine \(v([\w.+-]{1,60})\)")
_MOST_CONFIG = 40_000


def sglang_start(message: str, line: int, rank: Rank) -> tuple[Event, ...]:
    """`server_args=ServerArgs(...)`.

    Besides the wanted names, `prefill.backend`, `prefill.max_bs`, `prefill.bs` (and `decode.*`) come from
    `cuda_graph_config`, which is what SGLang 0.5.15 and later resolved its flags to.
    """
    at = message.find(_ARGUMENTS)
    if at < 0:
        return ()
    values = _values(message, WANTED["sglang"], at + len(_ARGUMENTS))
    values.update(_graph_config(message))
    return (EngineStart(line, rank, "sglang", values),)


def vllm_start(message: str, line: int, rank: Rank) -> tuple[Event, ...]:
    """`Initializing a V1 LLM engine (v0.19.0) with config: model='...', ...`."""
    if " LLM engine" not in message or "with config" not in message:
        return ()
    version = _VERSION.search(message[:200])
    return (EngineStart(line, rank, "vllm", _values(message, WANTED["vllm"], 0), version[1] if version else None),)


def _values(text: str, names: tuple[str, ...], start: int) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name in names:
        at = text.find(f"{name}=", start)
        while at > 0 and text[at - 1] not in " (,:":  # the end of a longer name
            at = text.find(f"{name}=", at + 1)
        if at >= 0:
            _keep(found, name, text, at + len(name) + 1)
    return found


def _graph_config(text: str) -> dict[str, Value]:
    found: dict[str, Value] = {}
    start = text.find("cuda_graph_config=")
    if start < 0:
        return found
    config = text[start : start + _MOST_CONFIG]
    for phase in _PHASES:
        at = config.find(f"{phase}=PhaseConfig(")
        if at < 0:
            continue
        end = config.find(")", at)
        body = config[at : end + 1 if end >= 0 else len(config)]
        for name in ("backend", "max_bs", "bs"):
            for mark in (f"({name}=", f" {name}="):
                if (place := body.find(mark)) >= 0:
                    _keep(found, name, body, place + len(mark), f"{phase}.")
                    break
    return found


def _keep(found: dict[str, Value], name: str, text: str, at: int, before: str = "") -> None:
    """Read the value at `at` into `found`, unless it is of a kind that says nothing here or is cut."""
    key, first = before + name, text[at : at + 1]
    if first == "[":
        listed = integers(text[at : at + _MOST_CONFIG], "[")
        if listed and listed[1]:
            found[key] = listed[0]
    elif first == "<":  # <Backend.FULL: 'full'>
        match = _TEXT.search(text, at, at + 120)
        if match:
            found[key] = match[1] or match[2] or ""
    elif match := _TEXT.match(text, at):
        found[key] = match[1] if match[1] is not None else match[2]
    elif match := _NUMBER.match(text, at):
        digits = match[0]
        found[key] = float(digits) if "." in digits else int(digits)
    elif match := _NAME.match(text, at):
        found[key] = _CONSTANTS[match[1]] if match[1] in _CONSTANTS else match[1].rpartition(".")[2].lower()
