"""`prefill-lab ladder`: only JSON with --json, one line for bad input, and never a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_records import made_up_record

from toolkit.cli import main
from toolkit.runs.store import RunStore

ROOT = Path(__file__).resolve().parents[2]
TTS = os.fspath(ROOT / "tests" / "data" / "traffic" / "omni_1900_tts.csv")
LINE = (
    "[2026-08-27 00:00:52 TP0] Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, token usage: 0.00, "
    "#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: {graph}, input throughput (token/s): 3.50\n"
)


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["ladder", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, object] = json.loads(out)
    return found


def test_json_has_the_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, TTS, "--max-tokens", "512", "--max-buckets", "19")
    assert set(found) == {
        *("ladder", "server_flags", "sglang_version", "replay_limit", "traffic", "cost", "limits", "exact"),
        *("gain_over_default", "coverage", "notes", "held_out", "empty_because", "kept"),
    }
    assert len(found["ladder"]) == 19  # type: ignore[arg-type]
    assert found["coverage"]["proposal"]["eager_share"] == 0  # type: ignore[index]
    assert 0.39 < found["coverage"]["default"]["eager_share"] < 0.42  # type: ignore[index]
    assert found["coverage"]["default"]["memory_gib"] is None  # type: ignore[index]


def test_a_table_says_what_is_gained_and_how_to_set_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", TTS, "--max-tokens", "512", "--max-buckets", "4"]) == 0
    out = capsys.readouterr().out
    for words in ("40.59%", "0.00%", "--cuda-graph-bs-prefill", "assumed, not measured", "n/a", "3,203 prefills"):
        assert words in out


def test_the_flags_are_one_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, TTS, "--max-buckets", "2", "--step", "8")
    ladder = [str(bucket) for bucket in found["ladder"]]  # type: ignore[attr-defined]
    assert all(int(bucket) % 8 == 0 for bucket in ladder)
    assert found["server_flags"] == ["--cuda-graph-max-bs-prefill", ladder[-1], "--cuda-graph-bs-prefill", *ladder]


def test_the_ceiling_can_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert 512 not in _json(capsys, TTS, "--max-tokens", "512")["ladder"]  # type: ignore[operator]
    assert 512 in _json(capsys, TTS, "--max-tokens", "512", "--keep-ceiling")["ladder"]  # type: ignore[operator]
    assert main(["ladder", TTS, "--max-tokens", "512", "--keep-ceiling", "--max-buckets", "1"]) == 2
    assert "keeps the ceiling" in capsys.readouterr().err


def test_a_budget_too_small_says_so_and_how_much_the_smallest_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", TTS, "--model", "qwen3-8b", "--gpu", "h100-80gb", "--memory", "0.2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no bucket: nothing fits: a ladder of the bucket 1 alone takes" in out
    assert "the memory budget is 0.2 GiB" in out
    assert "that is cheaper" not in out
    assert "held-out check: n/a" in out


def test_a_log_is_read_from_standard_input() -> None:
    log = b"\xff binary\r\n" + "".join(LINE.format(tokens=tokens, graph=tokens > 1) for tokens in (1, 1, 8)).encode()
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli", "ladder", "-", "--json", "--sglang-version", "0.5.16"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        input=log,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ladder"] == [1, 8]
    assert found["traffic"].startswith("standard input (server log, 3 prefill batches")
    assert "33.33% replayed" in found["traffic"]
    assert any("rounded up to KV pages" in note for note in found["notes"])


def test_standard_input_may_have_been_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("8\n8\n1\n"))
    found = _json(capsys, "-")
    assert found["ladder"] == [1, 8]
    assert str(found["traffic"]).startswith("standard input (CSV")
    monkeypatch.setattr(sys, "stdin", io.StringIO("8\nx\n"))
    assert main(["ladder", "-"]) == 2
    assert "standard input line 2: 'x'" in capsys.readouterr().err


def test_a_plan_gives_memory_and_time_and_they_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    words = (TTS, "--model", "qwen3-8b", "--gpu", "h100-80gb")
    free = _json(capsys, *words)
    tight = _json(capsys, *words, "--memory", "0.6", "--time", "3")
    figures = tight["coverage"]["proposal"]  # type: ignore[index]
    assert figures["memory_gib"] <= 0.6 < free["coverage"]["default"]["memory_gib"]  # type: ignore[index]
    assert figures["capture_s"] <= 3 < free["coverage"]["default"]["capture_s"]  # type: ignore[index]
    assert figures["buckets"] > 0
    assert "forecast" in tight["limits"]["memory_source"]  # type: ignore[index]


def test_a_record_gives_milliseconds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = made_up_record(id="20260101-000000-5eed00")
    RunStore(tmp_path).save(record)
    found = _json(capsys, TTS, "--record", record.id, "--runs-dir", os.fspath(tmp_path), "--memory", "1")
    assert found["cost"]["unit"] == "ms"  # type: ignore[index]
    assert "synthetic cpu (accounted)" in found["cost"]["source"]  # type: ignore[index]
    assert "synthetic cpu (accounted)" in found["limits"]["memory_source"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["no-such-file.csv"], "cannot be read"),
        ([TTS, "--memory", "1"], "a memory budget needs to know what a ladder takes"),
        ([TTS, "--time", "1"], "a time budget needs to know what a ladder takes"),
        ([TTS, "--model", "qwen3-8b", "--memory", "nan"], "memory budget nan GiB"),
        ([TTS, "--model", "qwen3-8b", "--backend", "disabled"], "no prefill graph"),
        ([TTS, "--model", "nothing-like-it"], "nothing-like-it"),
        ([TTS, "--gpu", "h100-80gb"], "--gpu says nothing without a model"),
        ([TTS, "--max-buckets", "-1"], "max buckets -1 is negative"),
        ([TTS, "--max-buckets", "many"], "Invalid value for '--max-buckets'"),
        ([TTS, "--chunked-prefill-size", "0"], "chunked prefill size 0"),
        ([TTS, "--max-tokens", "-5"], "ceiling -5"),
        ([TTS, "--max-tokens", "64", "--buckets", "8"], "one of them"),
        ([TTS, "--buckets", "x"], "bucket 'x'"),
        ([TTS, "--step", "0"], "step 0"),
        ([TTS, "--launch-tokens", "-1"], "launch tokens -1"),
        ([TTS, "--sglang-version", "0.4"], "SGLang version '0.4'"),
        ([TTS, "--record", "none"], "run"),
        ([], "FILE"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ladder", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert complaint in err
    assert not list(tmp_path.iterdir())
