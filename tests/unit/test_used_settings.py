"""The settings a server was started with, taken from its log into a Lab, and what cannot be taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from pasted_logs import FIXTURES, GATE, LOGS, NEW, pasted

from toolkit.errors import InvalidInput
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.focus import start_to_show
from toolkit.serverlogs.used_settings import used_settings
from toolkit.widgets.doctor_state import DoctorState
from toolkit.widgets.forecast_state import ForecastState
from toolkit.widgets.state import LabState


def test_the_gate_of_a_log_is_met_again_in_the_lab(runs_dir: Path) -> None:
    lab = LabState(runs_dir, device="cpu")
    state = pasted(GATE.read_text())
    used = state.take(lab)
    assert lab.policy == "gated" and lab.leave_exactly and lab.free_memory_gib == 2.05
    assert lab.preview is not None and lab.preview.verdict.endswith("2.05 GiB free, under 4.00 GiB")
    assert any("0.5.16 or 0.5.17" in why for why in used.why)
    assert any(one.startswith("model: ") for one in used.left_out)


def test_what_a_server_was_started_with_is_what_the_lab_shows(runs_dir: Path) -> None:
    lab = LabState(runs_dir, device="cpu", free_memory_gib=1.0, buckets=(8,), backend="full", policy="gated")
    forecast = ForecastState(lab)
    state = pasted(NEW.read_text(), gpu="h200")
    state.take(lab, forecast)
    assert (lab.model, lab.mem_fraction, lab.auto_fraction, lab.leave_exactly) == ("qwen3-30b-a3b", 0.836, False, False)
    assert (lab.ladder, lab.max_tokens, lab.backend, lab.policy) == ("ceiling", 8192, "auto", "ungated")
    assert lab.others["chunked_prefill_size"] == 8192 and forecast.tp == 1 and forecast.gpu == "h200"
    assert state.taken is not None and any("fa3" in one for one in state.taken.left_out)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_every_log_leaves_a_lab_that_can_be_used(path: Path, runs_dir: Path) -> None:
    lab = LabState(runs_dir, device="cpu")
    state = pasted(path.read_text())
    if state.diagnosis is not None and not state.diagnosis.startups:
        return  # nothing of a server: tested below
    used = state.take(lab)
    assert lab.settings.policy == used.settings["policy"]
    assert any("size of the card" in one for one in used.left_out)


ARGUMENTS = "server_args=ServerArgs(model_path='Qwen/Qwen3-8B', {}, tp_size=8)\n"


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        ("mem_fraction_static=0.9", "mem_fraction", 0.9),
        ("disable_cuda_graph=True", "backend", "disabled"),
        ("cuda_graph_backend_prefill='full'", "backend", "full"),
        ("cuda_graph_max_bs_prefill=512", "max_tokens", 512),
        ("cuda_graph_bs_prefill=[4, 64, 512]", "buckets", (4, 64, 512)),
        ("cuda_graph_bs_prefill=[4, 64, 512], cuda_graph_max_bs_prefill=512", "buckets", (4, 64, 512)),
        ("piecewise_cuda_graph_tokens=[16, 64]", "buckets", (16, 64)),
        ("cuda_graph_config=CudaGraphConfig(prefill=PhaseConfig(bs=[4, 96], max_bs=96))", "buckets", (4, 96)),
        ("cuda_graph_bs_prefill=[4, 8, 12]", "max_tokens", 12),
        ("chunked_prefill_size=4096", "chunked_prefill_size", 4096),
        ("chunked_prefill_size=-1", "chunked_prefill_size", None),
        ("dtype='float16'", "dtype", "float16"),
        ("dtype='auto'", "model", "qwen3-8b"),
    ],
)
def test_each_argument_has_its_setting(arguments: str, setting: str, value: object) -> None:
    used = used_settings(diagnose(ARGUMENTS.format(arguments)))
    assert used.settings[setting] == value and used.tp == 8
    assert any(one.startswith("tp 8") for one in used.left_out)


def test_a_ladder_of_the_arguments_survives_the_gate() -> None:
    used = used_settings(diagnose(ARGUMENTS.format("cuda_graph_bs_prefill=[4, 64, 512]") + GATE.read_text()))
    assert used.settings["buckets"] == (4, 64, 512)
    assert not any(one.startswith("ladder") for one in used.left_out)


@pytest.mark.parametrize("listed", ["[]", "[0, 4]", "[4, 99999999]", "None", "[4, 8"])
def test_a_list_that_is_no_ladder_is_not_taken(listed: str) -> None:
    used = used_settings(diagnose(ARGUMENTS.format(f"cuda_graph_bs_prefill={listed}")))
    assert "buckets" not in used.settings and used.settings["max_tokens"] is None


def test_a_value_that_no_setting_takes_is_named() -> None:
    used = used_settings(diagnose(ARGUMENTS.format("mem_fraction_static=7.5")))
    assert used.settings["mem_fraction"] == "auto"
    assert any("7.5 is out of range" in one for one in used.left_out)


@pytest.mark.parametrize(
    ("version", "policy"), [("0.5.15", "ungated"), ("0.5.16", "gated"), ("0.5.17", "gated"), ("0.5.18", "ungated")]
)
def test_the_release_decides_about_the_gate(version: str, policy: str) -> None:
    found = diagnose(ARGUMENTS.format("dtype='auto'"), sglang_version=version)
    assert used_settings(found).settings["policy"] == policy


def test_a_text_without_a_start_has_no_settings() -> None:
    state = pasted("nothing of a server\n")
    with pytest.raises(InvalidInput, match="no start of a server"):
        state.take()
    with pytest.raises(InvalidInput, match="no log is explained"):
        DoctorState().take()


def test_the_start_with_the_error_is_the_one_to_look_at() -> None:
    startup = start_to_show(diagnose(LOGS / "compose_two_servers.log"))
    assert startup is not None and startup.index == 1
    assert start_to_show(diagnose("nothing\n")) is None
