"""Models in memory: random weights, folders of safetensors, GGUF files."""

from __future__ import annotations

import copy
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit import weights
from toolkit.catalogue import load_config, resolve_model
from toolkit.errors import ModelUnavailable
from toolkit.weights import load_model, meta_model, random_model, resolve_weights

CPU = torch.device("cpu")
TINY: dict[str, dict[str, Any]] = {
    "llama": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 261},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"tie_word_embeddings": True, "rope_theta": 500000.0},
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3_moe": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    },
    "gemma3_text": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "deepseek_v3": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32},
        **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 512},
        **{"moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2},
        **{"num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0},
            **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
        },
    },
    "gpt_oss": {
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    },
}
TOKENS = torch.arange(100).view(1, -1)


def _config(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **copy.deepcopy({**TINY[model_type], **changes}))


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits


# --- random weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", sorted(TINY))
def test_random_weights_are_a_model_like_any_other(model_type: str, dtype: torch.dtype) -> None:
    model = random_model(_config(model_type), dtype, CPU)
    ordinary = AutoModelForCausalLM.from_config(_config(model_type), dtype=dtype).eval()

    # Rotary tables and the other buffers are what an ordinary build has, to the bit and in its dtype.
    buffers, expected = dict(model.named_buffers()), dict(ordinary.named_buffers())
    assert buffers.keys() == expected.keys() and any("inv_freq" in name for name in buffers)
    for name, buffer in expected.items():
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name
    # Norms too: one, or zero where the architecture adds one.
    for name, parameter in ordinary.named_parameters():
        assert model.get_parameter(name).dtype == parameter.dtype
        if "norm" in name:
            assert torch.equal(model.get_parameter(name), parameter), name

    ordinary.load_state_dict(model.state_dict())
    assert torch.equal(_logits(model), _logits(ordinary))
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_random_weights_are_deterministic(model_type: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (random_model(_config(model_type), torch.float32, CPU, seed=s) for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's random numbers are touched
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not torch.equal(_logits(first), _logits(other))


def test_random_matrices_have_the_stated_spread_and_biases_are_zero() -> None:
    model = random_model(_config("gpt_oss"), torch.float32, CPU)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif tensor.dim() > 1:
            assert tensor.std().item() == pytest.approx(0.02, rel=0.1), name


def test_tied_weights_stay_one_tensor() -> None:
    model: Any = random_model(_config("llama"), torch.float32, CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied: Any = random_model(_config("llama", tie_word_embeddings=False), torch.float32, CPU)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_mixture_of_experts_uses_grouped_mm_on_the_cpu_and_agrees_with_the_loop(model_type: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = random_model(_config(model_type), dtype, CPU)
        assert model.config._experts_implementation == "grouped_mm"
        grouped = _logits(model)
        model.set_experts_implementation("eager")
        difference = (_logits(model) - grouped).abs().float()
        if dtype == torch.float32:
            assert difference.max() < 1e-5
        else:  # rounding may send a token or two to another expert; all the others agree
            assert (difference.amax(-1) > 0.02).sum() <= 3


def test_building_leaves_the_config_alone_and_ignores_its_quantization() -> None:
    config = _config("llama")
    config.quantization_config = {"quant_method": "fp8"}
    before = config.to_dict()
    random_model(config, torch.float32, CPU)
    assert meta_model(config, torch.bfloat16).device.type == "meta"
    assert config.to_dict() == before


def test_an_architecture_that_forgets_a_buffer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ModelUnavailable, match="does not initialise"):
        random_model(_config("llama"), torch.float32, CPU)


def test_random_weights_that_do_not_fit_are_refused_before_anything_is_allocated() -> None:
    source = resolve_model("deepseek-v3")  # in bf16
    begin = time.monotonic()
    with pytest.raises(ModelUnavailable) as caught:
        load_model(source, weights="random", dtype=torch.bfloat16, device=CPU)
    # 1249.88 GiB, or 1250.08 where Transformers keeps the routers in fp32.
    assert re.search(r"'deepseek-v3' take 12(49|50)\.\d\d GiB; main memory has \d", str(caught.value))
    assert time.monotonic() - begin < 10


def test_a_catalogue_model_without_weights_here_is_random() -> None:
    source = resolve_model("qwen3-0.6b")
    assert resolve_weights(source) == "random"
    config = load_config(source)
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1]
    model = random_model(config, torch.bfloat16, CPU, "eager")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"


@pytest.mark.gpu
def test_random_weights_on_a_gpu_are_made_there_once() -> None:
    device = torch.device("cuda", 0)
    config = load_config(resolve_model("qwen3-0.6b"))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    begin = time.monotonic()
    model = random_model(config, torch.bfloat16, device)
    torch.cuda.synchronize(device)
    assert time.monotonic() - begin < 20
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    # One parameter's worth on top would already be too much; allocator rounding is not.
    assert torch.cuda.max_memory_allocated(device) - before < 1.05 * size
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device}
    assert torch.isfinite(_logits(model)).all()
    again = random_model(config, torch.bfloat16, device)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


# --- folders ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], tuple[Path, Any]]:
    def save(model_type: str) -> tuple[Path, Any]:
        model = random_model(_config(model_type), torch.float32, CPU)
        model.save_pretrained(tmp_path / "saved")
        return tmp_path / "saved", model

    return save


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_a_folder_of_safetensors(model_type: str, saved: Callable[[str], tuple[Path, Any]]) -> None:
    folder, model = saved(model_type)
    source = resolve_model(str(folder))
    assert resolve_weights(source) == "real"
    loaded = load_model(source, dtype=torch.float32, device=CPU)
    assert loaded.weights == "real" and loaded.tokenizer is None
    assert torch.equal(_logits(loaded.model), _logits(model))
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert load_model(source, dtype=torch.bfloat16, device=CPU).model.dtype == torch.bfloat16


def test_a_folder_without_weights_is_random(saved: Callable[[str], tuple[Path, Any]]) -> None:
    folder, _ = saved("llama")
    (folder / "model.safetensors").unlink()
    source = resolve_model(str(folder))
    assert load_model(source, dtype=torch.float32, device=CPU).weights == "random"
    with pytest.raises(ModelUnavailable, match=r"'saved' has no weights.*--weights random"):
        load_model(source, weights="real", dtype=torch.float32, device=CPU)
    config = resolve_model(str(folder / "config.json"))
    assert load_model(config, dtype=torch.float32, device=CPU).weights == "random"
    with pytest.raises(ModelUnavailable, match="a config without weights"):
        load_model(config, weights="real", dtype=torch.float32, device=CPU)


def test_no_pickle_is_loaded(saved: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    folder, model = saved("llama")
    (folder / "model.safetensors").unlink()
    touched = tmp_path / "a pickle was run"

    class Trap:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(touched),)

    torch.save({**model.state_dict(), "trap": Trap()}, folder / "pytorch_model.bin")
    source = resolve_model(str(folder))
    assert resolve_weights(source) == "real"  # never a silent swap to random weights
    with pytest.raises(ModelUnavailable, match=r"has only pytorch_model\.bin; no pickle is loaded"):
        load_model(source, dtype=torch.float32, device=CPU)
    assert not touched.exists()
    assert load_model(source, weights="random", dtype=torch.float32, device=CPU).weights == "random"


def _drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _name_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _other_widths(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_drop_a_tensor, r"lack 1 of its tensors, model\.norm\.weight"),
        (_cut_short, "cannot be loaded: SafetensorError"),
        (_name_a_missing_shard, "lacks a file that its index names"),
        (_other_widths, "cannot be loaded"),
    ],
)
def test_weights_that_do_not_match_are_refused_on_one_line(
    saved: Callable[[str], tuple[Path, Any]], damage: Callable[[Path], None], says: str
) -> None:
    folder, _ = saved("llama")
    damage(folder)
    with pytest.raises(ModelUnavailable, match=says) as caught:
        load_model(resolve_model(str(folder)), dtype=torch.float32, device=CPU)
    assert "\n" not in str(caught.value)


def test_real_weights_that_do_not_fit_are_refused(
    saved: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved("llama")
    monkeypatch.setattr(weights, "available_ram_bytes", lambda: 1000)
    with pytest.raises(ModelUnavailable, match=r"main memory has 0\.00 GiB free"):
        load_model(resolve_model(str(folder)), dtype=torch.float32, device=CPU)


# --- GGUF ---------------------------------------------------------------------------------------------------


def _write_gguf(path: Path, model: Any, leave_out: str = "") -> None:
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["ab", "abc", "<e>", "<s>", "</s>", *bytes_to_unicode().values()])
    writer.add_token_types([1, 1, 3, 3, 3] + [1] * 256)
    writer.add_token_merges(["a b", "ab c"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, tensor in model.state_dict().items():
        name, _, suffix = key.rpartition(".")
        if key in ("lm_head.weight", leave_out):
            continue
        array = tensor.numpy()
        if count := heads.get(name.rpartition(".")[2]):
            # llama.cpp's order of rotary pairs.
            pairs = array.reshape(count, 2, -1, array.shape[1])
            array = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
        writer.add_tensor(f"{names.get_name(name)}.{suffix}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file(tmp_path: Path) -> None:
    plain = {"rope_scaling": None, "rope_theta": 10000.0}
    model: Any = random_model(_config("llama", **plain), torch.float32, CPU)
    _write_gguf(tmp_path / "tiny.gguf", model)
    source = resolve_model(str(tmp_path / "tiny.gguf"))
    assert resolve_weights(source) == "real"
    loaded: Any = load_model(source, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(_logits(loaded.model), _logits(model), atol=1e-5, rtol=1e-5)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.tokenizer("abc").input_ids == [1] and loaded.weights == "real"
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert load_model(source, weights="random", dtype=torch.bfloat16, device=CPU).weights == "random"

    _write_gguf(tmp_path / "short.gguf", model, leave_out="model.norm.weight")
    with pytest.raises(ModelUnavailable, match=r"the file lacks model\.norm\.weight"):
        load_model(resolve_model(str(tmp_path / "short.gguf")), dtype=torch.float32, device=CPU)
