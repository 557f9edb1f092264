"""What the figure and the tables of a ladder design say, in words and by what they draw."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from synthetic_records import made_up_record, skipped_record

from toolkit.errors import InvalidInput
from toolkit.ladder_coverage import cover
from toolkit.serverlogs.traffic_ladder import design_ladder
from toolkit.views.ladder_plots import plot_ladder
from toolkit.views.ladder_tables import choice_words, ladder_view
from toolkit.views.plots import alt_text, figure_png

TTS = Path(__file__).resolve().parents[1] / "data" / "traffic" / "omni_1900_tts.csv"


@pytest.fixture(scope="module")
def tts() -> Any:
    return design_ladder(TTS, default=512, max_buckets=19)


def _heights(axes: Any, label: str) -> float:
    return sum(bar.get_height() for group in axes.containers if group.get_label() == label for bar in group)


def test_bars_add_up_to_the_shares_of_the_design(tts: Any) -> None:
    figure = plot_ladder(tts)
    top, bottom = figure.axes
    assert _heights(top, "eager: bucket over the replay limit") == pytest.approx(100 * tts.default.eager_share)
    assert _heights(top, "replays") == pytest.approx(100 * tts.default.hit_rate)
    assert sum(bar.get_height() for bar in bottom.patches) == pytest.approx(100)
    assert figure_png(figure)[:4] == b"\x89PNG"


def test_words_name_traffic_cost_and_every_ladder(tts: Any) -> None:
    words = alt_text(plot_ladder(tts))
    for part in ("omni_1900_tts.csv", "assumed, not measured", "eager 40.59%", "19 buckets, 19 used: eager 0.00%"):
        assert part in words


@pytest.mark.parametrize(
    ("traffic", "choices"),
    [({1: 1}, {}), ({5: 1}, {"max_buckets": 0}), ({100_000: 3}, {}), ({7: 1, 4096: 10**9}, {"default": [4096]})],
)
def test_any_design_can_be_drawn(traffic: dict[int, int], choices: dict[str, Any]) -> None:
    figure = plot_ladder(design_ladder(traffic, **choices))
    assert figure_png(figure)[:4] == b"\x89PNG"


def test_tables_say_what_is_not_known(tts: Any) -> None:
    from io import StringIO

    from toolkit.views.tables import write_tables

    stream = StringIO()
    write_tables(ladder_view(tts), stream)
    text = stream.getvalue()
    for part in ("memory of the capture", "n/a", "--cuda-graph-bs-prefill 1 ", "no cheaper ladder exists"):
        assert part in text
    assert "within at most 19 buckets" in choice_words(tts)


# --- what the public function makes of a plan and of a run -------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Any:
    import toolkit

    return toolkit.plan(model="qwen3-8b", gpu="h100-80gb")


def test_a_plan_gives_ladder_chunk_memory_and_time(plan: Any) -> None:
    made = design_ladder({20_000: 9, 40: 1}, plan=plan)
    assert made.default.ladder == tuple(sorted(plan.buckets))
    assert set(made.histogram) == {8192, 3616, 40}
    assert made.default.memory_gib == pytest.approx(plan.forecast.peak.mid / 1024)
    assert made.default.capture_s == pytest.approx(sum(plan.forecast.capture_s))
    assert made.sglang_version == plan.release.version


@pytest.mark.parametrize("memory_gib", [0.3, 0.7, 1.2, 2.0, 3.0])
def test_the_forecast_of_the_ladder_itself_keeps_the_budget(plan: Any, memory_gib: float) -> None:
    import toolkit

    made = design_ladder({size: 1 for size in range(1, 9000, 37)}, plan=plan, memory_gib=memory_gib)
    if made.ladder:
        again = toolkit.plan(model="qwen3-8b", gpu="h100-80gb", buckets=made.ladder)
        assert again.forecast is not None
        assert again.forecast.peak.mid / 1024 <= memory_gib
        assert made.proposal.memory_gib == pytest.approx(again.forecast.peak.mid / 1024)
    else:
        assert memory_gib < 0.6  # less than what the first use of kernels takes on this card


def test_a_run_gives_costs_memory_and_time() -> None:
    record = made_up_record()
    made = design_ladder({40: 5, 500: 5}, measured=record, default=512)
    assert made.cost.unit == "ms"
    spent = cover({40: 5, 500: 5}, [40, 500], made.cost, 2)
    assert made.proposal.mean_cost == pytest.approx(spent.mean_cost)
    everything = design_ladder({40: 5}, measured=record, default=[bucket.num_tokens for bucket in record.buckets])
    assert everything.default.memory_gib == pytest.approx(record.peak_usage_gib, rel=1e-6)
    assert everything.default.capture_s == pytest.approx(record.capture_time_s, rel=1e-6)


def test_costs_beyond_what_was_timed_are_said_to_be_extrapolated() -> None:
    made = design_ladder([4000], measured=made_up_record())
    assert any("extrapolated" in note and "4000" in note for note in made.notes)


def test_what_a_run_took_is_extrapolated_to_other_ladders_and_a_cpu_is_no_gpu() -> None:
    busy = "the machine was busy (load 9.0 on 2 cores): times are inflated by other work"
    record = made_up_record(notes=[busy, "something else"])
    made = design_ladder({40: 5, 500: 5}, measured=record)
    assert made.limits.memory is not None
    assert made.limits.time is not None
    for law in (made.limits.memory, made.limits.time):
        assert law.source.startswith(f"extrapolated from {len(record.buckets)} buckets captured on synthetic cpu")
    assert f"{len(record.speed)} buckets timed on" in made.cost.source
    assert any("its times are no times of a GPU" in note for note in made.notes)
    assert f"run {record.id}: {busy}" in made.notes
    assert not any("something else" in note for note in made.notes)


def test_a_run_of_a_gpu_that_was_alone_needs_no_warning() -> None:
    record = made_up_record(device={"kind": "cuda", "label": "synthetic GPU"})
    assert not any(record.id in note for note in design_ladder({40: 5, 500: 5}, measured=record).notes)


def test_a_run_without_a_capture_gives_nothing_and_that_is_said() -> None:
    record = skipped_record()
    made = design_ladder({40: 5}, measured=record)
    assert any("(skipped) timed fewer than two buckets: costs are assumed" in note for note in made.notes)
    for budget in ({"memory_gib": 1.0}, {"time_s": 1.0}):
        with pytest.raises(InvalidInput, match=r"run .* \(skipped\) does not say what"):
            design_ladder({40: 5}, measured=record, **budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"default": "8,16"}, {"default": 8.5}, {"default": [8.5]}, {"max_buckets": "3"}, {"max_buckets": 1.5}),
        *({"max_buckets": float("nan")}, {"chunked_prefill_size": 8.5}, {"sglang_version": 5}, {"measured": "x"}),
        *({"plan": "x"}, {"cost": "x"}, {"step": 1.5}, {"step": None}),
        *({"memory_gib": "1"}, {"time_s": "x"}, {"memory": "x"}),
    ],
)
def test_an_argument_of_another_kind_is_refused_in_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        design_ladder({40: 5}, **wrong)
    assert len(str(caught.value).splitlines()) == 1


def test_a_log_that_disagrees_with_the_rules_is_remarked_upon() -> None:
    def log(graph: bool) -> io.StringIO:
        return io.StringIO(f"Prefill batch, #new-seq: 1, #new-token: 8, #cached-token: 0, cuda graph: {graph}\n")

    assert not any("the log says" in note for note in design_ladder(log(True)).notes)
    assert any("the log says 0.0% replayed" in note for note in design_ladder(log(False)).notes)


def test_without_a_default_ladder_nothing_limits_the_proposal() -> None:
    assert design_ladder({8: 1, 100: 1}, default=0).ladder == (8, 100)


def test_a_default_ladder_may_be_an_array() -> None:
    import numpy as np

    assert design_ladder([1, 100], default=np.array([8, 128])).default.ladder == (8, 128)  # type: ignore[arg-type]
    assert len(design_ladder([1, 100], default=np.int64(512)).default.ladder) == 30  # type: ignore[arg-type]


def test_the_oldest_release_has_no_replay_limit() -> None:
    assert design_ladder([1, 100], sglang_version="0.5.15", default=[128]).default.hit_rate == 1
    assert design_ladder([1, 100], sglang_version="0.5.16", default=[128]).default.hit_rate == 0.5
