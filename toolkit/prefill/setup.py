"""capture_prefill_graph: guards, then the policy, then the capture. Always a result object, never an exception."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.errors import CaptureCancelled, OutOfMemoryAtBucket, PrefillLabError, one_line
from toolkit.policies import Decision, PolicyFacts, get_policy
from toolkit.prefill.backends import BACKENDS
from toolkit.prefill.guards import GuardFacts, first_blocked, fitting_buckets
from toolkit.prefill.model_runner import compute_attention_and_moe_layers, resolve_language_model
from toolkit.prefill.runners import GIB, BucketCapture, EagerRunner, EventSink, PrefillCudaGraphRunner
from toolkit.settings import Backend

if TYPE_CHECKING:
    from toolkit.prefill.devices.base import Device
    from toolkit.prefill.model_runner import ModelRunner


@dataclass(frozen=True)
class GraphCapture:
    """What happened. `runner` is the one to serve with; None when the capture did not succeed.

    `outcome`: captured, skipped, oom, cancelled or failed. Memory is GiB of the device, None where unknown.
    `memory_usage_gib` is free before less free after, as SGLang logs it, and may be negative on a shared GPU.
    """

    runner: PrefillCudaGraphRunner | EagerRunner | None
    memory_usage_gib: float | None
    capture_time_s: float
    reason: str
    outcome: str = "captured"
    reason_code: str = ""
    free_before_gib: float | None = None
    free_after_gib: float | None = None
    peak_usage_gib: float | None = None
    oom_bucket: int | None = None
    figures: tuple[BucketCapture, ...] = field(default=())


def get_available_gpu_memory(device: Device) -> float:
    """GiB free on the device after cached blocks were given back (SGLang's name; it says GB and means GiB)."""
    device.empty_cache()
    return device.free_bytes() / GIB


def capture_prefill_graph(
    *,
    model_runner: ModelRunner,
    eager_runner: EagerRunner,
    on_event: EventSink | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> GraphCapture:
    """Capture the ladder of `model_runner`, or say why not.

    Guards come first, in their documented order, then the policy, then the capture itself. `on_event` receives
    log lines in SGLang's wording and one event a bucket.
    """
    emit = on_event or (lambda event: None)
    facts = guard_facts(model_runner)
    blocked = first_blocked(facts)
    if blocked is not None:
        return _skipped(emit, eager_runner, blocked.code, blocked.reason, blocked.log_line, None)
    buckets = fitting_buckets(facts)
    free_gib = get_available_gpu_memory(model_runner.device)
    decision = get_policy(model_runner.policy)(PolicyFacts(free_gib, model_runner.locked_keys, buckets))
    if not decision.capture:
        return _skipped(emit, eager_runner, decision.code, decision.reason, decision.log_line, free_gib)
    runner = PrefillCudaGraphRunner(model_runner, BACKENDS[Backend(model_runner.backend)](model_runner), eager_runner)
    return _capture(runner, decision, free_gib, emit, cancelled)


def _capture(
    runner: PrefillCudaGraphRunner,
    decision: Decision,
    free_before: float,
    emit: EventSink,
    cancelled: Callable[[], bool] | None,
) -> GraphCapture:
    model_runner, device, buckets = runner.model_runner, runner.model_runner.device, decision.buckets
    emit({"event": "ladder", "buckets": list(buckets)})
    emit(_log(begin_line(model_runner.role, model_runner.backend, buckets, free_before)))
    device.reset_peak()
    used_before = device.total_bytes - device.free_bytes()
    start = time.perf_counter()
    failure = _attempt(runner, buckets, emit, cancelled or (lambda: False))
    elapsed = time.perf_counter() - start
    peak = (device.peak_used_bytes() - used_before) / GIB
    if failure is not None:
        runner.release()
    free_after = get_available_gpu_memory(device)
    known = failure is None and device.pool_reserved_bytes(runner.pool) is not None
    usage = free_before - free_after if known else None
    if failure is None:
        emit(_log(end_line(model_runner.role, elapsed, free_before - free_after, free_after)))
    else:
        emit(_log(f"Capture {model_runner.role} prefill CUDA graph failed: {failure.reason}"))
    return GraphCapture(
        runner=runner if failure is None else None,
        memory_usage_gib=usage,
        capture_time_s=elapsed,
        reason=decision.reason if failure is None else failure.reason,
        outcome="captured" if failure is None else failure.outcome,
        reason_code=decision.code if failure is None else failure.code,
        free_before_gib=free_before,
        free_after_gib=free_after,
        peak_usage_gib=peak if known or failure is not None else None,
        oom_bucket=failure.oom_bucket if failure is not None else None,
        figures=tuple(runner.figures),
    )


@dataclass(frozen=True, slots=True)
class _Failure:
    outcome: str
    code: str
    reason: str
    oom_bucket: int | None = None


def _attempt(
    runner: PrefillCudaGraphRunner, buckets: tuple[int, ...], emit: EventSink, cancelled: Callable[[], bool]
) -> _Failure | None:
    """Run the capture; what goes wrong becomes an outcome with its reason."""
    try:
        runner.capture(buckets, emit, cancelled)
    except OutOfMemoryAtBucket as error:
        return _Failure("oom", "out_of_memory", str(error), error.num_tokens)
    except CaptureCancelled as error:
        return _Failure("cancelled", "cancelled", str(error))
    except PrefillLabError as error:
        return _Failure("failed", "capture_error", str(error))
    except Exception as error:  # a model or a library failed in mid-capture
        return _Failure("failed", "unexpected_error", one_line(f"{type(error).__name__}: {error}")[:500])
    return None


def begin_line(role: str, backend: str, buckets: tuple[int, ...], free_gib: float) -> str:
    """The line a server prints before the capture (SGLang 0.5.15-0.5.23; its GB is GiB)."""
    return (
        f"Capture {role} prefill CUDA graph begin. backend={backend}, num_tokens={list(buckets)}, "
        f"avail mem={free_gib:.2f} GB"
    )


def end_line(role: str, elapsed_s: float, usage_gib: float, free_gib: float) -> str:
    """The line a server prints after the capture (SGLang 0.5.15-0.5.23; its GB is GiB)."""
    return (
        f"Capture {role} prefill CUDA graph end. elapsed={elapsed_s:.2f} s, mem usage={usage_gib:.2f} GB, "
        f"avail mem={free_gib:.2f} GB."
    )


def _log(line: str) -> dict[str, Any]:
    return {"event": "log", "line": line}


def _skipped(
    emit: EventSink, eager_runner: EagerRunner, code: str, reason: str, line: str | None, free_gib: float | None
) -> GraphCapture:
    if line is not None:
        emit(_log(line))
    return GraphCapture(
        runner=eager_runner,
        memory_usage_gib=0.0,
        capture_time_s=0.0,
        reason=reason,
        outcome="skipped",
        reason_code=code,
        free_before_gib=free_gib,
        free_after_gib=free_gib,
    )


def guard_facts(runner: ModelRunner) -> GuardFacts:
    """What the guards look at, of a runner."""
    backend = Backend(runner.backend)
    body = resolve_language_model(runner.model)
    attention, _ = compute_attention_and_moe_layers(body)
    requests, context = runner.capture_limits
    return GuardFacts(
        backend=backend,
        role=runner.role,
        # EAGLE forces the draft worker's prefill graph, and only on breakable (0.5.16 and later).
        draft_forced=backend is Backend.BREAKABLE,
        eagle_target=runner.eagle_target,
        lora_unsupported=runner.lora_unsupported,
        is_language_model=body is not None,
        buckets=runner.buckets,
        capture_requests=requests,
        context_length=context,
        capture_tokens=min(requests * context, runner.kv_pool.num_tokens),
        has_layers=hasattr(body, "layers"),
        num_layers=len(getattr(body, "layers", ())),
        # What the probe saw call attention: a mixer named like attention that never does is no attention.
        num_attention_layers=min(len(attention), len(runner.kv_pool.layers)),
    )
