"""The Log Doctor without a front end: the same findings as the command, lines looked at, settings taken over."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pasted_logs import FIXTURES, GATE, NEW, pasted

from toolkit.cli import main
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.focus import excerpt, shortened
from toolkit.serverlogs.pasted import from_browser
from toolkit.widgets import doctor_panels
from toolkit.widgets.doctor_state import DoctorState
from toolkit.widgets.lab import Lab
from toolkit.widgets.log_doctor import LogDoctor

# --- the same findings as the command -----------------------------------------------------------------------


def told(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints of a log, without its name."""
    assert main(["diagnose", "--json", str(path)]) == 0
    return {**json.loads(capsys.readouterr().out), "source": None}


def shown(state: DoctorState) -> dict[str, Any]:
    """What the widget holds of a log, without its name."""
    assert state.diagnosis is not None
    return {**json.loads(json.dumps(state.diagnosis.to_dict())), "source": None}


def in_a_text_field(path: Path) -> str:
    """A log as a browser hands on what is pasted: every carriage return is a line end."""
    with path.open(newline=None, encoding="utf-8", errors="replace") as file:
        return file.read()


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_an_uploaded_log_gives_what_the_command_gives(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = DoctorState()
    state.load(path.read_bytes(), name=path.name)
    state.explain()
    assert shown(state) == told(path, capsys)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_a_pasted_log_gives_what_the_command_gives_for_the_same_text(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = in_a_text_field(path)
    copy = tmp_path / "copy.log"
    copy.write_bytes(from_browser(text).encode())
    assert shown(pasted(text)) == told(copy, capsys)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_a_pasted_log_has_the_findings_of_its_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same in all but line numbers, which carriage returns may shift; the lines themselves are the same."""
    theirs = told(path, capsys)["findings"]
    state = pasted(in_a_text_field(path))
    numbers = ("line", "lines")
    ours = [{k: v for k, v in one.items() if k not in numbers} for one in shown(state)["findings"]]
    assert ours == [{k: v for k, v in one.items() if k not in numbers} for one in theirs]
    lines = path.read_bytes().decode(errors="replace").split("\n")
    for number, (one, other) in enumerate(zip(shown(state)["findings"], theirs, strict=True)):
        for line, of_file in zip(one["lines"], other["lines"], strict=True):
            state.look(number, line)
            (meant,) = [found.text for found in state.excerpt if found.meant]
            assert meant[:60].strip() in lines[of_file - 1].replace("\r", " ")


def test_there_are_fixtures_with_findings_and_with_carriage_returns() -> None:
    assert len(FIXTURES) >= 14
    assert sum(b"\r" in path.read_bytes() for path in FIXTURES) >= 4
    assert sum(bool(diagnose(path).findings) for path in FIXTURES) > 10


@pytest.mark.parametrize("change", [lambda data: data, gzip.compress, lambda data: data.decode().encode("utf-16")])
def test_an_uploaded_file_has_the_findings_of_the_command(change: object) -> None:
    state = DoctorState()
    state.load(change(NEW.read_bytes()), name="server.log")  # type: ignore[operator]
    found = state.explain()
    assert found is not None and found.findings == diagnose(NEW).findings
    assert found.source == "server.log" and state.message == "server.log: 20 lines read"


def test_bytes_that_are_no_text_are_explained_all_the_same() -> None:
    state = DoctorState()
    state.load(b"\xff\xfe\xfa\x00\x80" * 50 + b"\n" + GATE.read_bytes() + b"\xc3\x28\x00", name="noise")
    assert state.explain() is not None
    assert doctor_panels.summary_html(state.diagnosis)


def test_a_forecast_stands_beside_the_measurement_when_a_card_is_named() -> None:
    state = pasted(NEW.read_text(), model="qwen3-30b-a3b", gpu="h100-80gb", version="0.5.18")
    assert state.diagnosis is not None and state.diagnosis.measured is not None
    told = diagnose(NEW.read_text(), model="qwen3-30b-a3b", gpu="h100-80gb", sglang_version="0.5.18").measured
    assert state.diagnosis.measured == told
    html = doctor_panels.tables_html(state.diagnosis)
    assert "Measured beside the forecast: qwen3-30b-a3b on h100-80gb" in html and "12.59" in html


def test_what_cannot_be_forecast_is_said() -> None:
    state = pasted(NEW.read_text(), gpu="h100-80gb", model="no-such-model")
    assert state.diagnosis is None and state.message.startswith("refused: unknown model 'no-such-model'")
    state = pasted(GATE.read_text(), gpu="h100-80gb")
    assert state.diagnosis is not None and state.diagnosis.measured is None
    assert "no forecast" in doctor_panels.summary_html(state.diagnosis)


# --- what is given ------------------------------------------------------------------------------------------


def test_pasted_text_is_never_the_name_of_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text(GATE.read_text())
    state = pasted(str(secret))
    assert state.diagnosis is not None and state.diagnosis.engine is None
    state.look(0, 1)
    assert [line.text for line in state.excerpt] == [str(secret)]


PARTS = ("\n", "pod | ", "Capturing num tokens (num_tokens=8)", "Capturing batches (bs=8)", "x")
BAR = "Capturing num tokens (num_tokens={} avail_mem=1.00 GB):  {}%|  | {}/2 [00:01<00:02]"


def test_states_of_a_bar_that_lost_the_name_of_their_container_find_it_again() -> None:
    text = f"a | x\na | {BAR.format(8, 0, 0)}\r{BAR.format(4, 50, 1)}\r{BAR.format(4, 100, 2)}\nb | y\n"
    assert from_browser(text.replace("\r", "\n")) == text


@pytest.mark.parametrize(
    "text",
    [
        f"a\n{BAR.format(8, 0, 0)}\n{BAR.format(8, 50, 1)}\n{BAR.format(4, 50, 1)}\nb\n",
        "\n\na\n\n  Capturing num tokens\nCapturing batches (bs=1)\n",
        "",
    ],
)
def test_other_lines_stay_as_they_are_pasted(text: str) -> None:
    assert from_browser(text) == text


@given(st.text("\nCapturing batches|num tokens (=8", max_size=200) | st.lists(st.sampled_from(PARTS)).map("".join))
def test_only_line_ends_before_bars_become_carriage_returns(text: str) -> None:
    found = from_browser(text)
    assert found.replace("\r", "\n") == text
    assert all(after.startswith("Capturing") for after in found.split("\r")[1:])


@given(st.binary(max_size=400), st.integers(-2, 60))
def test_whatever_is_uploaded_is_explained_and_can_be_looked_at(data: bytes, line: int) -> None:
    state = DoctorState()
    state.load(data, name="any")
    found = state.explain()
    assert (found is None) == (not data.strip()) or state.message.startswith("refused")
    state.look(0, line)
    assert doctor_panels.excerpt_html(state.excerpt)
    assert len([one for one in state.excerpt if one.meant]) <= 1


def test_nothing_given_is_refused_in_words() -> None:
    for text in ("", "  \n "):
        state = pasted(text)
        assert state.diagnosis is None and state.message == "refused: there is no log yet"


def test_the_log_given_last_counts() -> None:
    state = pasted(GATE.read_text())
    state.load(NEW)
    assert state.text == "" and state.name == NEW.name
    found = state.explain()
    assert found is not None and found.source == NEW.name
    state.change(text=GATE.read_text())
    found = state.explain()
    assert found is not None and found.source == "pasted text" and found.worst == "warning"


def test_a_log_that_breaks_the_reader_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    state = pasted(GATE.read_text())

    def broken(*_: object, **__: object) -> None:
        raise ValueError("no such\nthing")

    monkeypatch.setattr("toolkit.widgets.doctor_state.diagnose", broken)
    assert state.explain() is None and state.diagnosis is None and not state.busy
    assert state.message == "refused: this log cannot be explained (ValueError: no such thing)"


def test_clearing_forgets_everything() -> None:
    state = pasted(GATE.read_text())
    state.look(0, 2)
    state.clear()
    assert (state.diagnosis, state.text, state.excerpt, state.message) == (None, "", (), "")
    assert state.explain() is None


# --- lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_every_line_of_every_finding_can_be_looked_at(path: Path) -> None:
    state = DoctorState()
    state.load(path)
    state.explain()
    assert state.diagnosis is not None
    lines = path.read_bytes().decode().replace("\r", " ").split("\n")
    for number, finding in enumerate(state.diagnosis.findings):
        for line in finding.lines:
            state.look(number, line)
            (meant,) = [one for one in state.excerpt if one.meant]
            assert meant.number == line and meant.text[:100] == lines[line - 1][:100]


def test_a_line_asked_for_twice_is_shown_no_longer() -> None:
    state = pasted(GATE.read_text())
    state.look(0, 2)
    assert state.excerpt
    state.look(0, 2)
    assert state.excerpt == () and state.finding == -1


def test_an_excerpt_has_the_lines_around_with_their_numbers() -> None:
    text = "\n".join(f"line {number}" for number in range(1, 21))
    assert [one.number for one in excerpt(text, 10, around=2)] == [8, 9, 10, 11, 12]
    assert [one.number for one in excerpt(text, 1, around=2)] == [1, 2, 3]
    assert [one.number for one in excerpt(text, 20, around=2)] == [18, 19, 20]
    assert excerpt(text, 21) == excerpt(text, 0) == ()
    assert [one.text for one in excerpt("a\n\nc\n", 2)] == ["a", "", "c"]
    assert [one.text for one in excerpt("bar 1\rbar 2\nend\n", 1)] == ["bar 1 bar 2", "end"]


def test_long_lines_lose_their_middle() -> None:
    assert shortened("x" * 10, 10) == "x" * 10
    assert shortened("a" * 50 + "b" * 50, 10) == "aaaaa ... (90 characters left out) ... bbbbb"


def test_a_log_is_data_from_somewhere() -> None:
    evil = '<script>alert(1)</script><img src=x onerror="x">'
    text = GATE.read_text().replace("[2026-03-05 09:00:00 TP0] Memory pool", f"{evil} [2026-03-05 09:00:00 TP0] Memory")
    state = pasted(text + f"\nserver_args=ServerArgs(model_path='{evil}', mem_fraction_static=0.8, tp_size=1)\n")
    state.look(0, 1)
    state.take()
    shown = doctor_panels.excerpt_html(state.excerpt) + doctor_panels.summary_html(state.diagnosis)
    shown += doctor_panels.tables_html(state.diagnosis) + doctor_panels.taken_html(state.taken, in_lab=False)
    shown += "".join(doctor_panels.finding_html(one) for one in state.diagnosis.findings) if state.diagnosis else ""
    assert "&lt;script&gt;" in shown and not re.search(r"<(script|img)\b", shown)


@pytest.mark.parametrize("severity", ["error", "warning", "info"])
def test_how_serious_a_finding_is_is_told_by_a_word_and_a_sign(severity: str) -> None:
    findings = [one for path in FIXTURES for one in diagnose(path).findings if one.severity == severity]
    html = doctor_panels.finding_html(findings[0])
    assert f"{doctor_panels.SIGNS[severity]} {severity}: {findings[0].code}" in html


# --- the object in a notebook -----------------------------------------------------------------------------------


def test_a_log_doctor_is_text_where_no_widget_is_drawn() -> None:
    doctor = LogDoctor(GATE)
    assert repr(doctor).startswith("Log Doctor: sglang_gate.log: sglang, 2 ranks, prefill graph skipped")
    assert "\n  warning GATE_SKIPPED (line 2): " in repr(doctor)
    doctor.show(0)
    assert doctor.state.line == 2
    doctor.close()
    assert repr(doctor) == "Log Doctor: no log is explained"


def test_its_widgets_show_what_the_state_says() -> None:
    doctor = LogDoctor()
    view, parts = doctor.view, doctor.parts
    assert parts.findings.children == () or len(parts.findings.children) == 1
    doctor.state.change(text=GATE.read_text())
    parts.ask()
    parts.wait(60)
    shown = doctor.diagnosis
    assert shown is not None and len(parts.findings.children) == len(shown.findings) + 1
    first = parts.findings.children[0]
    assert "GATE_SKIPPED" in first.children[0].value
    assert [button.description for button in first.children[1].children] == ["line 2", "line 5"]
    first.children[1].children[1].click()
    assert "at least 4.00 GiB is required" in first.children[2].value and "&#9654; 5" in first.children[2].value
    first.children[1].children[0].click()
    assert "&#9654; 2" in first.children[2].value
    assert parts.figures.value.count('role="img"') == 2
    parts.take.click()
    assert "toolkit.Lab(" in parts.taken.value and "policy=&#x27;gated&#x27;" in parts.taken.value
    assert view is doctor.view
    doctor.close()


def test_what_was_shown_of_one_log_is_gone_with_the_next_and_all_with_the_doctor() -> None:
    from ipywidgets.widgets.widget import _instances

    before = set(_instances)
    doctor = LogDoctor(GATE)
    assert doctor.view is not None
    counts = []
    for _ in range(3):
        doctor.explain(GATE)
        doctor.parts.wait(60)
        counts.append(len(_instances))
    assert counts[0] == counts[2]
    doctor.close()
    assert set(_instances) == before


def test_the_lab_has_one_that_sets_its_controls(runs_dir: Path) -> None:
    lab = Lab(runs_dir, device="cpu")
    box = lab.view
    lab.doctor.explain(GATE)
    lab.doctor.parts.take.click()
    assert lab.state.policy == "gated" and "Set in the Lab" in lab.doctor.parts.taken.value
    lab.doctor.parts.wait(60)
    assert lab.doctor.parts.box.layout.display == "none"
    lab.close()
    assert box.comm is None
