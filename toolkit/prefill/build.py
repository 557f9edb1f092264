"""From settings to a ModelRunner: weights, KV pool, static buffers, in the order a server allocates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from toolkit.catalogue import load_config, resolve_model
from toolkit.errors import InvalidInput
from toolkit.memory.ledger import GIB, MIB, Sizes, kv_pool_bytes, resolve_sizes
from toolkit.policies import get_policy
from toolkit.prefill.attention import register_attention
from toolkit.prefill.batch import StaticBuffers
from toolkit.prefill.elastic_kv import ElasticKVPool
from toolkit.prefill.kv_pool import KVPool, LayerGeometry, bytes_per_token
from toolkit.prefill.model_runner import ModelRunner, model_geometry
from toolkit.settings import Backend, CaptureSettings
from toolkit.weights import check_weights, load_model, meta_model

if TYPE_CHECKING:
    from toolkit.prefill.devices.base import Device

_SEGMENT_SLACK = 2 * MIB
"""Each long-lived tensor may waste up to one rounding step of the allocator's large segments."""


class NoMemoryForKV(Exception):
    """Weights leave too little of the fraction for the KV pool: nothing, or less than one full bucket of tokens."""


@dataclass
class Built:
    """What the build has done so far; filled step by step, so that a failure still tells what was known."""

    sizes: Sizes | None = None
    mla: bool = False
    weights_kind: str | None = None
    ledger: dict[str, float | None] | None = None
    runner: ModelRunner | None = None
    vocabulary: int = 0


def build_model_runner(
    settings: CaptureSettings, device: Device, built: Built, stage: Callable[[str, str | None], None]
) -> ModelRunner:
    """Load, size and allocate. `built` is filled as figures become known, `stage` is told what begins.

    Raises InvalidInput for what cannot be used, torch.OutOfMemoryError and NoMemoryForKV when memory is short.
    """
    source = resolve_model(settings.model)
    config = load_config(source).get_text_config()
    built.mla = getattr(config, "kv_lora_rank", None) is not None
    sizes = built.sizes = resolve_sizes(settings, device.total_mib, mla=built.mla)
    ledger = built.ledger = {"total_gib": device.total_bytes / GIB}
    baseline = device.free_bytes()
    ledger["context_gib"] = (device.total_bytes - baseline) / GIB
    dtype = getattr(torch, settings.dtype)
    geometry = model_geometry(config)
    if settings.free_memory_gib is not None:
        # What cannot be left free is refused now, not after a minute of loading.
        parameters = meta_model(config, dtype, register_attention()).parameters()
        weight_bytes = sum(parameter.nbytes for parameter in parameters)
        kv_tokens_that_fit(settings, sizes, geometry, dtype, baseline, baseline - weight_bytes, config)
    check_weights(source, settings.weights)
    stage("load weights", source.id)
    loaded = load_model(
        source,
        weights=settings.weights,
        dtype=dtype,
        device=device.torch_device,
        attn_implementation=register_attention(),
        seed=settings.seed,
    )
    built.weights_kind, built.vocabulary = loaded.weights, int(config.vocab_size)
    weights = [*loaded.model.parameters(), *loaded.model.buffers()]
    device.adopt(weights)
    device.empty_cache()
    after_weights = device.free_bytes()
    ledger["weights_gib"] = _tensor_gib(weights)
    runner = _allocate(settings, device, sizes, geometry, config, loaded, (baseline, after_weights), ledger, stage)
    built.runner = runner
    return runner


def _allocate(
    settings: CaptureSettings,
    device: Device,
    sizes: Sizes,
    geometry: list[LayerGeometry],
    config: Any,
    loaded: Any,
    free: tuple[int, int],
    ledger: dict[str, float | None],
    stage: Callable[[str, str | None], None],
) -> ModelRunner:
    dtype = getattr(torch, settings.dtype)
    baseline, after_weights = free
    tokens = kv_tokens_that_fit(settings, sizes, geometry, dtype, baseline, after_weights, config)
    pool: KVPool
    if get_policy(settings.policy).kv_first:
        _check_pool(tokens, max(sizes.buckets, default=1), geometry)
        stage("allocate KV pool", f"{tokens} tokens")
        pool = KVPool(device, geometry, tokens, dtype)
        ledger["kv_cache_gib"] = _tensor_gib([*pool.keys, *pool.values])
    else:
        pool = _reserve_pool(device, sizes, geometry, tokens, dtype, stage)
        ledger["kv_cache_gib"] = pool.backed_bytes / GIB
    stage("allocate static buffers", f"{max(sizes.buckets, default=1)} tokens")
    runner = assemble(settings, device, loaded.model, pool, sizes.buckets)
    runner.tokenizer = loaded.tokenizer
    static = runner.buffers.tensors
    if settings.resolved_backend is Backend.FULL:
        static += runner.static_attention.tensors
    ledger["static_buffers_gib"] = _tensor_gib(static)
    device.empty_cache()
    # The allocator hands memory out in steps; what the tensors do not fill is nobody's, and still not free.
    named = ("weights_gib", "kv_cache_gib", "static_buffers_gib")
    ledger["allocator_rounding_gib"] = (baseline - device.free_bytes()) / GIB - sum(ledger[key] or 0 for key in named)
    ledger["ballast_gib"] = _leave_free(settings, device, pool)
    ledger["free_before_capture_gib"] = device.free_bytes() / GIB
    return runner


def _check_pool(tokens: int, bucket: int, geometry: list[LayerGeometry]) -> None:
    """A pool that comes first holds one full bucket, as one that comes last does: no prompt could fill it else."""
    if geometry and tokens < bucket:
        raise NoMemoryForKV(
            f"the KV pool gets {tokens:,} tokens of the fraction, less than one bucket of {bucket:,}: no prompt could "
            "fill it"
        )


def assemble(
    settings: CaptureSettings, device: Device, model: Any, pool: KVPool, buckets: tuple[int, ...]
) -> ModelRunner:
    """The static buffers, and the runner that holds all. Model and KV pool are on the device already.

    Raises torch.OutOfMemoryError.
    """
    config = model.config.get_text_config()
    dtype, width = getattr(torch, settings.dtype), int(config.hidden_size)
    buffers = StaticBuffers(device, pool.layers, max(buckets, default=1), width, dtype)
    runner = ModelRunner(
        device=device,
        model=model,
        kv_pool=pool,
        buffers=buffers,
        buckets=buckets,
        backend=settings.resolved_backend.value,
        context_length=_context_length(config),
        policy=settings.policy,
        reserve_gib=settings.reserve_gib,
        post_capture_gib=settings.post_capture_need_gib,
        role=settings.role,
        compiler=settings.compiler,
        request_slots=settings.request_slots,
        max_context=settings.max_context,
        locked_keys=settings.locked_keys,
    )
    if settings.resolved_backend is Backend.FULL:
        _ = runner.static_attention  # made on first use, which must not fall into the capture
    return runner


def _context_length(config: Any) -> int:
    """The longest request: what the model takes, cut to one chunk where it attends in chunks (Llama 4)."""
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "attention_chunk_size"))
    return min((int(limit) for limit in limits if limit), default=1 << 20)


def kv_tokens_that_fit(
    settings: CaptureSettings,
    sizes: Sizes,
    geometry: list[LayerGeometry],
    dtype: torch.dtype,
    baseline: int,
    after_weights: int,
    config: Any,
) -> int:
    """Tokens of a KV pool that is sized before the capture, from the bytes free before and after the weights.

    Raises InvalidInput when the memory asked for cannot be left free, NoMemoryForKV when weights leave no room.
    """
    per_token = bytes_per_token(geometry, dtype.itemsize)
    if not per_token:
        return 1  # no standard attention layer: a guard will say so, there is nothing to store
    if settings.free_memory_gib is None:
        assert sizes.mem_fraction_static is not None
        room = kv_pool_bytes(after_weights, baseline, sizes.mem_fraction_static)
        if room < per_token:
            raise NoMemoryForKV(
                f"weights leave {room / GIB:.2f} GiB of mem_fraction_static {sizes.mem_fraction_static:g} for the "
                "KV pool"
            )
        return room // per_token
    static = _static_bytes(settings, geometry, max(sizes.buckets, default=1), int(config.hidden_size), dtype)
    slack = _SEGMENT_SLACK * (2 * len(geometry) + 12)
    room = after_weights - static - slack - int(settings.free_memory_gib * GIB)
    needed = max(sizes.buckets, default=1) * per_token
    if room < needed:
        most = (after_weights - static - slack - needed) / GIB
        raise InvalidInput(
            f"{settings.free_memory_gib:g} GiB cannot be left free before the capture",
            f"at most {max(0.0, most):.2f} GiB are, after weights, static buffers and a KV pool for one full bucket",
            "give a smaller --free-memory, a smaller ladder or a larger device",
        )
    return room // per_token


def _static_bytes(
    settings: CaptureSettings, geometry: list[LayerGeometry], max_tokens: int, hidden: int, dtype: torch.dtype
) -> int:
    crossing = max(x.q_heads * x.k_dim for x in geometry) + max(x.q_heads * x.v_dim for x in geometry)
    rows = max_tokens * (3 * 8 + (hidden + crossing) * dtype.itemsize)
    if settings.resolved_backend is not Backend.FULL:
        return rows
    return rows + 8 * (2 * max_tokens + 3 * settings.request_slots * settings.max_context)


def _tensor_gib(tensors: Iterable[torch.Tensor]) -> float:
    """GiB of the tensors' storages, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / GIB


def _reserve_pool(
    device: Device,
    sizes: Sizes,
    geometry: list[LayerGeometry],
    planned_tokens: int,
    dtype: torch.dtype,
    stage: Callable[[str, str | None], None],
) -> ElasticKVPool:
    """Addresses for as many tokens as free memory holds, memory for one full bucket."""
    per_token = bytes_per_token(geometry, dtype.itemsize)
    first = max(sizes.buckets, default=1)
    most = max(first, device.free_bytes() // per_token) if per_token else first
    stage("reserve addresses for the KV pool", f"{most} tokens at most, {first} backed")
    return ElasticKVPool(device, geometry, first, most, dtype, (planned_tokens + 1) * per_token)


def _leave_free(settings: CaptureSettings, device: Device, pool: KVPool) -> float:
    if settings.free_memory_gib is None:
        return 0.0
    # A pool that grows later is left the memory that it would have taken by now.
    later = pool.planned_bytes - pool.backed_bytes if isinstance(pool, ElasticKVPool) else 0
    return device.leave_free(int(settings.free_memory_gib * GIB) + later) / GIB
