"""The command line with the engine behind it, as a person runs it: processes, pipes, Ctrl-C, exit codes."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from toolkit.policies import POLICIES
from toolkit.runs.record import RunRecord
from toolkit.runs.store import RunStore
from toolkit.runs.worker import CaptureJob
from toolkit.settings import CaptureSettings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CPU = ("--device", "cpu")
# Random weights: nothing to load, and what is checked here does not depend on what the model knows.
SMALL = (*CPU, "--weights", "random", "--buckets", "8,16,32")
COMMAND = (sys.executable, "-m", "toolkit.cli")
# The same command with a stand-in of test_worker.py in place of the engine, for what is not about the engine.
STAND_IN = """
import functools, sys
from toolkit.runs import worker
worker.run_capture = functools.partial(worker.run_capture, executor="test_worker:{name}")
from toolkit.cli import main
sys.exit(main())
"""

engine = pytest.mark.skipif(
    find_spec("toolkit.runs.execute") is None,
    reason="toolkit.runs.execute is not written yet; ends when it is",
)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}


def prefill_lab(*arguments: str, command: tuple[str, ...] = COMMAND) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], cwd=HERE, env=environment(), capture_output=True, text=True, timeout=300
    )


def stand_in(name: str) -> tuple[str, ...]:
    return (sys.executable, "-c", STAND_IN.format(name=name))


# --- the engine ---------------------------------------------------------------------------------------------


@engine
def test_a_capture_says_what_it_took_and_nothing_about_who_ran_it(runs_dir: Path) -> None:
    ended = prefill_lab("capture", *SMALL, "--json")
    assert ended.returncode == 0, ended.stderr
    record = RunRecord.from_json(ended.stdout)
    assert (record.outcome, record.runner, record.device_label) == (
        "captured",
        "PrefillCudaGraphRunner",
        "cpu (accounted)",
    )
    assert [bucket.num_tokens for bucket in record.buckets] == [32, 16, 8] == record.capture_order
    assert record.replay_check is not None
    assert record.replay_check.bit_equal
    for figure in (
        record.free_before_gib,
        record.free_after_gib,
        record.mem_usage_gib,
        record.capture_time_s,
    ):
        assert figure is not None and figure >= 0
    assert RunStore(runs_dir).list() == [record]
    (saved,) = runs_dir.iterdir()
    for text in (ended.stdout, saved.read_text()):
        assert not re.findall(r"(?<![\w.~>/<])/(?:[\w.-]+/)+[\w.-]*", text)
        assert str(Path.home()) not in text
        for name in (getpass.getuser(), socket.gethostname()):
            assert name in ("root", "localhost") or not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)


@engine
def test_the_gate_skips_below_four_gib_and_without_it_the_same_start_is_captured(runs_dir: Path) -> None:
    ended = prefill_lab("compare", *SMALL, "--free-memory", "3.99", "--policy", "gated,ungated", "--json")
    assert ended.returncode == 0, ended.stderr
    gated, ungated = (RunRecord.model_validate(run) for run in json.loads(ended.stdout)["runs"])
    assert (gated.outcome, gated.runner, gated.buckets) == ("skipped", "EagerRunner", [])
    assert (ungated.outcome, ungated.runner) == ("captured", "PrefillCudaGraphRunner")
    assert len(RunStore(runs_dir).list()) == 2


@engine
def test_too_little_memory_is_an_outcome_with_a_record_and_exit_code_1(runs_dir: Path) -> None:
    ended = prefill_lab("capture", *CPU, "--weights", "random", "--buckets", "8,4096", "--free-memory", "0.01")
    assert ended.returncode == 1, ended.stderr
    (record,) = RunStore(runs_dir).list()
    assert (record.outcome, record.runner) == ("oom", None)
    assert record.oom_bucket is not None
    assert record.advice
    assert record.id in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


@engine
def test_a_device_that_is_not_there_is_bad_input(runs_dir: Path) -> None:
    # A card number that no machine has, so that the answer is the same with and without a GPU.
    ended = prefill_lab("capture", "--device", "cuda:99", "--weights", "random", "--json")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1].startswith("prefill-lab: ")
    assert "cuda" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert not runs_dir.exists()


@engine
def test_the_engine_killed_in_mid_capture_leaves_a_record_and_a_working_machine() -> None:
    settings = CaptureSettings.create(device="cpu", weights="random", max_tokens=256)
    with CaptureJob(settings).start() as job:
        done = 0
        for event in job.events():
            done += event["event"] == "bucket"
            if event["event"] == "bucket_begin" and done == 2:
                assert job.pid is not None
                os.kill(job.pid, signal.SIGKILL)
        record = job.wait(30)
    assert (record.outcome, record.signal, record.runner) == ("crashed", "SIGKILL", None)
    assert len(record.buckets) >= 2
    assert record.free_before_gib is not None
    assert record.free_after_gib is None
    assert record.device_label == "cpu (accounted)"
    assert CaptureJob(settings.with_changes(max_tokens=16)).start().wait(120).outcome == "captured"


@engine
def test_the_engine_stops_between_two_buckets_when_asked() -> None:
    settings = CaptureSettings.create(device="cpu", weights="random", max_tokens=512)
    with CaptureJob(settings).start() as job:
        for event in job.events():
            if event["event"] == "bucket":
                job.cancel(grace_s=60)
        record = job.wait(60)
    assert (record.outcome, record.runner, record.signal) == ("cancelled", None, None), record.reason
    assert 1 <= len(record.buckets) < 30


# --- the command itself -------------------------------------------------------------------------------------


def test_ctrl_c_gives_a_cancelled_record_and_exit_code_1(runs_dir: Path) -> None:
    running = subprocess.Popen(
        [*stand_in("polite"), "capture", "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stderr is not None
    assert "load weights" in running.stderr.readline()
    time.sleep(0.3)
    os.killpg(running.pid, signal.SIGINT)  # A terminal sends it to the whole group.
    out, err = running.communicate(timeout=30)
    assert running.returncode == 1, err
    assert RunRecord.from_json(out).outcome == "cancelled"
    assert [record.outcome for record in RunStore(runs_dir).list()] == ["cancelled"]
    assert "Traceback" not in err


@pytest.mark.parametrize("streams", ["1", "1 and 2"])
def test_a_reader_that_leaves_early_costs_neither_the_record_nor_a_traceback(
    runs_dir: Path, tmp_path: Path, streams: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    errors = tmp_path / "stderr"
    with errors.open("w") as file:
        code = subprocess.run(
            [*stand_in("quick"), "compare"],
            env=environment(),
            stdout=writing,
            stderr=writing if streams == "1 and 2" else file,
            timeout=60,
        ).returncode
    os.close(writing)
    assert code == 0
    assert len(RunStore(runs_dir).list()) == len(POLICIES)
    assert "Traceback" not in errors.read_text()
    assert "BrokenPipe" not in errors.read_text()


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_any_locale_can_print_any_record(runs_dir: Path, locale: str) -> None:
    settings: dict[str, Any] = {"LC_ALL": locale, "PYTHONIOENCODING": "ascii" if locale == "C" else "utf-8"}
    for arguments in (("capture", "--prompt", "日本 é"), ("runs", "list")):
        ended = subprocess.run(
            [*stand_in("quick"), *arguments], env=environment() | settings, capture_output=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        assert b"\x1b" not in ended.stdout + ended.stderr
    assert RunStore(runs_dir).list()[0].settings["prompt"] == "日本 é"
