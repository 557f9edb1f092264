"""What the Lab shows, as text: panels, verdicts, the text form of a Lab, and the forecast beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from synthetic_records import made_up_record

from toolkit.errors import InvalidInput
from toolkit.runs.record import RunRecord
from toolkit.widgets import panels
from toolkit.widgets.activity import Activity, after_event
from toolkit.widgets.choice import DeviceOption
from toolkit.widgets.forecast_state import ForecastState
from toolkit.widgets.lab import Lab
from toolkit.widgets.state import LabState

LADDER = {8, 16, 32, 64, 128, 256, 512}


def running(record: RunRecord) -> RunRecord:
    return RunRecord.model_construct(**{**record.__dict__, "outcome": "running", "reason": "not finished"})


@pytest.mark.parametrize("name", panels.PANELS)
@pytest.mark.parametrize("other", [None, made_up_record(settings={"policy": "gated"})])
def test_every_panel_says_on_what_it_was_measured(name: str, other: RunRecord | None) -> None:
    html = panels.panel_html(name, made_up_record(), other)
    assert 'class="problem"' not in html
    assert name == "Log" or "synthetic cpu (accounted)" in html


def test_both_figures_carry_the_words_of_each_bucket() -> None:
    html = panels.panel_html("Memory and time", made_up_record(), None)
    assert html.count('role="img"') == 2
    assert {int(tokens) for tokens in re.findall(r'data-num-tokens="(\d+)"', html)} == LADDER


def test_a_figure_that_cannot_be_drawn_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(record: RunRecord, other: RunRecord | None) -> str:
        raise ValueError("<b>no</b>")

    monkeypatch.setitem(panels.PANELS, "Ledger", broken)
    html = panels.panel_html("Ledger", made_up_record(), None)
    assert "cannot be shown" in html and "<b>no" not in html


def test_a_record_is_data_from_somewhere() -> None:
    evil = made_up_record(reason="<script>alert(1)</script>", log=["<img src=x>"], advice=["<i>x</i>"], notes=["<u>"])
    shown = "".join(panels.panel_html(name, evil, evil) for name in panels.PANELS)
    shown += panels.verdict_html(evil) + panels.runs_html((evil,), "<folder>")
    assert not re.search(r"<(script|img|i|u|folder)\b", shown)


@pytest.mark.parametrize("outcome", ["captured", "skipped", "oom", "crashed", "cancelled", "failed"])
def test_an_outcome_is_told_by_words_and_not_by_colour_alone(outcome: str) -> None:
    html = panels.verdict_html(made_up_record(outcome=outcome, advice=["try less"]))
    assert f'class="verdict {outcome}"' in html and "try less" in html
    assert re.search(r"<p>\w+", html)


def test_a_run_that_goes_on_says_so() -> None:
    live = running(made_up_record())
    assert "Capturing now" in panels.verdict_html(live)
    assert "No bucket is captured yet" in panels.panel_html(
        "Memory and time", running(made_up_record(buckets=[])), None
    )


def test_a_run_that_trimmed_says_what_and_why() -> None:
    trimmed = made_up_record(reason="2 of 9 buckets left out", trimmed=[1024, 2048], starved_gib=0.25)
    html = panels.verdict_html(trimmed)
    assert "2 of 9 buckets left out" in html and "Left out: 2 of 9 buckets (1024 to 2048 tokens)" in html
    assert "lacks 0.25 GiB" in html
    plain = panels.verdict_html(made_up_record())
    assert "Left out" not in plain and "Needed later" not in plain


def test_of_two_runs_both_verdicts_are_told() -> None:
    html = panels.verdict_html(made_up_record(), made_up_record(outcome="skipped"))
    assert "A: Captured" in html and "B: Skipped" in html


def test_a_run_that_goes_on_says_what_was_decided() -> None:
    live = running(made_up_record(decision={"reason": "1 of 8 buckets left out"}))
    assert "1 of 8 buckets left out" in panels.verdict_html(live)


def test_many_runs_are_counted_and_not_all_shown() -> None:
    html = panels.runs_html(tuple(made_up_record() for _ in range(60)), "runs")
    assert html.count("<tr>") == 51 and "10 older runs are not shown" in html
    assert "none yet" in panels.runs_html((), "runs")


def test_what_is_going_on_is_said_without_an_estimate() -> None:
    now = Activity(running=True, elapsed_s=3)
    for event in (
        {"event": "stage", "name": "capture", "detail": "breakable"},
        {"event": "bucket_begin", "num_tokens": 512, "index": 0, "total": 3, "free_gib": 3.9},
    ):
        now = after_event(now, event)
    assert now.words.startswith("capture: breakable, 0 of 3, at 512 tokens, 3 s elapsed")
    assert "compilation" in now.words
    now = after_event(
        after_event(now, {"event": "bucket"}), {"event": "bucket_begin", "num_tokens": 8, "index": 1, "total": 3}
    )
    assert "1 of 3, at 8 tokens" in now.words and "compilation" not in now.words
    assert not re.search(r"left|remain|ETA", now.words)


# --- the Lab as text ----------------------------------------------------------------------------------------


def test_the_text_form_says_what_the_controls_mean(runs_dir: Path) -> None:
    text = repr(Lab(device="cpu", policy="gated", free_memory_gib=3.99))
    assert "exactly 3.99 GiB" in text and "under 4.00 GiB" in text and "no run is shown" in text


def test_a_setting_that_cannot_be_used_changes_nothing(runs_dir: Path) -> None:
    lab = Lab(device="cpu")
    before = lab.state.choice
    bad: list[dict[str, Any]] = [{"policy": "nonsense"}, {"model": "nonsense"}, {"nonsense": 1}, {"device": "cuda:77"}]
    bad += [{"policy": "gated", "mem_fraction": 2}, {"buckets": (0,)}, {"seed": -1}]
    for settings in bad:
        with pytest.raises(InvalidInput):
            lab.pick(**settings)
        assert lab.state.choice == before and lab.state.others == {}, settings


@pytest.mark.parametrize("settings", [{"max_tokens": 3}, {"chunked_prefill_size": 3}])
def test_a_ceiling_below_the_smallest_bucket_is_said_in_words(settings: dict[str, Any], runs_dir: Path) -> None:
    lab = Lab(device="cpu", **settings)
    assert lab.preview.settings is None and "4 tokens" in lab.preview.problem


def test_numbers_may_come_in_any_form_the_settings_take(runs_dir: Path) -> None:
    lab = Lab(device="cpu", device_memory_gib="8", buckets=(tokens for tokens in (8, 16)), mem_fraction="0.7")
    assert lab.state.settings.buckets == (8, 16) and lab.state.settings.mem_fraction == 0.7


def test_cuda_means_the_first_gpu(runs_dir: Path) -> None:
    lab = LabState(device="cpu")
    lab.devices = (DeviceOption("cuda:0", "GPU 0", 81559.0), *lab.devices)
    lab.pick(device="cuda")
    assert lab.device == "cuda:0"


def test_displaying_gives_widgets_and_text(runs_dir: Path) -> None:
    lab = Lab(device="cpu")
    bundle = lab._repr_mimebundle_()
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    assert bundle["text/plain"] == repr(lab)
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_a_run_beside_its_forecast_needs_a_finished_run_of_a_known_model() -> None:
    from toolkit.widgets.forecast_panel import run_against_forecast

    assert "No finished run" in run_against_forecast(None)
    assert "No finished run" in run_against_forecast(running(made_up_record()))
    unknown = run_against_forecast(made_up_record(settings={"model": "<nobody>"}))
    assert 'class="problem"' in unknown and "<nobody>" not in unknown


# --- the forecast beside it ---------------------------------------------------------------------------------


def test_the_forecast_follows_the_controls_of_the_lab(runs_dir: Path) -> None:
    lab = LabState(device="cpu", model="qwen3-8b")
    lab.change(ladder="default")
    state = ForecastState(lab)
    plan = state.update()
    # Public: https://github.com/sgl-project/sglang/pull/33352, 58 buckets, 1.74 GiB, breakable.
    assert plan is not None and plan.forecast is not None and len(plan.buckets) == 58
    assert plan.forecast.total.low <= 1.74 * 1024 <= plan.forecast.total.high
    lab.pick(mem_fraction=0.7)
    assert (fewer := state.update()) is not None and fewer.mem_fraction == 0.7
    lab.pick(free_memory_gib=3.0)
    assert (exact := state.update()) is not None and exact.free_before_gib == pytest.approx(3.0, abs=0.05)
    lab.pick(buckets=(8, 16), backend="tc_piecewise")
    assert (legacy := state.update()) is not None and legacy.release.version == "0.5.21"
    assert legacy.buckets == (8, 16)


@pytest.mark.parametrize("bad", [{"tp": 64}, {"gpu": "nonsense"}])
def test_what_cannot_be_planned_is_one_line(bad: dict[str, Any], runs_dir: Path) -> None:
    state = ForecastState(LabState(device="cpu", model="smollm2-135m"))
    state.change(**bad)
    assert state.update() is None and state.plan is None
    assert state.problem and "\n" not in state.problem
