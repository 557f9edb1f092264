"""The model catalogue: its facts against outside sources, and what every kind of model name resolves to."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import catalogue, resources
from toolkit.catalogue import ModelEntry, get_model, load_config, model_ids, resolve_model, search_models
from toolkit.errors import InvalidInput, ModelUnavailable, PrefillLabError

# Parameter counts from outside this project: the hub's safetensors totals, as quoted in many public
# repositories; where the published file holds more than the text decoder, the source is named.
COUNTS = {
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,  # tied head once; the file stores it twice: 751,632,384
    "qwen3-1.7b": 1_720_574_976,  # likewise: 2,031,739,904
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "gemma-3-27b": 27_009_346_304,  # llama.cpp's n_params of the text model
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_419_200,  # main model, router correction biases included, no MTP layer
    "kimi-k2-instruct": 1_026_408_232_448,  # audit of the checkpoint's headers
    "kimi-k2.7-code": 1_026_408_232_448,  # the same text decoder; with the vision parts 1,026,879,376,368
}
# Bytes of all tensors of published checkpoints: their index files' total_size; for Kimi K2 the payload that
# an audit of the headers added up. K2 Thinking stands for K2.7 Code: the same int4 format, no vision parts.
BYTES = {
    "qwen3-8b": 16_381_470_720,
    "llama-3.1-8b": 16_060_522_496,
    "gpt-oss-20b": 13_761_264_768,
    "gpt-oss-120b": 65_248_815_744,
    "kimi-k2-instruct": 1_029_173_256_720,
    "kimi-k2.7-code": 594_205_920_512,
}


def _meta_tensors(entry: ModelEntry) -> dict[str, int]:
    """Elements of each parameter, tied ones once, and of each router correction bias, which is a buffer."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(resolve_model(entry.id))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert type(model).__name__ == entry.architecture
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
    return sizes | {n: t.numel() for n, t in model.named_buffers() if n.endswith("e_score_correction_bias")}


# --- facts --------------------------------------------------------------------------------------------------


def test_the_catalogue_has_exactly_the_models_checked_here() -> None:
    assert model_ids() == sorted(COUNTS)


@pytest.mark.parametrize("model_id", sorted(COUNTS))
def test_parameter_counts_agree_with_outside_sources(model_id: str) -> None:
    entry = get_model(model_id)
    assert entry.parameters == COUNTS[model_id]
    sizes = _meta_tensors(entry)
    assert sum(sizes.values()) == COUNTS[model_id]
    if model_id in BYTES:
        stored = sum(entry.stored_bits(name) * size for name, size in sizes.items()) / 8
        # Exact but for the fp32 scales of partly filled blocks and for biases kept in fp32.
        assert stored == pytest.approx(BYTES[model_id], rel=3e-6)


def test_entries_say_where_they_come_from() -> None:
    for model_id in model_ids():
        entry = get_model(model_id)
        assert entry.source == f"https://huggingface.co/{entry.hub_id}/blob/main/config.json"
        assert entry.license and entry.checked and entry.parameters_note
        assert (entry.quantization is None) == (entry.published_weights == "bf16")


def test_geometry_that_the_story_depends_on() -> None:
    kimi, deepseek = get_model("kimi-k2.7-code"), get_model("deepseek-v3")
    assert kimi.published_architecture == "KimiK25ForConditionalGeneration"
    same = ("kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers", "hidden_size", "moe_intermediate_size")
    assert [kimi.config[key] for key in same] == [deepseek.config[key] for key in same]
    assert (kimi.config["num_attention_heads"], kimi.config["n_routed_experts"]) == (64, 384)
    qwen = load_config(resolve_model("qwen3-8b"))
    assert (qwen.num_hidden_layers, qwen.num_key_value_heads, qwen.head_dim) == (36, 8, 128)
    gemma = load_config(resolve_model("gemma-3-27b"))
    assert gemma.layer_types.count("full_attention") == 10
    assert gemma.rope_parameters["full_attention"]["rope_type"] == "linear"


def test_configs_are_new_each_time_and_the_catalogue_does_not_change() -> None:
    source = resolve_model("gpt-oss-20b")
    config = load_config(source)
    config.layer_types.clear()
    assert len(load_config(source).layer_types) == 24
    entry = get_model("gpt-oss-20b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.parameters = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        entry.config["vocab_size"] = 1  # type: ignore[index]


# --- finding ------------------------------------------------------------------------------------------------


def test_search() -> None:
    assert [entry.id for entry in search_models("Kimi")] == ["kimi-k2-instruct", "kimi-k2.7-code"]
    assert [entry.id for entry in search_models("qwen moe")] == ["qwen3-235b-a22b", "qwen3-30b-a3b"]
    assert [entry.id for entry in search_models("deepseek_v3 code")] == ["kimi-k2.7-code"]
    assert len(search_models("")) == len(model_ids())
    assert search_models("no such model") == []


def test_a_catalogue_id_in_any_case() -> None:
    source = resolve_model(" Qwen3-8B ")
    assert (source.kind, source.id, source.hub_id) == ("catalogue", "qwen3-8b", "Qwen/Qwen3-8B")
    assert source.entry is get_model("QWEN3-8b")


def test_a_known_hub_id_needs_no_network() -> None:
    source = resolve_model("qwen/qwen3-8b")
    assert (source.kind, source.hub_id) == ("hub", "Qwen/Qwen3-8B")
    assert load_config(source).model_type == "qwen3"


def test_an_unknown_hub_id_is_left_to_the_hub() -> None:
    source = resolve_model("some-org/some.model_1")
    assert (source.kind, source.id, source.entry) == ("hub", "some-org/some.model_1", None)


def test_local_paths_are_known_by_their_base_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text('{"model_type": "llama"}')
    gguf = tmp_path / "some.GGUF"
    gguf.touch()
    found = [resolve_model(str(path)) for path in (folder, config, gguf)]
    assert [(source.kind, source.id) for source in found] == [
        ("folder", "my-model"),
        ("config", "config.json"),
        ("gguf", "some.GGUF"),
    ]
    assert found[0].path == folder
    monkeypatch.chdir(folder)
    assert resolve_model(".").id == "my-model"
    # A folder called org/name is meant before the hub's.
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./my-model").kind == "folder"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("qwen-8b", "close: qwen3-8b"),
        ("Qwen3-8B-Instruct", "close: qwen3-8b"),
        ("llama", "--weights random"),
        ("", "unknown model ''"),
        ("   ", "unknown model ''"),
        ("\0", "unknown model"),
        ("x" * 5000, "..."),
        ("two\nlines", "unknown model"),
        ("./missing", "no file or folder './missing'"),
        ("a/b/c", "no file or folder"),
        ("missing.gguf", "no file or folder"),
        ("~nobody-of-that-name/x", "no file or folder"),
    ],
)
def test_what_is_no_model_is_refused_on_one_line(spec: str, says: str) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        resolve_model(spec)
    message = str(caught.value)
    assert says in message and "\n" not in message
    assert len(message) < 800
    assert isinstance(caught.value, InvalidInput) and caught.value.exit_code == 2


def test_a_folder_or_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ModelUnavailable, match=r"no config\.json.*give the file itself: weights\.gguf"):
        resolve_model(str(tmp_path))
    pickle = tmp_path / "pytorch_model.bin"
    pickle.touch()
    with pytest.raises(ModelUnavailable, match="no pickle is loaded"):
        resolve_model(str(pickle))


def test_a_short_name_means_the_newest_of_its_family() -> None:
    assert get_model("Kimi-K2").published_architecture == "KimiK25ForConditionalGeneration"
    assert resolve_model("kimi-k2").id == "kimi-k2.7-code"


def test_get_model_names_close_matches() -> None:
    with pytest.raises(ModelUnavailable, match=r"close: kimi-k2"):
        get_model("kimi-k3")


def test_a_damaged_catalogue_says_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "broken.json").write_text('{"id": "broken"}')
    monkeypatch.setattr(catalogue, "data_dir", lambda: tmp_path)
    catalogue._entries.cache_clear()
    try:
        with pytest.raises(PrefillLabError, match=r"broken\.json is damaged"):
            model_ids()
    finally:
        catalogue._entries.cache_clear()


# --- local configs ------------------------------------------------------------------------------------------


def _config_source(tmp_path: Path, facts: object) -> catalogue.ModelSource:
    path = tmp_path / "config.json"
    path.write_text(facts if isinstance(facts, str) else json.dumps(facts))
    return resolve_model(str(path))


TINY_MLA = {"model_type": "kimi_k2", "hidden_size": 64, "auto_map": {"AutoConfig": "configuration_x.X"}}


def test_a_config_of_remote_code_uses_the_code_transformers_has(tmp_path: Path) -> None:
    config = load_config(_config_source(tmp_path, TINY_MLA))
    assert (config.model_type, config.hidden_size) == ("deepseek_v3", 64)
    assert not getattr(config, "auto_map", None)


def test_a_multimodal_config_gives_its_text_decoder(tmp_path: Path) -> None:
    own_code = {"model_type": "kimi_k25", "text_config": TINY_MLA, "vision_config": {}}
    assert load_config(_config_source(tmp_path, own_code)).model_type == "deepseek_v3"
    fp8 = {"quant_method": "fp8"}
    text = {"model_type": "gemma3_text", "num_hidden_layers": 3}
    gemma = {"model_type": "gemma3", "text_config": text, "quantization_config": fp8}
    config = load_config(_config_source(tmp_path, gemma))
    assert (config.model_type, config.num_hidden_layers) == ("gemma3_text", 3)
    assert config.quantization_config == fp8


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ("{not json", "cannot be read"),
        ("[1, 2]", "has no model_type"),
        ({"hidden_size": 64}, "has no model_type"),
        ({"model_type": 7}, "has no model_type"),
        ({"model_type": "no_such_type"}, "refused by Transformers"),
        ({"model_type": "llama", "hidden_size": "many"}, "refused by Transformers"),
        ({"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}, "refused by Transformers"),
        ({"model_type": "t5"}, "not a causal decoder"),
        ({"model_type": "vit"}, "not a causal decoder"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_on_one_line(tmp_path: Path, facts: object, says: str) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        load_config(_config_source(tmp_path, facts))
    message = str(caught.value)
    assert says in message and "\n" not in message
    assert str(tmp_path) not in message


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"noise" * 100)
    with pytest.raises(ModelUnavailable, match=r"'noise\.gguf' cannot be read"):
        load_config(resolve_model(str(path)))


# --- resources ----------------------------------------------------------------------------------------------


def test_the_catalogue_is_light() -> None:
    code = (
        "import sys; from toolkit.catalogue import resolve_model; resolve_model('qwen3-8b'); "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)


_THREADS = """
import sys, threading
sys.setswitchinterval(1e-5)
import toolkit
errors, together = [], threading.Barrier(3)
def plan():
    together.wait()
    try:
        toolkit.plan(model=sys.argv[1])
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=plan) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
"""


def test_threads_may_be_the_first_to_need_transformers(tmp_path: Path) -> None:
    """While it is imported, a second thread that asks for a name of it would be told that there is none."""
    file = _config_source(tmp_path, dict(get_model("qwen3-0.6b").config)).path
    root = Path(__file__).resolve().parents[2]
    code = [sys.executable, "-c", _THREADS, str(file)]
    done = subprocess.run(code, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PREFILL_LAB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert resources.cache_dir() == tmp_path / ".cache" / "prefill-lab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, by the specification
    assert resources.cache_dir() == tmp_path / ".cache" / "prefill-lab"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resources.cache_dir() == tmp_path / "xdg" / "prefill-lab"
    monkeypatch.setenv("PREFILL_LAB_CACHE", "~/mine")
    assert resources.cache_dir() == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()


def test_where_the_data_is() -> None:
    assert (resources.data_dir() / "models" / "smollm2-135m.json").is_file()
