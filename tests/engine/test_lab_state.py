"""The Lab without a front end: captures queue, follow, cancel and end; runs are kept and found again."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import CaptureError, InvalidInput, PrefillLabError, RecordError, StorageError
from toolkit.widgets.state import LabState

HERE = Path(__file__).resolve().parent
Make = Callable[..., LabState]


@pytest.fixture
def lab(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a Lab whose child runs a stand-in; ends what it left running."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    made: list[LabState] = []

    def make(stand_in: str = "three_buckets", **settings: Any) -> LabState:
        made.append(LabState(executor=f"stand_ins:{stand_in}", **{"device": "cpu", **settings}))
        return made[-1]

    yield make
    for state in made:
        state.close()


def until(true: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_a_capture_is_followed_shown_saved_and_found_again(lab: Make) -> None:
    state = lab()
    seen: list[Any] = []
    state.observe(lambda change: seen.append(change["new"]), "record")
    state.capture()
    record = state.wait(30)
    assert record is not None and record.outcome == "captured" and len(record.buckets) == 3
    assert state.record == record and state.runs == (record,)
    assert {len(live.buckets) for live in seen if live.is_running} <= {0, 1, 2, 3}
    assert seen[0].is_running and seen[0].device_label == "cpu (accounted)"
    assert not state.activity.running and record.id in state.message
    again = lab()
    assert again.runs == (record,)
    again.show(record.id)
    assert again.record == record and again.num_tokens == 64


def test_a_second_capture_waits_its_turn_and_says_so(lab: Make) -> None:
    state = lab("until_cancelled")
    state.capture()
    until(lambda: state.record is not None and state.record.buckets)
    state.capture()
    assert "waits its turn" in state.message and "1 waiting" in state.activity.words
    first = state.record.id
    state.cancel()
    assert "cancelling" in state.activity.words
    until(lambda: state.record is not None and state.record.id != first)
    state.cancel()
    last = state.wait(30)
    assert [run.outcome for run in state.runs] == ["cancelled", "cancelled"]
    assert last == state.runs[0] and state.runs[1].id == first


def test_a_cancel_right_after_the_button_is_not_lost(lab: Make) -> None:
    state = lab("until_cancelled")
    state.cancel()
    assert state.message == "nothing is running"
    for _ in range(5):
        state.capture()
        state.cancel()
        record = state.wait(30)
        assert record is not None and record.outcome == "cancelled"


def test_clear_forgets_what_waits_and_keeps_what_runs(lab: Make) -> None:
    state = lab("until_cancelled")
    state.capture()
    until(lambda: state.record is not None and state.record.buckets)
    state.capture()
    state.clear()
    assert state.record is None and "1 that waited will not run" in state.message
    state.cancel()
    record = state.wait(30)
    assert record is not None and state.runs == (record,)
    assert state.record is None, "what was cleared does not come back by itself"


def test_a_child_that_is_killed_is_a_record_with_advice(lab: Make) -> None:
    state = lab("until_cancelled")
    state.capture()
    until(lambda: state.record is not None and state.record.buckets)
    assert state.child_pid is not None
    os.kill(state.child_pid, signal.SIGKILL)
    record = state.wait(30)
    assert record is not None and record.outcome == "crashed" and record.signal == "SIGKILL" and record.advice


def test_what_cannot_be_captured_is_refused_before_anything_starts(lab: Make, runs_dir: Path) -> None:
    state = lab()
    state.change(model="nonsense")
    with pytest.raises(InvalidInput, match="nonsense"):
        state.capture()
    state.change(model="smollm2-135m")
    runs_dir.write_text("a file")
    with pytest.raises(InvalidInput, match="no folder"):
        state.capture()
    assert not state.activity.running and state.wait(1) is None


def test_a_record_that_cannot_be_saved_is_still_shown(lab: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    state = lab()

    def full(record: object) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(state.store, "save", full)
    state.capture()
    record = state.wait(30)
    assert record is not None and state.record == record and "no space left" in state.message


def test_a_listener_that_fails_does_not_stop_the_queue(lab: Make, caplog: pytest.LogCaptureFixture) -> None:
    state = lab()

    def broken(change: object) -> None:
        raise RuntimeError("a bug in a view")

    state.observe(broken, "activity")
    with pytest.raises(RuntimeError):
        state.capture()
    assert state.wait(30) is not None
    assert "a listener of the capture queue failed" in caplog.text


def test_a_capture_that_cannot_be_followed_gives_way_to_the_next(lab: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    state = lab("nonsense")
    state.capture()
    with pytest.raises(PrefillLabError, match="cannot be read"):
        state.wait(30)
    assert state.message.startswith("refused") and not state.activity.running

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(CaptureError, match="no thread"):
            state.capture()
    state.capture()
    with pytest.raises(PrefillLabError, match="cannot be read"):
        state.wait(30)


def test_clear_while_one_ends_leaves_the_lab_idle(lab: Make) -> None:
    state = lab()
    real = state.ended

    def ended_then_cleared(*given: Any) -> None:
        real(*given)
        state.clear()

    state.ended = ended_then_cleared  # type: ignore[method-assign]
    state.capture()
    state.capture()
    state.wait(30)
    assert len(state.runs) == 1 and not state.activity.running and not state.activity.cancelling


def test_any_run_can_be_shown_by_its_record_or_id(lab: Make) -> None:
    state = lab()
    other = lab()
    other.capture()
    record = other.wait(30)
    assert record is not None and state.runs == ()
    state.show(record.id)
    assert state.record == record and state.runs == (record,)
    state.show(None)
    state.show(record)
    assert state.record == record
    with pytest.raises(RecordError):
        state.show("20200101-000000-abcdef")


def test_what_ends_while_the_folder_is_read_stays_in_the_list(lab: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    state, ended = lab(), []
    scan = state.store.scan

    def scan_then_end() -> Any:
        found = scan()
        state.capture()
        ended.append(state.wait(30))
        return found

    monkeypatch.setattr(state.store, "scan", scan_then_end)
    state.find_runs()
    assert state.runs == (ended[0],)


def test_a_closed_lab_is_freed_with_its_widgets(runs_dir: Path) -> None:
    from toolkit.widgets.lab import Lab

    made = Lab(device="cpu")
    assert made.view is made.view
    state = weakref.ref(made.state)
    made.close()
    del made
    # A thread that draws or foresees may hold it longer: the first forecast imports torch.
    until(lambda: all(thread.name != "lab-painter" for thread in threading.enumerate()), 60)
    until(lambda: gc.collect() is not None and state() is None)
    assert Lab(device="cpu").view is not None  # what was closed was that Lab's alone


def test_an_older_run_stays_in_sight_while_another_one_runs(lab: Make) -> None:
    state = lab()
    state.capture()
    older = state.wait(30)
    assert older is not None
    state.capture()
    until(lambda: state.activity.running and state.record is not None and state.record.id != older.id)
    state.show(older.id)
    state.wait(30)
    assert state.record == older


def test_auto_moves_the_fraction_and_a_hand_on_it_ends_auto(lab: Make) -> None:
    state = lab(max_tokens=2048)
    assert state.mem_fraction == pytest.approx(0.504)
    state.pick(mem_fraction=0.7)
    assert not state.auto_fraction and state.settings.mem_fraction == 0.7
    state.pick(mem_fraction="auto")
    assert state.mem_fraction == pytest.approx(0.504)


def test_what_has_no_control_is_kept(lab: Make) -> None:
    state = lab(prompt="The capital of France is", seed=3)
    assert state.settings.prompt == "The capital of France is" and state.settings.seed == 3


def test_two_policies_run_side_by_side_under_the_same_settings(lab: Make) -> None:
    state = lab(seed=3)
    state.capture_pair("gated", "budgeted")
    assert "two captures asked for (gated, then budgeted)" in state.message and state.activity.waiting == 1
    state.wait(60)
    assert state.record is not None and state.other is not None
    assert [run.settings["policy"] for run in (state.record, state.other)] == ["gated", "budgeted"]
    assert {**state.record.settings, "policy": ""} == {**state.other.settings, "policy": ""}
    assert state.runs == (state.other, state.record)
    assert (state.first_policy, state.second_policy) == ("gated", "budgeted")


def test_the_same_policy_twice_is_refused_and_nothing_runs(lab: Make) -> None:
    state = lab()
    for pair in (("gated", "gated"), ("gated", "nonsense")):
        with pytest.raises(InvalidInput, match=r"picked twice|nonsense"):
            state.capture_pair(*pair)
    assert not state.activity.running and state.runs == ()


def test_a_pair_that_is_cleared_shows_nothing_when_it_ends(lab: Make) -> None:
    state = lab("until_cancelled")
    state.capture_pair("ungated", "capture_first")
    until(lambda: state.record is not None and state.record.buckets)
    state.clear()
    state.cancel()
    state.wait(30)
    assert state.record is None and state.other is None and len(state.runs) == 1


def test_reserve_and_later_need_are_controls_and_settings(lab: Make) -> None:
    state = lab(reserve_gib=0.25, post_capture_gib=1)
    assert (state.reserve, state.later) == ("0.25", "1.0")
    state.pick(post_capture_mib_per_1k=5.3, longest_prompt=98304)
    # 1 GiB and 5.3 MiB x 96 of 1024 tokens.
    assert state.settings.post_capture_need_gib == pytest.approx(1 + 5.3 * 96 / 1024)
    state.pick(reserve_gib=None)
    assert state.reserve == "" and state.settings.reserve_gib is None


@pytest.mark.parametrize("policy", ["budgeted", "capture_first"])
def test_what_is_foreseen_is_what_a_run_measures(policy: str, runs_dir: Path) -> None:
    tight = {"device_memory_gib": 0.6, "mem_fraction": 0.9, "buckets": (8, 512)}
    state = LabState(device="cpu", policy=policy, **tight)
    assert state.preview is not None and not state.preview.foreseen
    seen = state.foresee().verdicts[policy]
    assert state.preview.foreseen and seen.kind == {"budgeted": "trimmed", "capture_first": "captured"}[policy]
    state.capture()
    record = state.wait(300)
    state.close()
    assert record is not None and record.outcome == "captured"
    assert seen.kv_tokens == record.kv_cache_tokens and list(seen.trimmed) == record.trimmed
    assert record.decision is not None and record.decision["reason"] in record.reason


def test_a_forecast_follows_the_controls_and_stays_for_another_policy(runs_dir: Path) -> None:
    state = LabState(device="cpu", buckets=(8, 32))
    assert state.foresee().foreseen
    state.pick(policy="budgeted")
    assert state.preview.foreseen and state.preview.skips is False
    state.pick(reserve_gib=0.125)
    assert not state.preview.foreseen and state.preview.skips is None
    state.change(model="somebody/something")
    assert "no forecast" in state.foresee().verdicts["budgeted"].words


def test_fifty_captures_cancelled_at_random_moments_leave_nothing_behind(runs_dir: Path) -> None:
    paths = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "fifty_cancels.py")]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **paths}, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    left = json.loads(ran.stdout)
    print(f"after 50 captures: {left}")
    assert left["threads"] <= 0 and left["children"] == 0
    assert left["memory_mib"] < 50
    assert left["runs"] == 53 and left["drawn"]
