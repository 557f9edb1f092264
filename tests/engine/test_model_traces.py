"""Traces of catalogue models of every kind: affine in the token count, without weights, sizes that can be checked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from tiny_models import tiny_config

from toolkit.catalogue import load_config, resolve_model
from toolkit.memory.trace import AffineTraces, AllocationTrace, record_allocations
from toolkit.prefill.attention import ATTENTION_NAME, ForwardContext, forward_context, register_attention
from toolkit.prefill.model_runner import model_geometry, resolve_language_model
from toolkit.weights import meta_model

# Dense with and without QK norm, mixture of experts, MLA with experts, sliding window, sinks and experts.
KINDS = ("smollm2-135m", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", "gemma-3-27b", "gpt-oss-20b")


@cache
def traces(model_id: str) -> AffineTraces:
    register_attention()
    body = resolve_language_model(meta_model(load_config(resolve_model(model_id)), torch.bfloat16, ATTENTION_NAME))
    assert body is not None

    def record(num_tokens: int) -> AllocationTrace:
        ids = torch.zeros((1, num_tokens), dtype=torch.int64, device="meta")
        context = ForwardContext(None, None, ids[0], num_tokens)  # type: ignore[arg-type]
        with torch.no_grad(), forward_context(context):
            return record_allocations(lambda: body(input_ids=ids, position_ids=ids, use_cache=False))

    return AffineTraces(record, 4, 8192)


@pytest.mark.parametrize("model_id", KINDS)
def test_three_recordings_give_every_bucket(model_id: str) -> None:
    family = traces(model_id)
    assert family.is_affine
    assert family.at(1024) == family._record(1024)
    assert len(family.recorded) == 3


@pytest.mark.parametrize("model_id", KINDS)
def test_only_the_last_hidden_state_is_left(model_id: str) -> None:
    width = load_config(resolve_model(model_id)).hidden_size
    assert traces(model_id).at(512).retained == (512 * width * 2,)


@pytest.mark.parametrize("num_tokens", [4096, 8192])
def test_the_live_peak_is_that_of_a_hand_count(num_tokens: int) -> None:
    # Qwen3-8B in the MLP: the layer's input, the residual, the normed and one more of the model's width, then gate,
    # up and one product; cos and sin of one head beside them. All bf16, all in proportion to the tokens.
    values_per_token = 4 * 4096 + 3 * 12288 + 2 * 128
    assert traces("qwen3-8b").at(num_tokens).live_peak_bytes == values_per_token * 2 * num_tokens


def test_a_probe_in_one_thread_does_not_see_a_forward_in_another() -> None:
    """Found when a Lab's forecast ran beside a capture: the layers of both were taken for one model's."""
    small, large = tiny_config("llama"), tiny_config("llama", num_hidden_layers=9, head_dim=32)
    alone = [model_geometry(config) for config in (small, large)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(model_geometry, [small, large] * 20))
    assert together == alone * 20
