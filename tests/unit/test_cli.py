"""The command line: one line for bad input, only JSON with --json, exit codes. No capture runs here."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from synthetic_records import made_up_record, oom_record, skipped_record

import toolkit
from toolkit.cli import _cancel_once, main
from toolkit.cli_capture import _OPTIONS
from toolkit.errors import DeviceUnavailable
from toolkit.policies import POLICIES
from toolkit.runs import worker
from toolkit.runs.record import RunRecord
from toolkit.runs.store import RunStore, new_run_id
from toolkit.settings import CaptureSettings

Reply = Callable[..., RunRecord]
RUN = "20260101-000000-00000a"


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Callable[[Reply], list[CaptureSettings]]:
    """Answer every capture with a made-up record; what was asked for is collected."""

    def install(reply: Reply) -> list[CaptureSettings]:
        asked: list[CaptureSettings] = []

        def fake(settings: CaptureSettings, on_event: Any = None) -> RunRecord:
            asked.append(settings)
            on_event({"event": "stage", "name": "load weights", "detail": None})
            on_event({"event": "log", "line": "a line of the server's log"})
            for index, tokens in enumerate((16, 8)):
                place = {"num_tokens": tokens, "index": index, "total": 2}
                on_event({"event": "bucket_begin", "free_gib": 3.9, **place})
                on_event({"event": "bucket", **place})
            return reply(id=new_run_id(), settings={"policy": settings.policy, "model": settings.model})

        monkeypatch.setattr(worker, "run_capture", fake)
        return asked

    return install


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["foretell"], "commands are capture, compare, plan"),
        (["--colour"], "--colour"),
        (["capture", "--colour"], "--colour"),
        (["capture", "extra"], "extra"),
        (["capture", "--max-tokens"], "--max-tokens"),
        (["capture", "--max-tokens", "x"], "'x'"),
        (["capture", "--max-tokens", "-5"], "-5"),
        (["capture", "--mem-fraction", "nan"], "nan"),
        (["capture", "--mem-fraction", "1.5"], "1.5"),
        (["capture", "--free-memory", "inf"], "inf"),
        (["capture", "--free-memory", "1", "--mem-fraction", "0.5"], "exclude"),
        (["capture", "--device-memory", "-1"], "-1"),
        (["capture", "--buckets", "x"], "'x'"),
        (["capture", "--buckets", ""], "bucket"),
        (["capture", "--backend", "foo"], "'foo'"),
        (["capture", "--dtype", "fp8"], "'fp8'"),
        (["capture", "--device", "tpu"], "'tpu'"),
        (["capture", "--prompt", ""], "prompt"),
        (["capture", "--policy", "strict"], "'strict' is unknown; policies are gated, ungated"),
        (["capture", "--policy", "all"], "'all'"),
        (["capture", "--model", "no-such-model"], "'no-such-model'"),
        (["capture", "--model", "a\nb\x1b[31m"], "model"),
        (["capture", "--runs-dir", ""], "--runs-dir"),
        (["capture", "--runs-dir", __file__], "no folder"),
        (["compare", "--policy", "gated,gated"], "'gated' is named twice"),
        (["compare", "--policy", "gated,"], "''"),
        (["compare", "--policy", "gated,strict"], "'strict'"),
        (["runs", "plam"], "'plam'; commands are list"),
        (["runs", "show"], "ID"),
        (["runs", "show", "../x"], "'../x'"),
        (["runs", "show", RUN], RUN),
        (["runs", "report", RUN], RUN),
        (["runs", "list", "--runs-dir", __file__], "no folder"),
        (["runs", "import", "no-such-file"], "no-such-file"),
        (["selfcheck", "--device", "tpu"], "'tpu'"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, arguments: Sequence[str], named: str
) -> None:
    assert named in refused(capsys, *arguments)
    assert not runs_dir.exists()


def test_input_found_bad_by_the_child_leaves_no_record(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, captures: Any
) -> None:
    def no_device(**_: Any) -> RunRecord:
        raise DeviceUnavailable("cuda is not on this machine", "cpu", "try --device cpu")

    captures(no_device)
    code = main(["capture", "--device", "cuda", "--json"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "prefill-lab: cuda is not on this machine; cpu; try --device cpu"
    assert not runs_dir.exists()


def test_a_long_or_unprintable_value_stays_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "capture", "--seed", "9" * 5000)
    assert len(line) < 700
    assert "\x1b" not in refused(capsys, "capture", "--backend", "\x1b[31m")


# --- capture and compare ------------------------------------------------------------------------------------


def test_capture_prints_units_and_provenance_and_saves(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, captures: Any
) -> None:
    captures(made_up_record)
    assert main(["capture"]) == 0
    out, err = capsys.readouterr()
    (saved,) = RunStore(runs_dir).list()
    assert saved.id in out
    for part in (
        "3.97 GiB",
        "synthetic cpu (accounted)",
        "GiB = 2**30 bytes",
        "next: prefill-lab runs report",
    ):
        assert part in out
    assert "\x1b" not in out + err
    assert "a line of the server's log" in err
    assert "2/2" in err


def test_json_is_all_there_is_on_standard_output(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, captures: Any
) -> None:
    captures(made_up_record)
    assert main(["capture", "--json"]) == 0
    out = capsys.readouterr().out
    assert RunRecord.from_json(out) == RunStore(runs_dir).list()[0]
    assert out.isascii()


def test_every_option_reaches_the_settings(captures: Any) -> None:
    given = {
        "model": "qwen3-0.6b", "dtype": "float32", "weights": "random", "seed": 7, "mem_fraction": 0.5,
        "backend": "full", "compiler": "inductor", "policy": "gated", "role": "draft", "buckets": (8, 16),
        "chunked_prefill_size": 64, "request_slots": 2, "max_context": 128, "device": "cpu",
        "device_memory_gib": 4.0, "prompt": "hello",
    }  # fmt: skip
    asked = captures(made_up_record)
    arguments = []
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        arguments += [_OPTIONS[name][0], text]
    assert main(["capture", *arguments]) == 0
    assert main(["capture", "--free-memory", "2", "--max-tokens", "9"]) == 0
    assert asked == [
        CaptureSettings.create(**given),
        CaptureSettings.create(free_memory_gib=2.0, max_tokens=9),
    ]
    assert set(_OPTIONS) == set(CaptureSettings.model_fields)


@pytest.mark.parametrize(("reply", "code"), [(made_up_record, 0), (skipped_record, 0), (oom_record, 1)])
def test_the_exit_code_is_that_of_the_outcome(
    capsys: pytest.CaptureFixture[str], captures: Any, reply: Reply, code: int
) -> None:
    captures(reply)
    assert main(["capture"]) == code
    assert reply().reason in capsys.readouterr().out


def test_compare_is_side_by_side_and_fails_with_any_of_its_runs(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, captures: Any
) -> None:
    def reply(settings: dict[str, Any], **values: Any) -> RunRecord:
        make = oom_record if settings["policy"] == "ungated" else skipped_record
        return make(settings=settings, **values)

    asked = captures(reply)
    assert main(["compare", "--policy", "all", "--seed", "3"]) == 1
    assert [(one.policy, one.seed) for one in asked] == [(name, 3) for name in POLICIES]
    out = capsys.readouterr().out
    assert all(name in out for name in POLICIES)
    assert re.search(r"outcome +skipped +oom", out)
    assert re.search(r"runner +EagerRunner +n/a", out)
    assert len(RunStore(runs_dir).list()) == len(POLICIES)


def test_compare_as_json_has_all_runs_and_what_a_mix_of_prompts_costs(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, captures: Any, tmp_path: Path
) -> None:
    captures(made_up_record)
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("length,count\n8,3\n600,1\n")
    assert main(["compare", "--json", "--traffic", str(lengths)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [run["settings"]["policy"] for run in printed["runs"]] == list(POLICIES)
    rows = printed["comparison"]["rows"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    # 600 tokens are over the largest bucket, 512: one prefill of four.
    assert {row["eager_percent"] for row in rows} == {25.0}
    assert "lengths.csv" in printed["comparison"]["mix"]


def test_a_traffic_that_cannot_be_read_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, captures: Any
) -> None:
    asked = captures(made_up_record)
    assert main(["compare", "--traffic", "/nowhere/at/all.csv"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert asked == []


def test_compare_json_can_be_imported_again(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, tmp_path: Path, captures: Any
) -> None:
    captures(made_up_record)
    assert main(["compare", "--policy", "ungated,gated", "--json"]) == 0
    file = tmp_path / "compare.json"
    file.write_text(capsys.readouterr().out)
    assert [run["settings"]["policy"] for run in json.loads(file.read_text())["runs"]] == ["ungated", "gated"]
    assert main(["runs", "import", str(file), "--runs-dir", str(tmp_path / "other")]) == 0
    assert RunStore(tmp_path / "other").list() == RunStore(runs_dir).list()


def test_a_comparison_ends_with_the_run_that_was_cancelled(capsys: pytest.CaptureFixture[str], captures: Any) -> None:
    asked = captures(lambda **values: made_up_record(outcome="cancelled", runner=None, **values))
    assert main(["compare", "--json"]) == 1
    assert len(asked) == 1
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 1


def test_a_record_that_cannot_be_saved_is_shown_all_the_same(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, monkeypatch: pytest.MonkeyPatch, captures: Any
) -> None:
    captures(made_up_record)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main(["capture", "--json"]) == 1
    out, err = capsys.readouterr()
    assert RunRecord.from_json(out).outcome == "captured"
    assert "No space left" in err.splitlines()[-1]
    assert not runs_dir.exists()


# --- the rest -----------------------------------------------------------------------------------------------


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"prefill-lab {toolkit.__version__}\n"
    for arguments in ([], ["--help"], ["capture", "--help"], ["runs"], ["runs", "show", "--help"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith("Usage: prefill-lab")


def test_without_jupyter_lab_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.cli_extras.find_spec", lambda name: None)
    assert "pip install 'prefill-lab[lab]'" in refused(capsys, "lab")


def test_the_package_offers_what_it_names() -> None:
    assert set(toolkit.__all__) <= set(dir(toolkit))
    assert all(getattr(toolkit, name) is not None for name in toolkit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'captur'"):
        _ = toolkit.captur


def test_capture_and_compare_from_python(runs_dir: Path, captures: Any) -> None:
    asked = captures(made_up_record)
    record = toolkit.capture(max_tokens=64, on_event=lambda event: None)
    assert RunStore(runs_dir).list() == [record]
    assert asked == [CaptureSettings.create(max_tokens=64)]
    both = toolkit.compare(free_memory_gib=3.99, save=False, on_event=lambda event: None)
    assert [one.settings["policy"] for one in both] == list(POLICIES)
    assert len(RunStore(runs_dir).list()) == 1


def test_the_first_sigterm_cancels_and_the_second_is_ignored() -> None:
    """`timeout` signals the command and then its whole group."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            _cancel_once(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
