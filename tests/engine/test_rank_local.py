"""One rank of a tensor-parallel server: its shapes, its share of the weights, its trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.catalogue import get_model, load_config, resolve_model
from toolkit.errors import InvalidInput
from toolkit.memory.rank_local import rank_local_config
from toolkit.memory.trace import AllocationTrace, record_allocations
from toolkit.prefill.attention import ATTENTION_NAME, ForwardContext, forward_context, register_attention
from toolkit.prefill.model_runner import resolve_language_model
from toolkit.weights import meta_model


def rank_model(model_id: str, tp: int) -> Any:
    register_attention()
    config = rank_local_config(load_config(resolve_model(model_id)), tp)
    return meta_model(config, torch.bfloat16, ATTENTION_NAME)


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def trace(model: Any, num_tokens: int) -> AllocationTrace:
    body = resolve_language_model(model)
    assert body is not None
    ids = torch.zeros((1, num_tokens), dtype=torch.int64, device="meta")
    context = ForwardContext(None, None, ids[0], num_tokens)  # type: ignore[arg-type]
    with torch.no_grad(), forward_context(context):
        return record_allocations(lambda: body(input_ids=ids, position_ids=ids, use_cache=False))


def test_one_rank_is_the_model_itself() -> None:
    config = load_config(resolve_model("qwen3-8b"))
    assert rank_local_config(config, 1).to_dict() == config.to_dict()


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_of_a_dense_model_share_everything_but_the_norms(tp: int) -> None:
    # Llama-3-8B: 65 norms of 4096; every matrix divides evenly, the vocabulary of 128256 included.
    whole, norms = get_model("llama-3-8b").parameters, 65 * 4096
    assert parameters(rank_model("llama-3-8b", tp)) == (whole - norms) // tp + norms


def test_kv_heads_are_repeated_beyond_their_number() -> None:
    heads = [
        (config.num_attention_heads, config.num_key_value_heads)
        for config in (rank_local_config(load_config(resolve_model("qwen3-8b")), tp) for tp in (4, 8, 16, 32))
    ]
    assert heads == [(8, 2), (4, 1), (2, 1), (1, 1)]


def test_kimi_k2_on_eight_ranks_holds_an_eighth_of_its_experts() -> None:
    # 61 layers, the first dense: 60 layers of 384 experts of three 7168 x 2048 matrices.
    experts = 60 * 384 * 3 * 7168 * 2048
    model = rank_model("kimi-k2", 8)
    held = sum(tensor.numel() for name, tensor in model.named_parameters() if ".mlp.experts." in name)
    assert held == experts // 8
    # Attention's down projections, routers and norms are on every rank, so the whole is a little more than an eighth.
    share = parameters(model) / get_model("kimi-k2").parameters
    assert 1 / 8 < share < 1 / 8 + 0.002


@pytest.mark.parametrize("tp", [1, 2, 8, 32])
def test_the_live_peak_of_a_rank_is_that_of_a_hand_count(tp: int) -> None:
    # Qwen3-8B as in test_model_traces: the model's width is whole on every rank, the MLP's is divided, until the
    # attention with its head of 128 and the fp32 copies in the norms weigh more.
    peak = trace(rank_model("qwen3-8b", tp), 4096).live_peak_bytes
    mlp = (4 * 4096 + 3 * 12288 // tp + 2 * 128) * 2 * 4096
    assert peak == mlp if tp <= 2 else peak > mlp


@pytest.mark.parametrize(("model_id", "tp"), [("gpt-oss-20b", 64), ("deepseek-v3", 64), ("gemma-3-27b", 16)])
def test_odd_shares_still_make_a_model_that_runs(model_id: str, tp: int) -> None:
    width = load_config(resolve_model(model_id)).hidden_size
    assert trace(rank_model(model_id, tp), 8).retained == (8 * width * 2,)


@pytest.mark.parametrize(
    ("model_id", "tp", "names"),
    [
        ("smollm2-135m", 2, ["tp 2", "9 attention heads", "--tp 1"]),
        ("qwen3-14b", 16, ["tp 16", "40 attention heads", "--tp 8"]),
        ("qwen3-8b", 0, ["tp 0", "1 to 64"]),
        ("qwen3-8b", 128, ["tp 128"]),
        ("llama-3-8b", 3, ["tp 3"]),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(model_id: str, tp: int, names: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        rank_local_config(load_config(resolve_model(model_id)), tp)
    assert all(name in str(error.value) for name in names)
