"""Budgets against a forecast that has a range: what is uncertain is said, and disabling is not sold for a design."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import toolkit
from toolkit.cli import main
from toolkit.errors import InvalidInput
from toolkit.ladder_coverage import cover
from toolkit.ladder_models import short_figure
from toolkit.views.ladder_tables import ladder_view

PROMPTS = {5: 300, 60: 300, 200: 300, 500: 300, 900: 300}


@pytest.fixture(scope="module")
def plan() -> toolkit.Plan:
    return toolkit.plan(model="qwen3-8b", gpu="h100-80gb")


def _alone(bucket: int) -> tuple[float, float, float]:
    """GiB of a ladder of one bucket, with its range, as a plan of that ladder forecasts them."""
    found = toolkit.plan(model="qwen3-8b", gpu="h100-80gb", buckets=[bucket]).forecast
    assert found is not None
    return found.peak.low / 1024, found.peak.mid / 1024, found.peak.high / 1024


def test_a_budget_inside_the_range_of_the_smallest_ladder_is_uncertain(plan: toolkit.Plan) -> None:
    low, mid, high = _alone(5)
    assert low < 0.5 < mid < high
    made = toolkit.design_ladder(PROMPTS, plan=plan, memory_gib=0.5)
    assert made.undecided and made.ladder == () and made.server_flags() == []
    assert f"takes {mid:.2f} GiB ({low:.2f} to {high:.2f})" in made.empty_because
    assert made.sentence().startswith("no ladder is proposed: uncertain whether anything fits")
    assert not any("leave room for no more" in note for note in made.notes)
    shown = "\n".join(str(part) for part in ladder_view(made))
    assert "disable" not in shown and "flags of an SGLang 0.5.23 server: n/a" in shown
    assert made.to_dict()["server_flags"] == []
    assert "disable" not in made._repr_html_()


def test_a_budget_below_the_range_is_not_uncertain(plan: toolkit.Plan) -> None:
    low, _, _ = _alone(5)
    made = toolkit.design_ladder(PROMPTS, plan=plan, memory_gib=round(low - 0.05, 2))
    assert not made.undecided and made.empty_because.startswith("nothing fits")
    assert made.server_flags() == ["--disable-prefill-cuda-graph"]


@pytest.mark.parametrize("budget", [1.0, 1.2, 1.5])
def test_no_evenly_spread_ladder_within_the_budget_is_cheaper(plan: toolkit.Plan, budget: float) -> None:
    """The law's terms are only fitted to the forecast: what they leave of the budget is used all the same."""
    lengths = list(range(1, 3000, 7))
    made = toolkit.design_ladder(lengths, plan=plan, memory_gib=budget)
    law = made.limits.memory
    assert law is not None and 0.97 * budget <= law.of(made.ladder) <= budget
    found = cover(made.histogram, made.ladder, made.cost, made.replay_limit).mean_cost
    even = [
        [round(top * (place + 1) / count) for place in range(count)]
        for count in (8, 16, 24, 32, 40, 48, 58)
        for top in (1200, 2000, 2400, 2800, max(lengths))
    ]
    fitting = [ladder for ladder in even if law.of(ladder) <= budget]
    assert fitting
    for ladder in fitting:
        assert found <= cover(made.histogram, ladder, made.cost, made.replay_limit).mean_cost, ladder


@pytest.mark.parametrize("first", [0.2, 0.5])
def test_the_budget_that_is_named_works_and_the_certain_one_is_certain(plan: toolkit.Plan, first: float) -> None:
    made = toolkit.design_ladder(PROMPTS, plan=plan, memory_gib=first)
    works = re.search(r"budget that works is ([\d.]+) GiB, certainly ([\d.]+) GiB", made.empty_because)
    assert works is not None
    least, certain = map(float, works.groups())
    assert not toolkit.design_ladder(PROMPTS, plan=plan, memory_gib=round(least - 0.01, 2)).ladder
    found = toolkit.design_ladder(PROMPTS, plan=plan, memory_gib=least)
    assert found.ladder
    assert any("uncertain: this ladder keeps the memory budget" in note for note in found.notes)
    _, _, high = _alone(5)
    assert high <= certain < high + 0.011


def test_a_time_budget_is_shown_with_the_range_of_public_captures(plan: toolkit.Plan) -> None:
    """Breakable captures on H100 and H200 took 0.39 to 0.81 s for each bucket after the first, which took 1 s."""
    even = {size: 40 for size in range(16, 8193, 16)}
    made = toolkit.design_ladder(even, plan=plan, time_s=20)
    buckets = len(made.ladder)
    seconds = made.proposal.capture_s
    assert seconds is not None and seconds <= 20
    note = next(one for one in made.notes if "time budget of 20 s" in one)
    low, high = map(float, re.findall(r"range is ([\d.]+) to ([\d.]+) s", note)[0])
    assert low == pytest.approx(1 + 0.39 * (buckets - 1), rel=0.02)
    assert high == pytest.approx(1 + 0.81 * (buckets - 1), rel=0.02)
    assert f"proposal {seconds:.2f} s ({low:.2f} to {high:.2f})" in "\n".join(str(part) for part in ladder_view(made))


def test_a_budget_that_holds_all_of_the_range_is_no_matter_of_doubt(plan: toolkit.Plan) -> None:
    made = toolkit.design_ladder(PROMPTS, plan=plan, memory_gib=5.0, time_s=100.0)
    assert not any("uncertain" in note for note in made.notes)


def test_what_certainly_holds_nothing_decides_before_what_may(plan: toolkit.Plan) -> None:
    made = toolkit.design_ladder(PROMPTS, plan=plan, memory_gib=0.5, time_s=0.5)
    assert not made.undecided and "the time budget is 0.5 s" in made.empty_because


def test_a_ceiling_that_does_not_fit_is_refused_with_the_range(plan: toolkit.Plan) -> None:
    with pytest.raises(InvalidInput, match=r"GiB \([\d.]+ to [\d.]+\)"):
        toolkit.design_ladder(PROMPTS, plan=plan, memory_gib=0.6, keep_ceiling=True)


def test_the_command_says_so_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,count\n" + "".join(f"{size},{count}\n" for size, count in PROMPTS.items()))
    words = ["ladder", str(path), "--model", "qwen3-8b", "--gpu", "h100-80gb", "--memory", "0.5"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("no ladder is proposed: uncertain whether anything fits")
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["empty_because"].startswith("uncertain")


@pytest.mark.parametrize(("value", "words"), [(0.0, "0.00"), (0.0042, "0.0042"), (0.51, "0.51"), (12.34, "12.34")])
def test_little_does_not_read_as_nothing(value: float, words: str) -> None:
    assert short_figure(value) == words
