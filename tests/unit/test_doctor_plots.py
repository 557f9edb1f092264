"""The figures of a diagnosis: what they draw, what they say in words, and that any log can be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.policies import MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB as GATE_GIB
from toolkit.serverlogs import diagnose
from toolkit.views.doctor_plots import plot_log_buckets, plot_timeline
from toolkit.views.doctor_points import timeline_of
from toolkit.views.log_words import log_provenance
from toolkit.views.sheet import alt_text, figure_png

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"
FIXTURES = sorted(LOGS.glob("*.log"))


def log(name: str) -> Any:
    return diagnose(LOGS / f"{name}.log", name=f"{name}.log")


def labels(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def written(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
@pytest.mark.parametrize("plot", [plot_timeline, plot_log_buckets])
def test_any_log_can_be_drawn_and_names_its_source(path: Path, plot: Any) -> None:
    figure = plot(diagnose(path, name="prod/server.log"))
    if not path.stem.startswith("finding_"):  # those look like the others, and drawing takes most of the time
        assert figure_png(figure, dpi=50)[:4] == b"\x89PNG"
    assert "field data: from the log prod/server.log" in alt_text(figure)
    assert "field data: from the log prod/server.log" in figure.axes[0].get_title(loc="left")


@pytest.mark.parametrize("plot", [plot_timeline, plot_log_buckets])
@pytest.mark.parametrize("text", ["", "nothing of a server\n", "server_args=ServerArgs(model_path='a', tp_size=2)\n"])
def test_what_a_log_does_not_say_is_not_drawn(plot: Any, text: str) -> None:
    figure = plot(diagnose(text.encode()))
    assert "n/a: " in alt_text(figure) and not figure.legends


# --- free memory through the start-up -----------------------------------------------------------------------------


def test_readings_stand_at_their_second_and_bars_at_their_own() -> None:
    found = log("sglang_new_breakable")
    line = timeline_of(found, 0)
    assert line is not None and line.clock
    stages = {point.stage: (point.x, point.free_gib) for point in line.ranks[0].points if point.capture is None}
    assert stages["weights begin"] == (0, 78.48) and stages["weights end"] == (12, 49.33)
    assert stages["target prefill capture begin"] == (14, 12.59) and stages["limits"] == (49, 10.54)
    (prefill, decode) = line.spans
    assert (prefill.first, prefill.last) == (14, 37) and (decode.first, decode.last) == (37, 49)
    bars = [point for point in line.ranks[0].points if point.capture is prefill.capture]
    assert len(bars) == 58 and bars[0].x == 14 and min(bar.free_gib for bar in bars) == 9.88
    assert all(14 <= bar.x <= 37 for bar in bars)


def test_the_figure_names_every_stage_and_the_least_inside_a_capture() -> None:
    figure = plot_timeline(log("sglang_new_breakable"))
    listed = written(figure.axes[1])
    for words in ("weights begin", "pools end", "prefill begin", "12.59", "  least inside, bucket 4", "9.88"):
        assert words in listed
    shown = labels(figure)
    assert "target prefill capture: captured, 58 buckets, 1.71 GiB printed, 2.71 GiB needed inside" in shown
    assert "least free inside a capture" in shown
    assert "SGLang 0.5.17 to 0.5.20 by its wording" in figure.axes[0].get_title(loc="left")
    assert not any("old gate" in one for one in shown)  # 9.88 GiB is not near 4.00


def test_the_gate_is_in_the_figure_of_a_start_that_it_met() -> None:
    figure = plot_timeline(log("sglang_gate"))
    assert any(one.startswith("old gate 4.00 GiB") for one in labels(figure))
    bottom, top = figure.axes[0].get_ylim()
    assert bottom < 2.05 < GATE_GIB < top
    assert "free memory, TP0, least free" in labels(figure) and "free memory, TP1" in labels(figure)


def test_a_capture_that_ran_out_is_hatched_to_its_last_sign() -> None:
    found = log("sglang_oom_driver")
    line = timeline_of(found, 0)
    assert line is not None
    (span,) = line.spans
    assert span.capture.outcome == "oom" and span.last > span.first
    figure = plot_timeline(found)
    assert any("ran out of memory, at bucket 640" in one for one in labels(figure))
    assert "least inside the target prefill capture 30.7 MiB" in alt_text(figure)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_every_reading_lies_inside_a_panel(path: Path) -> None:
    found = diagnose(path)
    figure = plot_timeline(found)
    line = timeline_of(found, found.startups[-1].index) if len(found.startups) == 1 else None
    if line is None:
        return
    panels = [axes for axes in figure.axes if axes.axison]
    limits = [axes.get_ylim() for axes in panels]
    assert panels
    for point in (point for each in line.ranks for point in each.points):
        assert any(bottom <= point.free_gib <= top for bottom, top in limits)
        first, last = panels[0].get_xlim()
        assert first < point.x < last


def test_a_log_without_times_is_drawn_in_its_order() -> None:
    text = "\n".join(line.split("] ", 1)[-1] for line in (LOGS / "sglang_gate.log").read_text().splitlines())
    found = diagnose(text)
    line = timeline_of(found, 0)
    assert line is not None and not line.clock
    xs = [point.x for each in line.ranks for point in each.points]
    assert xs == sorted(xs)
    figure = plot_timeline(found)
    assert "in the order of the log" in figure.axes[0].get_xlabel() and not figure.axes[0].get_xticklabels()


def test_more_ranks_than_can_be_told_apart_are_counted() -> None:
    figure = plot_timeline(log("sglang_old_tp8_cut"))
    assert "1 more rank not drawn" in alt_text(figure)
    assert "free memory, TP2, least free" in labels(figure)


def test_the_start_with_the_error_is_drawn_unless_another_is_asked_for() -> None:
    found = log("compose_two_servers")
    assert "start 2 of 3" in alt_text(plot_timeline(found)) and "ran out of memory" in alt_text(plot_timeline(found))
    assert "start 1 of 3" in alt_text(plot_timeline(found, startup=0))


def test_a_year_that_is_not_printed_and_a_leap_day_are_no_trouble() -> None:
    text = (
        "[02-29 23:59:58] Memory pool end. avail mem=9.00 GB\n[03-01 00:00:03] Load weight begin. avail mem=8.00 GB\n"
    )
    line = timeline_of(diagnose(text), 0)
    assert line is not None and line.clock
    assert [point.x for point in line.ranks[0].points] == [0, 5]


# --- memory against bucket ----------------------------------------------------------------------------------------


def _heights(axes: Any) -> list[float]:
    return [bar.get_height() for group in axes.containers for bar in group]


def test_bars_are_what_the_free_memory_fell_by() -> None:
    found = log("sglang_new_breakable")
    figure = plot_log_buckets(found)
    heights = _heights(figure.axes[0])
    assert max(heights) == pytest.approx((12.59 - 10.30) * 1024, abs=1)
    series = found.captures[0].series
    assert sum(heights) == pytest.approx((series[0].free_gib - series[-1].free_gib) * 1024, abs=1)
    assert "2,345 MiB (bar cut)" in written(figure.axes[0])
    assert "least free: 9.88 GiB, before bucket 4" in labels(figure)
    assert "free after the capture: 10.88 GiB" in labels(figure)


def test_bars_that_were_skipped_are_told_apart() -> None:
    figure = plot_log_buckets(log("sglang_oom_driver"))
    assert "of several buckets together: bars were skipped (MiB)" in labels(figure)
    assert "out of memory at 640 tokens" in written(figure.axes[0])
    assert any(one.startswith("old gate") for one in labels(figure))


def test_one_bar_alone_has_no_cost() -> None:
    figure = plot_log_buckets(log("sglang_zero_of_58"))
    assert "n/a: one bar alone does not say what its bucket took" in written(figure.axes[0])
    assert not _heights(figure.axes[0])


def test_a_decode_capture_is_drawn_where_no_prefill_bar_is_there() -> None:
    figure = plot_log_buckets(log("sglang_old_tp2_compiling"))
    assert "TP0 target decode capture" in alt_text(figure) and "requests" in figure.axes[1].get_xlabel()


# --- words --------------------------------------------------------------------------------------------------------


def test_the_release_is_as_given_else_as_the_wording_allows() -> None:
    gate = LOGS / "sglang_gate.log"
    assert log_provenance(diagnose(gate, name="x")).endswith("| SGLang 0.5.16 to 0.5.17 by its wording")
    assert log_provenance(diagnose(gate, name="x", sglang_version="0.5.17")).endswith("| SGLang 0.5.17")
    assert log_provenance(log("sglang_spec_phases")).endswith("| SGLang, release n/a")
    assert log_provenance(log("vllm_tp2")).endswith("| vLLM 0.19.0")
    long = diagnose(gate, name="/very" * 40 + "/server.log")
    assert "log ..." in log_provenance(long) and "/server.log |" in log_provenance(long)
