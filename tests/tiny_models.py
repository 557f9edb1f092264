"""Tiny models of every attention kind, and runners around them on the accounted CPU device.

Weights are random but lively: at the usual standard deviation of 0.02 attention is nearly uniform, and a wrong
mask, scale or sink would hardly show in the output.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.prefill.attention import register_attention
from toolkit.prefill.batch import PackedBatch, Request, StaticBuffers, pack
from toolkit.prefill.devices.cpu import CpuDevice
from toolkit.prefill.kv_pool import KVPool
from toolkit.prefill.model_runner import ModelRunner, model_geometry
from toolkit.prefill.runners import EagerRunner, PrefillCudaGraphRunner
from toolkit.prefill.setup import GraphCapture, capture_prefill_graph

MIB, GIB = 1 << 20, 1 << 30
VOCABULARY = 97
_SHARED: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    # The defaults of some classes name tokens this vocabulary does not have.
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 7, "query_pre_attn_scalar": 8},
    "gemma2": {
        **{"sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_MOE, "decoder_sparse_step": 1},
    "deepseek_v3": {
        **{"num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 16},
        **{"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        "first_k_dense_replace": 1,
    },
}
"""Sliding windows of 7 tokens are shorter than the requests of the tests, so that they matter."""


def tiny_config(model_type: str = "llama", **changes: Any) -> Any:
    """The config of a tiny model; `changes` win."""
    from transformers import AutoConfig

    values = {**_SHARED, **TINY[model_type], **changes}
    if model_type == "deepseek_v3":
        values.pop("head_dim")  # not its own to choose
    return AutoConfig.for_model(model_type, **copy.deepcopy(values))


def make_model(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A causal LM with lively random weights, the same for the same seed whatever `options` say of attention."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **options)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                enliven(parameter)
    return model.to(dtype).eval().requires_grad_(False)


def enliven(parameter: torch.Tensor) -> None:
    """Matrices that keep the variance of what passes through them, vectors off their initial value."""
    if parameter.dim() < 2:
        parameter.add_(torch.randn_like(parameter) * 0.2)
    else:
        parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)


def save_model(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    """A folder with config and safetensors, and no tokenizer, as `execute` takes it."""
    make_model(tiny_config(model_type, **changes)).save_pretrained(folder)
    return folder


def make_runner(
    model: Any,
    *,
    device: CpuDevice | None = None,
    backend: str = "breakable",
    buckets: Sequence[int] = (4, 8, 16, 32),
    kv_tokens: int = 400,
    **fields: Any,
) -> ModelRunner:
    """What `build_model_runner` makes of settings, from a model at hand."""
    device = device or CpuDevice(GIB)
    dtype = next(model.parameters()).dtype
    device.adopt([*model.parameters(), *model.buffers()])
    layers = model_geometry(model.config)
    pool = KVPool(device, layers, kv_tokens, dtype)
    buffers = StaticBuffers(device, layers, max(buckets, default=1), model.config.hidden_size, dtype)
    defaults = {"context_length": model.config.max_position_embeddings, "request_slots": 4, "max_context": 64}
    runner = ModelRunner(device, model, pool, buffers, tuple(buckets), backend, **{**defaults, **fields})
    if backend == "full":
        _ = runner.static_attention  # charged before the capture
    return runner


def tiny_runner(model_type: str = "llama", *, dtype: torch.dtype = torch.float32, **options: Any) -> ModelRunner:
    """A runner around a tiny model that attends through the toolkit."""
    return make_runner(make_model(tiny_config(model_type), dtype, attn_implementation=register_attention()), **options)


def capture(
    runner: ModelRunner, events: list[dict[str, Any]] | None = None, cancelled: Callable[[], bool] | None = None
) -> GraphCapture:
    """`capture_prefill_graph` with a fresh eager runner; events are appended to `events`."""
    sink = events.append if events is not None else None
    eager = EagerRunner(runner)
    return capture_prefill_graph(model_runner=runner, eager_runner=eager, on_event=sink, cancelled=cancelled)


def captured(runner: ModelRunner) -> PrefillCudaGraphRunner:
    """The graph runner of a capture that succeeds."""
    result = capture(runner)
    assert isinstance(result.runner, PrefillCudaGraphRunner), result.reason
    return result.runner


def random_tokens(count: int, generator: random.Random, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    """`count` token ids, none of them the special ones."""
    return tuple(generator.randrange(3, vocabulary) for _ in range(count))


def batch_of(runner: ModelRunner, *lengths: int, seed: int = 0) -> PackedBatch:
    """A packed batch of random requests of these lengths, without prefixes."""
    generator = random.Random(seed)
    return pack([Request(random_tokens(length, generator)) for length in lengths], runner.kv_pool)


def release(runner: ModelRunner, batch: PackedBatch) -> None:
    """Give all slots of a batch back."""
    runner.kv_pool.release([slot for span in batch.spans for slot in span.slots])
