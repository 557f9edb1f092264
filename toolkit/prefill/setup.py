"""capture_prefill_graph: guards, then the policy, then the capture. Always a result object, never an exception."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from toolkit.errors import CaptureCancelled, OutOfMemoryAtBucket, PrefillLabError, one_line
from toolkit.policies import (
    Decision,
    Halt,
    LadderNeed,
    OnOutOfMemory,
    Policy,
    PolicyFacts,
    get_policy,
    later_words,
    measured_over_forecast,
    mib_or_gib,
    reserve_gib,
    scaled,
    starved_gib,
    trim_words,
    watch,
)
from toolkit.prefill.backends import BACKENDS
from toolkit.prefill.elastic_kv import ElasticKVPool
from toolkit.prefill.guards import GuardFacts, first_blocked, fitting_buckets
from toolkit.prefill.model_runner import compute_attention_and_moe_layers, resolve_language_model
from toolkit.prefill.recovery import keep_valid
from toolkit.prefill.runners import GIB, BucketCapture, EagerRunner, EventSink, PrefillCudaGraphRunner
from toolkit.settings import Backend

if TYPE_CHECKING:
    from toolkit.prefill.devices.base import Device
    from toolkit.prefill.model_runner import ModelRunner


@dataclass(frozen=True)
class GraphCapture:
    """What happened. `runner` is the one to serve with; None when the capture did not succeed.

    `outcome`: captured, skipped, oom, cancelled or failed. Memory is GiB of the device, None where unknown.
    `memory_usage_gib` is what the capture took, free before less free after it, as SGLang logs it, and may be negative
    on a shared GPU; `free_after_gib` is what is free at the end, with a KV pool that is sized last in place. `trimmed`
    are buckets that were asked for and have no graph; `starved_gib` is what a need that was declared for later lacks,
    None where none was declared.
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
    decision: Decision | None = None
    facts: PolicyFacts | None = None
    trimmed: tuple[int, ...] = ()
    starved_gib: float | None = None


def get_available_gpu_memory(device: Device) -> float:
    """GiB free on the device after cached blocks were given back (SGLang's name; it says GB and means GiB)."""
    device.empty_cache()
    return device.free_bytes() / GIB


Foresee = Callable[[tuple[int, ...], Callable[[LadderNeed], bool]], tuple[LadderNeed, ...]]
"""Forecasts of a ladder and of shorter ones, as many as show which is the longest that suits."""


def capture_prefill_graph(
    *,
    model_runner: ModelRunner,
    eager_runner: EagerRunner,
    on_event: EventSink | None = None,
    cancelled: Callable[[], bool] | None = None,
    foresee: Foresee | None = None,
) -> GraphCapture:
    """Capture the ladder of `model_runner`, or say why not.

    Guards come first, in their documented order, then the policy, then the capture itself, then the KV pool where the
    policy sizes it last. `on_event` receives log lines in SGLang's wording and one event a bucket. `foresee` is asked
    by policies that look at a forecast.
    """
    emit = on_event or (lambda event: None)
    result, kept_gib = _guarded(model_runner, eager_runner, emit, cancelled or (lambda: False), foresee)
    if isinstance(model_runner.kv_pool, ElasticKVPool) and result.runner is not None:
        result = _size_kv(result, model_runner.kv_pool, model_runner.device, kept_gib, emit)
    return _judged(result, model_runner.post_capture_gib)


def _guarded(
    model_runner: ModelRunner,
    eager_runner: EagerRunner,
    emit: EventSink,
    cancelled: Callable[[], bool],
    foresee: Foresee | None,
) -> tuple[GraphCapture, float]:
    """The result before the KV pool is looked at, and the GiB that have to stay free."""
    guards = guard_facts(model_runner)
    blocked = first_blocked(guards)
    free_gib = get_available_gpu_memory(model_runner.device)
    facts = policy_facts(model_runner, fitting_buckets(guards) if blocked is None else (), free_gib)
    if blocked is not None:
        return _skipped(emit, eager_runner, blocked.code, blocked.reason, blocked.log_line, None), facts.kept_gib
    policy, factor, tried = get_policy(model_runner.policy), 1.0, ""
    while True:
        decision = policy.decide(_with_needs(policy, facts, foresee, factor))
        if tried:
            decision = replace(decision, reason=f"{decision.reason} ({tried})")
        emit({"event": "facts", "decision": decision.to_dict(), "trimmed": list(decision.trimmed)})
        if not decision.capture:
            result = _skipped(emit, eager_runner, decision.code, decision.reason, decision.log_line, free_gib, decision)
            return replace(result, facts=facts), facts.kept_gib
        if decision.log_line is not None:
            emit(_log(decision.log_line))
        backend = BACKENDS[Backend(model_runner.backend)](model_runner)
        runner = PrefillCudaGraphRunner(model_runner, backend, eager_runner)
        result, again = _capture(runner, facts, decision, free_gib, emit, cancelled)
        if again is None:
            return result, facts.kept_gib
        # What was measured corrects the forecast, and the policy is asked once more. It ends: the factor only grows.
        factor *= again
        tried = f"after a first try that took {factor:.2f} times its forecast"
        emit(_log(f"{model_runner.policy}: {result.reason}; tried again {tried}"))


def policy_facts(model_runner: ModelRunner, buckets: tuple[int, ...], free_gib: float) -> PolicyFacts:
    """What the policy of a runner may look at, with `free_gib` measured now; without forecasts.

    Where the KV pool grows later, what it would have taken by now counts as taken.
    """
    pool, room = model_runner.kv_pool, None
    if isinstance(pool, ElasticKVPool):
        room = (pool.planned_bytes - pool.backed_bytes) / GIB
        free_gib -= room
    return PolicyFacts(
        free_gib=free_gib,
        locked_keys=model_runner.locked_keys,
        buckets=buckets,
        reserve_gib=reserve_gib(free_gib, model_runner.reserve_gib),
        post_capture_gib=model_runner.post_capture_gib,
        kv_room_gib=room,
    )


def _with_needs(policy: Policy, facts: PolicyFacts, foresee: Foresee | None, factor: float) -> PolicyFacts:
    """The facts with forecasts, `factor` times as high, where the policy looks at them."""
    if foresee is None or not policy.foresees:
        return facts
    needs = foresee(facts.buckets, lambda need: facts.fits(scaled(need, factor)))
    return replace(facts, needs=tuple(scaled(need, factor) for need in needs))


def _capture(
    runner: PrefillCudaGraphRunner,
    facts: PolicyFacts,
    decision: Decision,
    free_before: float,
    emit: EventSink,
    cancelled: Callable[[], bool],
) -> tuple[GraphCapture, float | None]:
    """The result, and by which factor to correct the forecast for another try, if there is to be one."""
    model_runner, device, buckets = runner.model_runner, runner.model_runner.device, decision.buckets
    emit({"event": "ladder", "buckets": list(buckets)})
    emit(_log(begin_line(model_runner.role, model_runner.backend, buckets, free_before)))
    device.reset_peak()
    used_before = device.total_bytes - device.free_bytes()
    start = time.perf_counter()
    end = _attempt(runner, decision, emit, cancelled)
    elapsed = time.perf_counter() - start
    peak = (device.peak_used_bytes() - used_before) / GIB
    captured = end.outcome == "captured"
    if not captured:
        runner.release()
    free_after = get_available_gpu_memory(device)
    known = captured and device.pool_reserved_bytes(runner.pool) is not None
    if captured:
        emit(_log(end_line(model_runner.role, elapsed, free_before - free_after, free_after)))
        if end.reason != decision.reason:  # it stopped early, which must not be silent
            emit(_log(f"{model_runner.policy}: {end.reason}"))
    else:
        emit(_log(f"Capture {model_runner.role} prefill CUDA graph failed: {end.reason}"))
    serving: dict[str, PrefillCudaGraphRunner | EagerRunner] = {"captured": runner, "skipped": runner.eager_runner}
    result = GraphCapture(
        runner=serving.get(end.outcome),
        memory_usage_gib=free_before - free_after if known or end.outcome == "skipped" else None,
        capture_time_s=elapsed,
        reason=end.reason,
        outcome=end.outcome,
        reason_code=end.code,
        free_before_gib=free_before,
        free_after_gib=free_after,
        peak_usage_gib=peak if known or not captured else None,
        oom_bucket=end.oom_bucket,
        figures=tuple(runner.figures),
        decision=decision,
        facts=facts,
        trimmed=tuple(each for each in facts.buckets if each not in runner.captured)
        if end.runs_on
        else decision.trimmed,
    )
    return result, end.factor


@dataclass(frozen=True, slots=True)
class _End:
    """How an attempt ended. `factor` corrects the forecast, where another try with a shorter ladder makes sense."""

    outcome: str
    code: str
    reason: str
    oom_bucket: int | None = None
    factor: float | None = None

    @property
    def runs_on(self) -> bool:
        """Whether the server goes on to serve."""
        return self.outcome in ("captured", "skipped")


def _attempt(
    runner: PrefillCudaGraphRunner, decision: Decision, emit: EventSink, cancelled: Callable[[], bool]
) -> _End:
    """Run the capture; what goes wrong becomes an outcome with its reason."""
    taken = 0.0

    def halt(captured: int, at_start: float, free: float) -> Halt | None:
        nonlocal taken
        taken = at_start - free
        return watch(decision, captured, at_start, free)

    try:
        halted = runner.capture(decision.buckets, emit, cancelled, halt)
    except OutOfMemoryAtBucket as error:
        oom = _End("oom", "out_of_memory", str(error), error.num_tokens)
    except Exception as error:
        return _broken_off(error)
    else:
        if halted is None:
            return _End("captured", decision.code, decision.reason)
        if not halted.exceeded:
            return _partly(runner, decision, "budget_stopped", halted.reason)
        factor = measured_over_forecast(decision, len(runner.captured), taken)
        end = _End("skipped", "budget_exceeded", f"everything was given back: {halted.reason}; prefill runs eager")
        return replace(end, factor=factor if factor is not None and factor > 1.001 else None)
    if decision.on_oom is OnOutOfMemory.FAIL:
        return oom
    # Out here the error is gone, and with it whatever its frames held on the device.
    try:
        dropped = keep_valid(runner, decision, emit, cancelled)
    except Exception as error:
        return _broken_off(error)
    words = oom.reason if dropped is None else f"{oom.reason}; no captured bucket is kept: {dropped}"
    return replace(_partly(runner, decision, "budget_oom", words), oom_bucket=oom.oom_bucket)


def _broken_off(error: Exception) -> _End:
    """The end of an attempt that was cancelled, or failed for a reason that is not memory."""
    if isinstance(error, CaptureCancelled):
        return _End("cancelled", "cancelled", str(error))
    if isinstance(error, PrefillLabError):
        return _End("failed", "capture_error", str(error))
    # a model or a library failed
    return _End("failed", "unexpected_error", one_line(f"{type(error).__name__}: {error}")[:500])


def _partly(runner: PrefillCudaGraphRunner, decision: Decision, code: str, why: str) -> _End:
    """The end of a capture that stopped early, with what stayed and what that costs."""
    if not runner.captured:
        return _End("skipped", code, f"nothing is captured: {why}; prefill runs eager")
    asked = (*decision.buckets, *decision.trimmed)
    return _End("captured", code, f"stopped early: {why}; {trim_words(asked, runner.ladder)}")


def _size_kv(
    result: GraphCapture, pool: ElasticKVPool, device: Device, kept_gib: float, emit: EventSink
) -> GraphCapture:
    """Give the KV pool what the capture left, after the reserve and what is needed later."""
    free = get_available_gpu_memory(device)
    room, problem = free - kept_gib, ""
    if room < 0:
        problem = (
            f"{mib_or_gib(free)} are left after the capture, {mib_or_gib(kept_gib)} have to stay free: nothing is left "
            f"for a KV pool beyond the {pool.num_tokens} tokens of one full bucket"
        )
    else:
        try:
            pool.grow(pool.backed_bytes + int(room * GIB))
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            problem = f"{mib_or_gib(room)} could not be given to the KV pool: {one_line(str(error))}"
    if problem and isinstance(result.runner, PrefillCudaGraphRunner):
        result.runner.release()
    after = get_available_gpu_memory(device)
    if problem:
        emit(_log(f"Post-capture KV sizing failed: {problem}"))
        return replace(
            result, runner=None, outcome="oom", reason_code="no_memory_for_kv", reason=problem, free_after_gib=after
        )
    emit(_log(kv_line(pool.num_tokens, after)))
    steps = f"each of its tensors takes whole steps of {device.backing_step >> 20} MiB"
    reason = f"{result.reason}; the pool gets {pool.num_tokens} tokens ({steps})"
    return replace(result, free_after_gib=after, reason=reason)


def _judged(result: GraphCapture, post_capture_gib: float) -> GraphCapture:
    """With the verdict on what is declared to be needed after the capture, whatever the policy was."""
    if result.runner is None or not post_capture_gib or result.free_after_gib is None:
        return result
    lacking = starved_gib(result.free_after_gib, post_capture_gib)
    return replace(
        result, starved_gib=lacking, reason=f"{result.reason}; {later_words(result.free_after_gib, post_capture_gib)}"
    )


def kv_line(tokens: int, free_gib: float) -> str:
    """The line of a KV pool that was sized after the capture (SGLang 0.5.16; its GB is GiB)."""
    return f"Post-capture KV sizing: max_total_num_tokens={tokens}, free memory={free_gib:.2f} GB"


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
    emit: EventSink,
    eager_runner: EagerRunner,
    code: str,
    reason: str,
    line: str | None,
    free_gib: float | None,
    decision: Decision | None = None,
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
        decision=decision,
        trimmed=decision.trimmed if decision is not None else (),
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
