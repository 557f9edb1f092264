"""Parameters counted from configs: against published counts, checkpoint sizes and servers' own log lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from toolkit.catalogue import get_model, model_ids
from toolkit.errors import InvalidInput
from toolkit.forecast.model_facts import model_facts
from toolkit.memory.parameters import is_counted, rank_parameters, stored_gib

GIB = 1 << 30


@pytest.mark.parametrize("model_id", model_ids())
def test_the_config_alone_gives_the_number_of_parameters(model_id: str) -> None:
    entry = get_model(model_id)
    config = SimpleNamespace(**entry.config)
    assert is_counted(config)
    assert sum(parameter.elements for parameter in rank_parameters(config)) == entry.parameters


@pytest.mark.parametrize(
    ("model_id", "payload"),
    # Bytes of all tensors: the index files' total_size, for Kimi K2 an audit of the checkpoint's headers.
    [
        ("qwen3-8b", 16_381_470_720),
        ("gpt-oss-20b", 13_761_264_768),
        ("gpt-oss-120b", 65_248_815_744),
        ("kimi-k2-instruct", 1_029_173_256_720),
    ],
)
def test_bits_per_weight_give_the_size_of_the_checkpoint(model_id: str, payload: int) -> None:
    entry = get_model(model_id)
    stored = stored_gib(rank_parameters(SimpleNamespace(**entry.config)), entry.stored_bits) * GIB
    assert stored == pytest.approx(payload, rel=1e-6)


@pytest.mark.parametrize(
    ("model_id", "tp", "weights", "logged_gib", "within"),
    # `Load weight end. ... mem usage=`: SGLang on H100 (2026-08-27), on a B200 (2026-04-27), and eight ranks of
    # Kimi-K2.5 in int4 on MI355X (2026-02-26), whose kernels pad experts.
    [
        ("qwen3-30b-a3b", 1, "fp8", 29.15, 0.005),
        ("qwen3-8b", 1, None, 15.28, 0.005),
        ("kimi-k2.7-code", 8, None, 73.58, 0.03),
    ],
)
def test_weights_are_what_servers_log(
    model_id: str, tp: int, weights: str | None, logged_gib: float, within: float
) -> None:
    assert model_facts(model_id).weights_gib(tp, weights) == pytest.approx(logged_gib, rel=within)


def test_ranks_divide_widths_and_repeat_the_rest() -> None:
    config = SimpleNamespace(**get_model("qwen3-8b").config)
    whole = {one.name.rpartition("layers.0.")[2]: one.elements for one in rank_parameters(config)}
    rank = {one.name.rpartition("layers.0.")[2]: one.elements for one in rank_parameters(config, 16)}
    assert whole["self_attn.q_proj.weight"] == 16 * rank["self_attn.q_proj.weight"]
    assert whole["mlp.down_proj.weight"] == 16 * rank["mlp.down_proj.weight"]
    assert whole["self_attn.k_proj.weight"] == 8 * rank["self_attn.k_proj.weight"], "8 KV heads on 16 ranks"
    assert whole["input_layernorm.weight"] == rank["input_layernorm.weight"]


def test_fewer_bits_never_touch_what_stays_16_bit() -> None:
    model = model_facts("qwen3-8b")
    embeddings = 2 * 151936 * 4096 * 2 / GIB
    matrices = model.weights_gib(1, "bf16") - embeddings
    assert model.weights_gib(1, "fp8") == pytest.approx(embeddings + matrices / 2, rel=2e-3)
    assert model.weights_gib(1, "int4") == pytest.approx(embeddings + matrices * 4.5 / 16, rel=2e-3)


def test_tp_that_does_not_divide_the_heads() -> None:
    with pytest.raises(InvalidInput, match="tp 3 does not divide"):
        rank_parameters(SimpleNamespace(**get_model("qwen3-8b").config), 3)
