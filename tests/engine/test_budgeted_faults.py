"""Memory runs out under `budgeted` where nobody expected it: nothing is lost, nothing replays wrongly."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from faulty_device import Fault, FaultyDevice
from tiny_models import GIB, MIB, VOCABULARY, batch_of, captured, release, tiny_runner

from toolkit.errors import CaptureError
from toolkit.prefill import recovery
from toolkit.prefill.check import check_replays
from toolkit.prefill.model_runner import ModelRunner
from toolkit.prefill.runners import EagerRunner, PrefillCudaGraphRunner
from toolkit.prefill.setup import GraphCapture, capture_prefill_graph

pytestmark = pytest.mark.usefixtures("quick_collections")
KINDS = ("full", "breakable", "tc_piecewise")
LADDER = (4, 16, 32)
ORDER = (32, 16, 4)
LOST = 30 * MIB


def make(backend: str = "breakable", buckets: tuple[int, ...] = LADDER) -> tuple[FaultyDevice, ModelRunner]:
    device = FaultyDevice(GIB)
    return device, tiny_runner("llama", device=device, backend=backend, buckets=buckets, policy="budgeted")


def run(
    runner: ModelRunner, events: list[dict[str, Any]] | None = None, cancelled: Callable[[], bool] | None = None
) -> GraphCapture:
    sink: list[dict[str, Any]] = events if events is not None else []

    def on_event(event: dict[str, Any]) -> None:
        sink.append(event)
        runner.device.watch(event)  # type: ignore[attr-defined]

    return capture_prefill_graph(
        model_runner=runner, eager_runner=EagerRunner(runner), on_event=on_event, cancelled=cancelled
    )


@cache
def undisturbed(backend: str) -> tuple[dict[tuple[int, str], int], dict[int, int]]:
    """Allocations by (bucket, phase), and bytes of the pool after each bucket, of a capture without a fault."""
    device, runner = make(backend)
    result = run(runner)
    assert (result.outcome, result.reason_code) == ("captured", "budget_unforeseen")
    return dict(device.counts), {one.num_tokens: round((one.cumulative_mib or 0) * MIB) for one in result.figures}


def assert_nothing_is_left_open(device: FaultyDevice, runner: ModelRunner) -> None:
    assert device.recording is None
    assert device._watch is None
    assert not device.allocator._captures
    assert gc.isenabled()
    assert runner.kv_pool.free_slots == runner.kv_pool.num_tokens


def assert_serves(result: GraphCapture, runner: ModelRunner) -> None:
    """A prompt gives what an eager pass gives, and what was kept replays right."""
    assert result.runner is not None
    if isinstance(result.runner, PrefillCudaGraphRunner):
        assert check_replays(result.runner, VOCABULARY, seed=5).problem is None
    batch = batch_of(runner, 5, 6)
    expected = runner.forward_eager(batch)
    assert torch.allclose(result.runner.run(batch).hidden, expected, atol=1e-4)
    release(runner, batch)


def assert_recovered(result: GraphCapture, runner: ModelRunner, free: int, failed: int, kept: tuple[int, ...]) -> None:
    device = runner.device
    assert isinstance(device, FaultyDevice)
    assert not device.faults, "the fault was never met"
    assert_nothing_is_left_open(device, runner)
    assert (result.oom_bucket, result.reason_code) == (failed, "budget_oom")
    assert sorted(result.trimmed) == sorted(set(LADDER) - set(kept))
    if kept:
        assert isinstance(result.runner, PrefillCudaGraphRunner)
        assert (result.outcome, result.runner.ladder) == ("captured", sorted(kept))
        pool = device.pool_reserved_bytes(result.runner.pool)
        assert pool == undisturbed(runner.backend)[1][min(kept)]
        assert device.free_bytes() == free - pool
        assert tuple(figure.num_tokens for figure in result.figures) == kept
        assert "token counts up to 32 replay" in result.reason
    else:
        assert type(result.runner) is EagerRunner
        assert (result.outcome, device.free_bytes()) == ("skipped", free)
        assert "prefill runs eager" in result.reason
    assert f"out of memory at bucket {failed}" in result.reason
    assert result.free_after_gib == device.free_bytes() / GIB
    assert_serves(result, runner)


# --- injected at every bucket -------------------------------------------------------------------------------


def fault_at(place: str, backend: str, bucket: int) -> Fault:
    """In the warm-up, in the middle of the segments with memory lost to the pool, or in the last allocation."""
    counts = undisturbed(backend)[0]
    if place == "warm-up":
        return Fault(bucket, "warm-up", counts[bucket, "warm-up"] // 2 + 1)
    last = counts[bucket, "capture"]
    return Fault(bucket, "capture", last // 2, LOST) if place == "middle" else Fault(bucket, "capture", last)


@pytest.mark.parametrize("index", range(len(ORDER)))
@pytest.mark.parametrize("place", ["warm-up", "middle", "last"])
@pytest.mark.parametrize("backend", KINDS)
def test_out_of_memory_at_any_bucket_keeps_what_was_captured(backend: str, place: str, index: int) -> None:
    fault = fault_at(place, backend, ORDER[index])
    device, runner = make(backend)
    device.faults.append(fault)
    before, events = device.free_bytes(), []  # type: ignore[var-annotated]
    result = run(runner, events)
    assert_recovered(result, runner, before, ORDER[index], ORDER[:index])
    notes = [event["text"] for event in events if event["event"] == "note"]
    again = place == "middle" and index > 0
    assert [note for note in notes if "left 30 MiB in the pool" in note] == notes[: int(again)]
    assert len(notes) == int(again)
    logged = [event["line"] for event in events if event["event"] == "log"]
    assert any(f"out of memory at bucket {ORDER[index]}" in line for line in logged)
    if index == 1 and place == "middle":  # the same device, everything given back: the whole ladder is captured
        if isinstance(result.runner, PrefillCudaGraphRunner):
            result.runner.release()
        device.empty_cache()
        assert device.free_bytes() == before
        runner.policy = "ungated"
        assert captured(runner).ladder == list(LADDER)


@pytest.mark.parametrize("phase", ["warm-up", "capture"])
@pytest.mark.parametrize("index", range(len(ORDER)))
def test_somebody_who_takes_the_memory_in_mid_capture_is_survived(phase: str, index: int) -> None:
    """The capacity shrinks while a bucket is under way, so that the error is the device's own."""
    device, runner = make()
    before = device.free_bytes()

    def take() -> None:
        device.allocator.external_bytes += device.free_bytes()

    # A capture meets no new segment after the first bucket: the pool has grown by what the fault asks for.
    device.faults.append(Fault(ORDER[index], phase, act=take))
    runner.reserve_gib = 0.0
    result = run(runner)
    assert not device.faults
    assert_nothing_is_left_open(device, runner)
    assert result.runner is not None
    if isinstance(result.runner, PrefillCudaGraphRunner):
        assert result.runner.ladder == sorted(ORDER[:index] if result.oom_bucket else LADDER)
    taken, pool = device.allocator.external_bytes, getattr(result.runner, "pool", None)
    held = device.pool_reserved_bytes(pool) if pool is not None else 0
    assert device.free_bytes() == before - taken - held
    device.allocator.external_bytes = 0
    assert_serves(result, runner)


def test_graphs_that_leave_less_than_the_reserve_are_not_kept() -> None:
    device, runner = make()
    before = device.free_bytes()
    runner.reserve_gib = 0.25

    def take() -> None:
        device.allocator.external_bytes += device.free_bytes() - 200 * MIB

    device.faults += [Fault(4, "warm-up", 1, act=take), Fault(4, "warm-up", 2)]
    result = run(runner)
    assert (result.outcome, result.reason_code, result.oom_bucket) == ("skipped", "budget_oom", 4)
    assert "have to stay free" in result.reason
    assert result.trimmed == LADDER
    assert device.free_bytes() == before - device.allocator.external_bytes
    device.allocator.external_bytes = 0
    assert_serves(result, runner)


# --- trouble on the way back --------------------------------------------------------------------------------


@pytest.fixture
def before_the_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What is done just before the kept buckets are looked at."""
    steps: list[Callable[[], None]] = []

    def checked(*arguments: Any) -> Any:
        for step in steps:
            step()
        return check_replays(*arguments)

    monkeypatch.setattr(recovery, "check_replays", checked)
    yield steps


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_buckets_that_cannot_be_looked_at_are_not_kept(
    backend: str, before_the_check: list[Callable[[], None]]
) -> None:
    device, runner = make(backend)
    before = device.free_bytes()
    device.faults.append(Fault(4, "warm-up"))

    def starve() -> None:
        device.watch({"event": "bucket_begin", "num_tokens": -1})
        device.faults.append(Fault(-1, "warm-up", 3))

    before_the_check.append(starve)
    result = run(runner)
    assert_recovered(result, runner, before, 4, ())
    assert "nobody can say whether they are valid" in result.reason


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_memory_that_runs_out_in_an_eager_pass_costs_no_slots(
    call: int, before_the_check: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them are passes over prefixes, before there is a batch."""
    device, runner = make()
    before, forward, calls = device.free_bytes(), runner.forward_eager, []  # type: ignore[var-annotated]
    device.faults.append(Fault(4, "warm-up"))

    def failing(batch: Any) -> torch.Tensor:
        calls.append(batch)
        if len(calls) == call:
            raise torch.OutOfMemoryError("injected into an eager pass")
        return forward(batch)

    before_the_check.append(lambda: monkeypatch.setattr(runner, "forward_eager", failing))
    result = run(runner)
    assert len(calls) == call
    monkeypatch.undo()
    assert_recovered(result, runner, before, 4, ())


@pytest.mark.parametrize("bucket", [32, 16])
def test_buckets_that_cannot_be_captured_again_are_given_back(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, runner = make()
    before, start_again = device.free_bytes(), PrefillCudaGraphRunner.start_again
    device.faults.append(Fault(4, "capture", 1, LOST))

    def started(graphs: PrefillCudaGraphRunner) -> None:
        start_again(graphs)
        # Its events are not shown: the device still believes in the bucket that failed.
        device.watch({"event": "bucket_begin", "num_tokens": -1})
        first = undisturbed("breakable")[0][32, "warm-up"]
        device.faults.append(Fault(-1, "warm-up" if bucket == 32 else "capture", 1 if bucket == 32 else first))

    monkeypatch.setattr(PrefillCudaGraphRunner, "start_again", started)
    result = run(runner)
    assert_recovered(result, runner, before, 4, ())
    assert "could not be captured again" in result.reason
    assert result.figures == ()


def test_a_kept_bucket_that_replays_wrongly_is_dropped(before_the_check: list[Callable[[], None]]) -> None:
    device, runner = make()
    before = device.free_bytes()
    device.faults.append(Fault(4, "warm-up"))
    weight = runner.body.layers[1].mlp.down_proj.weight

    def spoil() -> None:
        # What a graph holds by address changes its place: the graph goes on with the old weights.
        runner.body.layers[1].mlp.down_proj.weight = torch.nn.Parameter(weight.detach() * 2, requires_grad=False)

    before_the_check.append(spoil)
    result = run(runner)
    runner.body.layers[1].mlp.down_proj.weight = weight
    assert_recovered(result, runner, before, 4, ())
    assert "differs from eager" in result.reason


def test_a_recovery_can_be_cancelled() -> None:
    device, runner = make()
    before = device.free_bytes()
    device.faults.append(Fault(4, "capture", 1, LOST))
    answers = iter([False, False, False, True])
    result = run(runner, cancelled=lambda: next(answers))
    assert (result.outcome, result.reason_code, result.runner) == ("cancelled", "cancelled", None)
    assert device.free_bytes() == before
    assert_nothing_is_left_open(device, runner)
    runner.policy = "ungated"
    assert captured(runner).ladder == list(LADDER)


@pytest.mark.parametrize(
    ("error", "code"), [(CaptureError("a moved buffer"), "capture_error"), (ArithmeticError("bug"), "unexpected_error")]
)
def test_any_other_failure_of_a_recovery_is_an_outcome(
    error: Exception, code: str, before_the_check: list[Callable[[], None]]
) -> None:
    device, runner = make()
    before = device.free_bytes()
    device.faults.append(Fault(4, "warm-up"))

    def fail() -> None:
        raise error

    before_the_check.append(fail)
    result = run(runner)
    assert (result.outcome, result.reason_code, result.runner) == ("failed", code, None)
    assert str(error) in result.reason
    assert device.free_bytes() == before
    assert_nothing_is_left_open(device, runner)


def test_without_a_policy_that_recovers_the_same_fault_ends_the_start() -> None:
    device, runner = make()
    runner.policy = "ungated"
    before = device.free_bytes()
    device.faults.append(Fault(4, "warm-up"))
    result = run(runner)
    assert (result.outcome, result.runner, result.oom_bucket) == ("oom", None, 4)
    assert device.free_bytes() == before
