"""`prefill-lab diagnose`: a report, JSON, standard input, several files, one line for bad input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.serverlogs import diagnose

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "tests" / "serverlogs"
ROUTER = str(LOGS / "finding_oom_router.log")


def test_a_report_says_findings_captures_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(LOGS / "sglang_new_breakable.log")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("PEAK_ABOVE_PRINTED_USAGE", "2.71", "392,920", "breakable", "8192", "66.7 % replayed", "gap"):
        assert words in out


def test_json_is_the_diagnosis_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", ROUTER, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == json.loads(json.dumps(diagnose(Path(ROUTER)).to_dict()))


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(ROUTER).read_bytes())))
    assert main(["diagnose", "-", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["source"] == "standard input"
    assert values["findings"] == diagnose(Path(ROUTER)).to_dict()["findings"]


def test_several_files_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    files = [ROUTER, str(LOGS / "sglang_clean.log")]
    assert main(["diagnose", *files]) == 0
    out = capsys.readouterr().out
    for name in ("prefill graph: outcome", "prefill graph: usage (GiB)", "prefill graph: capture (s)"):
        assert sum(line.strip().startswith(name) for line in out.splitlines()) == 1
    assert "findings above info" in out
    assert main(["diagnose", *files, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [one["source"] for one in values["logs"]] == files
    assert [one["prefill"] for one in values["comparison"]] == ["oom", "captured"]


def test_a_share_is_shown_in_percent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(LOGS / "finding_tts_ladder.log"), str(LOGS / "sglang_clean.log")]) == 0
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("prefills replayed"))
    assert "60.0 %" in shown


@pytest.mark.parametrize("name", ["sglang_new_breakable", "sglang_gate", "sglang_old_tp8_cut", "sglang_oom_driver"])
def test_a_terminal_of_80_columns_shows_every_column(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("toolkit.views.tables.PIPE_WIDTH", 80)
    assert main(["diagnose", str(LOGS / f"{name}.log"), "--model", "qwen3-30b-a3b", "--gpu", "h100-80gb"]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    rules = [line for line in out.splitlines() if set(line.strip()) == {"\u2500"}]
    assert len(rules) >= 4
    assert all(len(line.rstrip()) <= 80 for line in rules)
    for column in ("usage", "weights", "free after", "KV", "least", "other"):
        assert column in out


def test_a_forecast_stands_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["diagnose", str(LOGS / "sglang_clean.log"), "--model", "qwen3-8b", "--gpu", "h100-80gb"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "forecast for qwen3-8b on h100-80gb" in out
    assert "policy ungated on the measured free memory: captured" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing.log"], "nothing.log"),
        (["nothing at all.log"], "nothing at all.log"),
        ([str(LOGS)], "directory"),
        (["-", "-"], "twice"),
        ([ROUTER, "--gpu", "h900"], "h900"),
        ([], "FILE"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert named.lower() in err.lower()


@pytest.mark.parametrize("content", [b"", b"hello\n", bytes(range(256)) * 50, b"\x1f\x8b broken"])
def test_a_file_that_is_no_log_is_no_error(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some file.log"
    path.write_bytes(content)
    assert main(["diagnose", str(path)]) == 0
    assert "NOTHING_RECOGNISED" in capsys.readouterr().out
    assert main(["diagnose", str(path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["engine"], values["ranks"], values["captures"]) == (None, [], [])


def test_the_command_starts_without_what_is_heavy() -> None:
    """No table of pandas, no figure, no model: a log is explained while a person waits."""
    code = (
        "import sys; from toolkit.cli import main; main(['diagnose', sys.argv[1]]); "
        "print(sorted({'torch', 'transformers', 'pandas', 'matplotlib', 'ipywidgets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ROUTER],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f'"{sys.executable}" -m toolkit.cli diagnose "{ROUTER}" | head -1'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
