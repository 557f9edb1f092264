"""Models in memory: real weights (bundled, local or from the hub) or deterministic random ones.

No pickle is loaded and no remote code is run, ever.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from toolkit.bundled import BUNDLED_ID, as_unavailable, bundled_folder, gguf_tensors, gguf_tokenizer, quiet
from toolkit.catalogue import ModelSource, load_config, offline_choices
from toolkit.errors import ModelUnavailable
from toolkit.hardware import available_ram_bytes
from toolkit.resources import IMPORTING, fetch_from_hub

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Weights = Literal["auto", "real", "random"]

_STD = 0.02
_HUB_FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*"),
)


class LoadedModel(NamedTuple):
    """A model in eval mode, its tokenizer (None for random weights), and which weights it has."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    weights: Literal["real", "random"]


def resolve_weights(source: ModelSource, weights: Weights = "auto") -> Literal["real", "random"]:
    """Which weights `load_model` will use.

    `auto` takes real weights for the bundled model, a .gguf file, a hub id, and a folder with weights; random
    ones for every other catalogue id and for a bare config, which have none on this machine. It never falls
    back from one to the other.
    """
    if weights != "auto":
        return weights
    if source.kind == "folder":
        assert source.path is not None
        return "real" if _weight_files(source.path) or _pickles(source.path) else "random"
    return "real" if _is_bundled(source) or source.kind in ("gguf", "hub") else "random"


def load_model(
    source: ModelSource,
    *,
    weights: Weights = "auto",
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None = None,
    seed: int = 0,
) -> LoadedModel:
    """A causal language model on `device`, in eval mode, no parameter requiring a gradient.

    Args:
        source: from `toolkit.catalogue.resolve_model`.
        weights: see `resolve_weights`.
        dtype: of the parameters, but for those that an architecture keeps in fp32 (DeepSeek's routers).
        device: where everything ends up. Random weights are made there; real ones pass through main memory.
        attn_implementation: a name in Transformers' AttentionInterface; None leaves the choice to it.
        seed: of random weights; the same seed, config, dtype and kind of device give the same weights.

    Raises:
        ModelUnavailable: the weights are not to be had, are refused, or do not fit into memory.
        StorageError: converted weights cannot be written to the cache. Nothing is left behind.
    """
    kind = resolve_weights(source, weights)
    if kind == "random":
        model = random_model(load_config(source), dtype, device, attn_implementation, seed, source.id)
        return LoadedModel(model, None, kind)
    if source.kind == "config":
        raise ModelUnavailable(
            f"{source.id!r} is a config without weights",
            "real weights need a folder with safetensors, a .gguf file or a hub id",
            "use --weights random",
        )
    if _is_bundled(source):
        # Its weights come with a package, so the hub id of its entry is not asked.
        folder = bundled_folder()
    elif source.hub_id is not None:
        folder = fetch_from_hub(source.hub_id, _HUB_FILES, _is_whole, offline_choices())
    else:
        assert source.path is not None
        folder = source.path
    load = _load_gguf if source.kind == "gguf" else _load_folder
    return LoadedModel(*load(folder, load_config(source), source.id, dtype, device, attn_implementation), kind)


def _is_bundled(source: ModelSource) -> bool:
    return source.kind == "catalogue" and source.id == BUNDLED_ID


# --- random weights -----------------------------------------------------------------------------------------


def meta_model(config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str | None = None) -> PreTrainedModel:
    """The model on the meta device: shapes and dtypes, no memory. `config` is not changed.

    Raises:
        ModelUnavailable: Transformers cannot build it.
    """
    with quiet(), as_unavailable("model"):
        model: PreTrainedModel = _skeleton(config, dtype, attn_implementation, None)
    return model


def random_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None = None,
    seed: int = 0,
    name: str = "model",
) -> PreTrainedModel:
    """A model with deterministic random weights, made directly on `device`, with no second copy anywhere.

    Matrices are normal with a standard deviation of 0.02, biases are zero. Other vectors (norms, attention
    sinks) and buffers (rotary frequencies) are what the architecture's own initialisation makes of them: it
    knows, for example, that Gemma's norm weights start at zero.

    Raises:
        ModelUnavailable: it does not fit into the free memory of `device`, or Transformers cannot build it.
    """
    import torch

    with quiet(), as_unavailable(name):
        model: PreTrainedModel = _skeleton(config, dtype, attn_implementation, device)
        _require_memory(model, device, name)
        generator = torch.Generator(device).manual_seed(seed)

        def make(key: str, meta: torch.Tensor) -> torch.Tensor | None:
            if key.endswith("bias"):
                return torch.zeros_like(meta, device=device)
            if meta.dim() < 2:
                return None
            return torch.empty_like(meta, device=device).normal_(0.0, _STD, generator=generator)

        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            _materialise(model, device, make)
    return model


def _skeleton(
    config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str | None, device: torch.device | None
) -> Any:
    """A meta model that is going to run on `device`."""
    import torch

    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the same geometry, unquantized
    with IMPORTING, torch.device("meta"):
        from transformers import AutoModelForCausalLM

        build: Callable[..., Any] = AutoModelForCausalLM.from_config
        return build(config, dtype=dtype, attn_implementation=attn_implementation, **_experts(device))


def _experts(device: torch.device | None) -> dict[str, str]:
    """How a mixture of experts is computed. Transformers' own choice is `grouped_mm` where a class has it.

    That is right on the CPU (bf16 and fp32, torch >= 2.10), on the meta device, and on CUDA from compute
    capability 8.0. Older GPUs would fall back to a loop that reads token counts on the host, which no graph
    can capture.
    """
    import torch

    if device is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return {"experts_implementation": "batched_mm"}
    return {}


def _materialise(model: Any, device: torch.device, make: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Replace every meta tensor: by what `make` returns for a parameter, or, where that is None and for every
    buffer, by what the architecture initialises it with.

    Not by `to_empty`, which allocates tied parameters twice and leaves garbage in buffers.
    """
    import torch

    # The meta tensor is kept too, so that its id stays its own.
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def replacement(key: str, old: torch.Tensor) -> torch.Tensor:
        new: Any = make(key, old) if isinstance(old, torch.nn.Parameter) else None
        given = new is not None
        if new is None:
            # NaN, so that what nobody initialises is noticed.
            new = torch.empty_like(old, device=device)
            new = new.fill_(float("nan")) if new.is_floating_point() else new.zero_()
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=False)
        new._is_hf_initialized = given  # Transformers' initialisation leaves such tensors alone
        return new  # type: ignore[no-any-return]

    for prefix, module in model.named_modules():
        module._is_hf_initialized = False  # it was set while the meta model was built
        for tensors in (module._parameters, module._buffers):
            for key, old in tensors.items():
                if old is not None:
                    if id(old) not in made:
                        made[id(old)] = (old, replacement(f"{prefix}.{key}", old))
                    tensors[key] = made[id(old)][1]
    with torch.no_grad():
        model.initialize_weights()
    for key, tensor in (*model.named_buffers(), *model.named_parameters()):
        # A wrong rotary table gives plausible nonsense, so rather no model. What was given is not checked.
        if not tensor._is_hf_initialized and tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(f"its architecture does not initialise {key}")
    model.eval().requires_grad_(False)


# --- folders, the hub's among them --------------------------------------------------------------------------


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _pickles(folder: Path) -> list[Path]:
    return sorted(file for suffix in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{suffix}"))


def _is_whole(folder: Path) -> bool:
    """Whether a folder has its config and every safetensors file that its index names."""
    if not (folder / "config.json").is_file() or not _weight_files(folder):
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return True
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError):
        return False
    return all((folder / name).is_file() for name in names)


def _refuse_unusable(folder: Path, name: str) -> None:
    if _is_whole(folder):
        return
    if _weight_files(folder):
        what, next_step = f"model {name!r} lacks a file that its index names", "complete the folder"
    elif pickles := _pickles(folder):
        what = f"model {name!r} has only {pickles[0].name}; no pickle is loaded"
        next_step = "convert it to safetensors, or use --weights random"
    else:
        what, next_step = f"model {name!r} has no weights", "use --weights random"
    raise ModelUnavailable(what, "real weights are safetensors or GGUF", next_step)


def check_weights(source: ModelSource, weights: Weights = "auto") -> None:
    """Look at a folder's files without loading them, so that what cannot be used is refused at once.

    Raises:
        ModelUnavailable: pickles only, missing or damaged safetensors files.
    """
    if source.kind != "folder" or resolve_weights(source, weights) == "random":
        return
    from safetensors import safe_open

    assert source.path is not None
    _refuse_unusable(source.path, source.id)
    with as_unavailable(source.id):
        for file in _weight_files(source.path):
            with safe_open(file, framework="pt"):
                pass


def _load_folder(
    folder: Path,
    config: PretrainedConfig,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _refuse_unusable(folder, name)
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    local = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = None
    with quiet(), as_unavailable(name):
        # By way of main memory: placing tensors on a device one by one would need accelerate.
        skeleton = _skeleton(config, dtype, attn_implementation, device)
        _require_memory(skeleton, None, name)
        _require_memory(skeleton, device, name)
        model, info = load(
            folder,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            **_experts(device),
            **local,
        )
        if info["missing_keys"]:  # Transformers would go on with random numbers in their place
            keys = sorted(info["missing_keys"])
            raise ValueError(f"the files lack {len(keys)} of its tensors, {keys[0]} for one")
        model = model.to(device).eval().requires_grad_(False)
        if any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            # Without it there is a model that no text can be given to; captures and timings need none.
            with contextlib.suppress(Exception):
                tokenizer = AutoTokenizer.from_pretrained(folder, **local)
    return model, tokenizer


# --- GGUF files ---------------------------------------------------------------------------------------------


def _load_gguf(
    path: Path,
    config: PretrainedConfig,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The dequantised model: quantised values become fp32 and are then rounded to `dtype`."""
    with quiet(), as_unavailable(name):
        model = _skeleton(config, dtype, attn_implementation, device)
        _require_memory(model, None, name)
        _require_memory(model, device, name)
        tensors = gguf_tensors(path, model, dtype)

        def make(key: str, meta: torch.Tensor) -> torch.Tensor:
            if key not in tensors:
                raise ValueError(f"the file lacks {key}")
            return tensors.pop(key).to(device=device, dtype=meta.dtype)

        _materialise(model, device, make)
        tokenizer = None
        with contextlib.suppress(Exception):  # as for a folder
            tokenizer = gguf_tokenizer(path)
    return model, tokenizer


# --- memory -------------------------------------------------------------------------------------------------


def _require_memory(model: Any, device: torch.device | None, name: str) -> None:
    """Refuse a model whose parameters exceed the free memory of `device` (main memory, when it is None)."""
    import torch

    needed = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    if device is not None and device.type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], str(device)
    else:
        free, where = available_ram_bytes(), "main memory"
    if needed > free:
        raise ModelUnavailable(
            f"the weights of {name!r} take {needed / 2**30:.2f} GiB",
            f"{where} has {free / 2**30:.2f} GiB free",
            "choose a smaller model or dtype, or prefill-lab plan, which needs no weights",
        )
