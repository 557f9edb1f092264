"""Figures of policy maps and of ranks: letters, outlines, dots and words, never colour alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import toolkit
from toolkit.forecast.cells import Executed
from toolkit.forecast.policy_map import PolicyMap
from toolkit.views.plots import alt_text, figure_png
from toolkit.views.policy_plots import plot_policy_map, plot_ranks


@pytest.fixture(scope="module")
def wide() -> PolicyMap:
    return toolkit.policy_map(model="qwen3-8b", free_memory=[1, 2, 3.99, 4], ceilings=[512, 8192])


def legend(figure: Any) -> str:
    return " ".join(text.get_text() for one in figure.legends for text in one.get_texts())


def letters(axes: Any) -> str:
    return "".join(text.get_text() for text in axes.texts if len(text.get_text()) == 1)


def outlines(axes: Any) -> int:
    return sum(not patch.get_fill() for patch in axes.patches)


def test_each_policy_has_a_panel_with_a_letter_in_every_cell(wide: PolicyMap) -> None:
    figure = plot_policy_map(wide)
    named = {text.get_text(): axes for axes in figure.axes for text in axes.texts if len(text.get_text()) > 1}
    assert list(named) == list(wide.policies)
    for name, axes in named.items():
        assert letters(axes) == "".join(wide.grid(name).to_numpy().ravel())
    assert figure_png(figure)[:4] == b"\x89PNG"


def test_wrong_and_uncertain_cells_are_outlined(wide: PolicyMap) -> None:
    figure = plot_policy_map(wide)
    for axes, name in zip(figure.axes, wide.policies, strict=True):
        count = wide.counts.loc[name]
        assert outlines(axes) == count["wrong skip"] + count["wrong capture"] + count["uncertain"]
    assert "wrong: a skip of what fits" in legend(figure)


def test_the_gate_and_the_edge_of_what_fits_lie_between_cells(wide: PolicyMap) -> None:
    figure = plot_policy_map(wide)
    gates = [line for line in figure.axes[0].lines if line.get_linestyle() == "-."]
    assert [round(line.get_xdata()[0]) for line in gates] == [2, 2]  # type: ignore[arg-type, index]
    assert all(2.3 < line.get_xdata()[0] < 2.7 for line in gates)  # type: ignore[operator, index]
    assert "old gate 4.00 GiB" in legend(figure) and "edge of what fits" in legend(figure)


def test_a_strip_has_a_row_for_each_policy_and_says_what_is_free() -> None:
    strip = toolkit.policy_map(model="qwen3-8b", fractions=[0.90, 0.98])
    figure = plot_policy_map(strip)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(strip.policies)
    free = strip.cell("gated", 0.98).cell.room.gib
    assert axes.get_xticklabels()[1].get_text() == f"0.98\n{free:.2f}"
    assert "GiB" in axes.get_xlabel()


def test_the_words_say_what_the_picture_shows(wide: PolicyMap) -> None:
    words = alt_text(plot_policy_map(wide))
    assert "forecast (sglang engine)" in words
    assert f"gated: {''.join(wide.grid('gated').to_numpy().ravel())}" in words


def test_measured_cells_have_a_dot(wide: PolicyMap) -> None:
    first = wide.judged[0]
    done = Executed((), first.policy, "id", "a card", first.outcome)
    some = replace(wide, judged=(replace(first, measured=done, forecast_outcome=first.outcome), *wide.judged[1:]))
    figure = plot_policy_map(some)
    assert sum(line.get_marker() == "o" for line in figure.axes[0].lines) == 1
    assert "measured, all others forecast" in legend(figure)
    assert "1 of 32 cells measured on a card" in alt_text(figure)


def test_a_map_too_large_to_read_is_not_drawn() -> None:
    large = toolkit.policy_map(fractions=[step / 100 for step in range(50, 92)], policy="gated")
    assert "too many to draw" in alt_text(plot_policy_map(large))


def test_ranks_show_what_each_would_capture_and_what_all_do() -> None:
    kimi = toolkit.plan(model="kimi-k2", gpu="h100-80gb", tp=8, sglang_version="0.5.16", mem_fraction=0.97)
    figure = plot_ranks(toolkit.decide_on_ranks(kimi, (4.02, 3.98), ["gated", "ungated"]))
    heights = [patch.get_height() for patch in figure.axes[1].patches]
    assert heights == [42, 0]
    texts = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    assert "gated: 0 for all (gate_low_memory); alone they would wait for each other" in texts
    assert "ungated: 42 for all (ungated); all alike" in texts
    assert "old gate 4.00 GiB" in legend(figure) and "3.98 GiB" in legend(figure)
