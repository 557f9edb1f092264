"""SGLang's body as allocations: against sizes worked out by hand, and against the whole depth of the model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from toolkit.catalogue import get_model, model_ids
from toolkit.errors import InvalidInput
from toolkit.forecast.sglang_body import body_shape, body_tape
from toolkit.memory.allocator import CachingAllocator

MIB = 1 << 20


def _shape(model: str, **settings):
    return body_shape(get_model(model).config, **settings)


# --- by hand ------------------------------------------------------------------------------------------------


def test_fused_live_peak_of_qwen3_8b_at_8192_tokens_is_768_mib() -> None:
    # Qwen3-8B: hidden 4096, intermediate 12288, 2 bytes a value. At the end of the down product are alive:
    residual = hidden = down = 8192 * 4096 * 2
    gate_up, activated = 8192 * 2 * 12288 * 2, 8192 * 12288 * 2
    assert residual + hidden + gate_up + activated + down == 768 * MIB
    tape = body_tape(_shape("qwen3-8b"))
    assert tape.at(8192).live_peak_bytes == 768 * MIB
    assert tape.at(4096).live_peak_bytes == 384 * MIB


def test_live_peak_of_qwen3_30b_a3b_is_that_of_its_experts() -> None:
    # hidden 2048, 128 experts of width 768, 8 a token. At the second product of the experts are alive: residual and
    # hidden, the router's logits, weights, numbers and sorted tokens, the activated rows, the rows of the output.
    rows = 8192 * 8
    bf16 = 2 * 8192 * 2048 * 2 + 8192 * (128 * 2 + 3 * 8 * 4) + rows * 768 * 2 + rows * 2048 * 2
    assert body_tape(_shape("qwen3-30b-a3b")).at(8192).live_peak_bytes == bf16
    # fp8 quantises those rows first: a byte a value, and a 4-byte scale for 128 values.
    fp8 = bf16 + rows * 768 + rows * (768 // 128) * 4
    assert body_tape(_shape("qwen3-30b-a3b", weights="fp8")).at(8192).live_peak_bytes == fp8


def test_live_peak_of_one_rank_of_kimi_k2_with_marlin_experts() -> None:
    # 8 ranks: experts of width 2048 / 8, one shared expert; the first and third output share a buffer of hidden width.
    tokens, hidden = 2048, 7168
    rows = tokens * 8
    router = tokens * (384 * 2 + 3 * 8 * 4)
    streams = 4 * tokens * hidden * 2  # residual, hidden, the shared expert's output, the experts' output
    expected = streams + router + rows * (2048 // 8) * 2 + rows * hidden * 2
    shape = _shape("kimi-k2.7-code", tp=8, weights="int4")
    assert body_tape(shape).at(tokens).live_peak_bytes == expected


def test_the_last_hidden_state_is_all_that_stays() -> None:
    for model in ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v3"):
        shape = _shape(model)
        assert body_tape(shape).at(100).retained == (100 * shape.hidden * 2,)


def test_all_reduces_are_out_of_place_under_torch_compile_alone() -> None:
    plain = body_tape(_shape("qwen3-8b", tp=2)).bytes_per_token
    compiled = body_tape(_shape("qwen3-8b", tp=2, compiled=True)).bytes_per_token
    alone = body_tape(_shape("qwen3-8b", compiled=True)).bytes_per_token
    assert len(compiled) > len(plain) == len(alone)


# --- shapes -------------------------------------------------------------------------------------------------


def test_kinds_of_layers() -> None:
    assert _shape("deepseek-v3").layers == ("dense",) * 3 + ("moe",) * 58  # first_k_dense_replace 3 of 61
    assert set(_shape("qwen3-8b").layers) == {"dense"}
    assert set(_shape("gpt-oss-20b").layers) == {"moe"}
    config = {**get_model("qwen3-30b-a3b").config, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    assert body_shape(config).layers[:4] == ("dense", "dense", "dense", "moe")


def test_a_config_may_be_a_mapping_an_object_or_multimodal() -> None:
    config = get_model("qwen3-8b").config
    expected = body_shape(config)
    assert body_shape(SimpleNamespace(**config)) == expected
    assert body_shape({"text_config": dict(config)}) == expected
    assert body_shape(SimpleNamespace(text_config=SimpleNamespace(**config))) == expected


@pytest.mark.parametrize("model", model_ids())
def test_a_few_layers_tell_the_pool_of_the_whole_depth(model: str) -> None:
    shape = _shape(model, weights=get_model(model).published_weights)
    reserved = []
    for whole in (False, True):
        allocator, sizes = CachingAllocator(), []
        for num_tokens in (4096, 2048, 1000, 256, 4):
            for block in body_tape(shape, whole=whole).at(num_tokens).replay(allocator, "graphs", 1):
                allocator.free(block)
            sizes.append(allocator.reserved_bytes("graphs"))
        reserved.append(sizes)
    assert reserved[0] == reserved[1]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "int7"}, "int7"),
        ({"weights": "fp2"}, "fp2"),
        ({"tp": 0}, "tp 0"),
        ({"tp": 3}, "tp 3"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: dict, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        _shape("qwen3-8b", **settings)


def test_layers_that_do_not_attend_are_refused() -> None:
    config = {**get_model("qwen3-8b").config, "layer_types": ["linear_attention"] * 35 + ["full_attention"]}
    with pytest.raises(InvalidInput, match="linear_attention"):
        body_shape(config)
