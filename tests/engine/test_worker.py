"""The child process: whatever happens to it, the parent gets a record, and it never outlives the parent.

These tests are about the processes, so the child runs one of the stand-ins below instead of the engine. It
imports this very file to find them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import CaptureCancelled, CaptureError, DeviceUnavailable, InvalidInput
from toolkit.runs.record import RunRecord
from toolkit.runs.worker import CaptureJob, run_capture
from toolkit.settings import CaptureSettings

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
SETTINGS = CaptureSettings.create(device="cpu", max_tokens=64)
LADDER = [64, 48, 32]
Emit = Callable[[dict[str, Any]], None]

# --- stand-ins for toolkit.runs.execute.execute, run by the child -------------------------------------------


def done(settings: CaptureSettings, run_id: str, created: str, **changes: Any) -> RunRecord:
    values = {"outcome": "captured", "runner": "PrefillCudaGraphRunner", "reason": "all buckets", **changes}
    shared = {"settings": settings.model_dump(mode="json"), "device": {"label": "stand-in"}, "software": {}}
    return RunRecord(id=run_id, created=created, **shared, **values)


def begin(emit: Emit, index: int) -> None:
    place = {"num_tokens": LADDER[index], "index": index, "total": len(LADDER)}
    emit({"event": "bucket_begin", "free_gib": 3.9 - index, **place})


def finish(emit: Emit, index: int) -> None:
    times = {"elapsed_s": 0.3, "warmup_s": 0.1, "capture_s": 0.2, "added_mib": 1.5, "cumulative_mib": 1.5}
    place = {"num_tokens": LADDER[index], "index": index, "total": len(LADDER)}
    emit({"event": "bucket", "segments": 31, "graph_nodes": None, **place, **times})


def start(emit: Emit) -> None:
    emit({"event": "stage", "name": "load weights", "detail": "stand-in"})
    emit({"event": "facts", "device": {"label": "cpu (accounted)"}, "kv_cache_tokens": 1234})
    emit({"event": "ladder", "buckets": sorted(LADDER)})
    emit({"event": "stage", "name": "capture", "detail": None})
    emit({"event": "log", "line": "Capture target prefill CUDA graph begin."})


def quick(settings: CaptureSettings, emit: Emit, cancelled: Any, *, run_id: str, created: str) -> RunRecord:
    start(emit)
    for index in range(len(LADDER)):
        begin(emit, index)
        finish(emit, index)
    return done(settings, run_id, created)


def noisy(settings: CaptureSettings, emit: Emit, cancelled: Any, **names: str) -> RunRecord:
    print('{"event": "record", "record": "a forgery"}')
    os.write(1, b"bytes to descriptor 1\n")
    subprocess.run(["echo", "a grandchild speaks"], check=True)
    try:
        input("a question: ")
    except EOFError:
        print("no answer")
    return quick(settings, emit, cancelled, **names)


def stuck(settings: CaptureSettings, emit: Emit, cancelled: Any, **names: str) -> RunRecord:
    """Computes without end and never looks at `cancelled`, with a process of its own beside it."""
    start(emit)
    begin(emit, 0)
    finish(emit, 0)
    helper = subprocess.Popen(["sleep", "60"])
    emit({"event": "note", "text": f"helper {helper.pid}"})
    begin(emit, 1)
    while True:
        sum(range(1000))


def polite(
    settings: CaptureSettings, emit: Emit, cancelled: Callable[[], bool], *, run_id: str, created: str
) -> RunRecord:
    start(emit)
    for _ in range(1000):
        if cancelled():
            return done(settings, run_id, created, outcome="cancelled", runner=None, reason="between two buckets")
        begin(emit, 0)
        time.sleep(0.02)
        finish(emit, 0)
    raise AssertionError("nobody cancelled")


def raising(settings: CaptureSettings, emit: Emit, cancelled: Any, **names: str) -> RunRecord:
    start(emit)
    begin(emit, 0)
    kinds: dict[int, BaseException] = {
        0: ValueError(f"a bug at {HERE}"),
        1: SystemExit(3),
        2: CaptureCancelled("asked to stop"),
        3: DeviceUnavailable("cuda is not here", "cpu", "try --device cpu"),
    }
    raise kinds[settings.seed]


def dying(settings: CaptureSettings, emit: Emit, cancelled: Any, **names: str) -> RunRecord:
    import ctypes

    start(emit)
    begin(emit, 0)
    if settings.seed == 0:
        ctypes.string_at(0)
    os._exit(settings.seed)


# --- helpers ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def child_finds_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))


def job(name: str, **choices: Any) -> CaptureJob:
    return CaptureJob(SETTINGS.with_changes(**choices), executor=f"{HERE.stem}:{name}")


def run(name: str, **choices: Any) -> RunRecord:
    return run_capture(SETTINGS.with_changes(**choices), executor=f"{HERE.stem}:{name}")


def gone(pid: int, within_s: float) -> bool:
    """Whether a process ends in time. One that ended but was not waited for counts as ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def until(running: CaptureJob, event: str, count: int = 1) -> list[dict[str, Any]]:
    """Events up to the `count`-th of this kind."""
    seen = []
    for one in running.events():
        seen.append(one)
        count -= one["event"] == event
        if not count:
            return seen
    raise AssertionError(f"the child ended before {event}: {running.wait()}")


# --- a good end ---------------------------------------------------------------------------------------------


def test_events_come_in_order_and_the_record_last() -> None:
    with job("quick").start() as running:
        kinds = [event["event"] for event in running.events()]
        record = running.wait(10)
    assert kinds == ["stage", "facts", "ladder", "stage", "log", *["bucket_begin", "bucket"] * 3]
    assert (record.outcome, record.id, record.created) == ("captured", running.run_id, running.created)
    assert not running.running
    assert list(running.events()) == []
    assert running.poll() == []
    assert running.wait() == record


def test_poll_gives_what_is_there_without_waiting() -> None:
    running = job("quick")
    assert (running.pid, running.running, running.poll()) == (None, False, [])
    running.start()
    seen = []
    while running.running:
        seen += running.poll()
        time.sleep(0.01)
    assert [event["event"] for event in [*seen, *running.poll()]].count("bucket") == 3


def test_prints_of_libraries_do_not_reach_the_events() -> None:
    with job("noisy").start() as running:
        kinds = {event["event"] for event in running.events()}
        record = running.wait(10)
    assert record.outcome == "captured"
    assert kinds == {"stage", "facts", "ladder", "log", "bucket_begin", "bucket"}


@pytest.mark.parametrize("cwd", ["/", "."])
def test_it_works_from_any_folder_and_without_a_main_guard(tmp_path: Path, cwd: str) -> None:
    script = tmp_path / "no_guard.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from toolkit.runs.worker import run_capture\n"
        "from toolkit.settings import CaptureSettings\n"
        f"record = run_capture(CaptureSettings.create(), executor='{HERE.stem}:quick')\n"
        "print(record.outcome, 'torch' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, script], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "captured False\n", ended.stderr


def test_a_job_runs_once_and_not_before_it_was_started() -> None:
    running = job("quick")
    with pytest.raises(CaptureError, match="not started"):
        running.wait()
    running.start().wait(10)
    with pytest.raises(CaptureError, match="runs once"):
        running.start()


# --- crashes ------------------------------------------------------------------------------------------------


def test_killed_in_mid_capture_is_a_crash_with_what_was_seen_and_no_orphan() -> None:
    with job("stuck").start() as running:
        seen = until(running, "bucket_begin", 2)
        helper = int(next(event["text"] for event in seen if event["event"] == "note").split()[1])
        assert running.pid is not None
        os.kill(running.pid, signal.SIGKILL)
        record = running.wait(10)
    assert (record.outcome, record.signal, record.runner, record.exit_code) == ("crashed", "SIGKILL", None, 1)
    assert "bucket 48 (1 of 3 buckets were captured)" in record.reason
    assert [bucket.num_tokens for bucket in record.buckets] == [64]
    assert record.capture_order == LADDER
    assert (record.free_before_gib, record.kv_cache_tokens) == (3.9, 1234)
    assert (record.free_after_gib, record.mem_usage_gib, record.replay_check) == (None, None, None)
    assert record.device_label == "cpu (accounted)"
    assert record.log == ["Capture target prefill CUDA graph begin."]
    assert gone(running.pid, 1)
    assert gone(helper, 1)
    assert run("quick").outcome == "captured"


def test_a_segmentation_fault_is_named() -> None:
    record = run("dying")
    assert (record.outcome, record.signal) == ("crashed", "SIGSEGV")
    assert "bucket 64" in record.reason
    assert "Fatal Python error: Segmentation fault" in record.reason
    assert record.model_extra is not None
    assert record.model_extra["stderr_tail"]


def test_leaving_without_a_word_is_a_crash() -> None:
    record = run("dying", seed=5)
    assert (record.outcome, record.signal) == ("crashed", None)
    assert "exit code 5" in record.reason


@pytest.mark.parametrize(("seed", "named"), [(0, "ValueError: a bug at"), (1, "SystemExit: 3")])
def test_a_traceback_is_a_failure_with_its_last_line(seed: int, named: str) -> None:
    record = run("raising", seed=seed)
    assert (record.outcome, record.runner, record.signal) == ("failed", None, None)
    assert record.reason.startswith(named)
    assert "bucket 64" in record.reason
    assert str(ROOT) not in record.to_json()


def test_input_refused_by_the_child_is_raised_as_it_was() -> None:
    with pytest.raises(DeviceUnavailable, match="cuda is not here; cpu; try --device cpu"):
        run("raising", seed=3)


@pytest.mark.parametrize("choices", [{"policy": "strict"}, {"model": "no-such-model"}])
def test_bad_names_are_refused_before_a_process_is_started(choices: dict[str, str]) -> None:
    running = job("quick", **choices)
    with pytest.raises(InvalidInput):
        running.start()
    assert running.pid is None


# --- cancelling ---------------------------------------------------------------------------------------------


def test_cancel_stops_between_two_buckets() -> None:
    with job("polite").start() as running:
        until(running, "bucket", 2)
        running.cancel()
        record = running.wait(10)
    assert (record.outcome, record.reason, record.signal) == ("cancelled", "between two buckets", None)
    running.cancel()  # Too late is no error.


def test_a_child_that_does_not_listen_is_ended() -> None:
    with job("stuck").start() as running:
        until(running, "bucket_begin", 2)
        began = time.monotonic()
        running.cancel(grace_s=0.2)
        record = running.wait(10)
    assert time.monotonic() - began < 5
    assert (record.outcome, record.signal, record.runner) == ("cancelled", "SIGTERM", None)
    assert "bucket 48" in record.reason


def test_the_engine_may_answer_a_cancel_by_raising() -> None:
    assert run("raising", seed=2).outcome == "cancelled"


def test_ctrl_c_in_the_parent_gives_a_cancelled_record() -> None:
    seen: list[str] = []

    def watch(event: dict[str, Any]) -> None:
        seen.append(event["event"])
        if seen.count("bucket") == 2 and event["event"] == "bucket":
            threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()

    record = run_capture(SETTINGS, watch, executor=f"{HERE.stem}:polite")
    assert (record.outcome, record.exit_code) == ("cancelled", 1)


def test_an_error_of_the_watcher_leaves_no_child_behind() -> None:
    pids: list[int] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "note":
            pids.append(int(event["text"].split()[1]))
        if event["event"] == "bucket_begin" and event["index"] == 1:
            raise RuntimeError("the watcher broke")

    with pytest.raises(RuntimeError, match="the watcher broke"):
        run_capture(SETTINGS, watch, executor=f"{HERE.stem}:stuck")
    assert gone(pids[0], 5)


# --- the parent's end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a fork that holds the pipe"])
def test_the_child_ends_when_the_parent_is_killed(fork: bool) -> None:
    script = (
        f"import sys, os, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from toolkit.runs.worker import CaptureJob\n"
        "from toolkit.settings import CaptureSettings\n"
        f"job = CaptureJob(CaptureSettings.create(), executor='{HERE.stem}:stuck').start()\n"
        "seen = next(event for event in job.events() if event['event'] == 'note')\n"
        f"other = os.fork() if {fork} else 1\n"
        "helper = seen['text'].split()[1]\n"
        "if other: print(job.pid, helper, other, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, helper, other = map(int, parent.stdout.readline().split())
    try:
        parent.kill()
        parent.wait()
        assert gone(child, 3)
        assert gone(helper, 1)
    finally:
        parent.stdout.close()
        if fork:
            os.kill(other, signal.SIGKILL)
