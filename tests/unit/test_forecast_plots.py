"""Forecast against measurement: what the tables say, and that figures say it too, with both provenances."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from tests.synthetic_records import CPU_LABEL, made_up_record, skipped_record
from toolkit.forecast.calibration import load_calibration
from toolkit.forecast.terms import BucketForecast, Forecast, Range
from toolkit.views.forecast_plots import (
    MAX_WAYS,
    comparison_words,
    field_errors,
    forecast_against_run,
    plot_field_errors,
    plot_forecast_against_run,
    plot_order,
    trace_taken,
)
from toolkit.views.frames import display_table
from toolkit.views.plots import alt_text, figure_png

LADDER = (64, 16, 8)


def _forecast(cumulative: dict[int, Range]) -> Forecast:
    buckets, before = [], Range.exact(0.0)
    for tokens, gone in cumulative.items():
        buckets.append(BucketForecast(tokens, gone - before, gone, gone))
        before = gone
    return Forecast("synthetic", (), tuple(buckets))


def _of(record: Any, wide: float = 0.0) -> Forecast:
    took = {bucket.num_tokens: bucket.cumulative_mib for bucket in record.buckets}
    return _forecast({tokens: Range(mib, mib - wide, mib + wide) for tokens, mib in took.items()})


def _legend(figure: Any) -> str:
    return " ".join(text.get_text().replace("\n", " ") for legend in figure.legends for text in legend.get_texts())


def test_a_forecast_that_is_right_is_equal_at_every_bucket() -> None:
    record = made_up_record(ladder=list(LADDER))
    table = forecast_against_run(_of(record), record)
    assert table["num_tokens"].tolist() == list(LADDER)  # in order of capture
    assert table["equal"].all() and table["in_range"].all()
    assert table["difference_mib"].abs().max() == 0
    assert comparison_words(table).startswith("3 of 3 buckets known on both sides: equal at 3, in range at 3")


def test_a_forecast_that_is_too_low_says_so_with_a_sign() -> None:
    record = made_up_record(ladder=[64])
    took = record.buckets[0].cumulative_mib or 0.0
    row = forecast_against_run(_forecast({64: Range(took - 1, took - 2, took - 0.5)}), record).iloc[0]
    assert row["difference_mib"] == pytest.approx(-1)
    assert not row["equal"] and not row["in_range"]


def test_what_one_side_does_not_know_is_missing() -> None:
    record = made_up_record(ladder=[64, 16])
    table = forecast_against_run(_forecast({64: Range.exact(3.2), 32: Range.exact(4.0)}), record)
    assert table["num_tokens"].tolist() == [64, 32, 16]
    assert table["equal"].isna().tolist() == [False, True, True]
    shown = display_table(table)
    assert shown["measured_added_mib"].tolist()[1] == shown["in_range"].tolist()[1] == "n/a"
    assert shown["forecast_added_mib"].tolist()[2] == "n/a"


def test_unknown_memory_of_a_run_is_no_zero() -> None:
    record = made_up_record(ladder=[64])
    nothing = record.buckets[0].model_copy(update={"added_mib": None, "cumulative_mib": None})
    table = forecast_against_run(_of(record), record.model_copy(update={"buckets": [nothing]}))
    assert math.isnan(table["measured_cumulative_mib"][0]) and table["equal"].isna().all()
    assert comparison_words(table) == "no bucket is known on both sides (1 in all)"


def test_an_unknown_forecast_is_not_equal_and_is_drawn() -> None:
    record = made_up_record(ladder=[64])
    unknown = _forecast({64: Range.exact(math.nan)})
    assert not forecast_against_run(unknown, record)["equal"][0]
    assert figure_png(plot_forecast_against_run(unknown, record))[:4] == b"\x89PNG"


def test_a_trace_tells_what_was_taken_after_each_bucket_but_the_last() -> None:
    trace = pd.DataFrame({"num_tokens": [64, 16, 8], "avail_mem_gib": [10.0, 8.0, 7.5]})
    taken = trace_taken(trace)
    assert taken["added_mib"].tolist()[:2] == [2048.0, 512.0]
    assert taken["cumulative_mib"].tolist()[:2] == [2048.0, 2560.0]
    assert taken.iloc[2][["added_mib", "cumulative_mib"]].isna().all()
    table = forecast_against_run(_forecast({64: Range(2048, 2000, 2100)}), taken)
    assert table["in_range"].tolist()[0] and table["num_tokens"].tolist() == [64, 16, 8]


def test_the_figure_names_both_provenances_and_draws_both() -> None:
    record = made_up_record(ladder=list(LADDER))
    figure = plot_forecast_against_run(_of(record, wide=1.0), record)
    assert "engine synthetic" in alt_text(figure) and CPU_LABEL in alt_text(figure)
    legend = _legend(figure)
    assert "range of the forecast" in legend and "exact" not in legend
    assert "measured: cumulative" in legend and "0 wherever both are known" in legend
    drawn: Any = next(line for line in figure.axes[0].lines if str(line.get_label()).startswith("measured"))
    assert list(drawn.get_ydata()) == [bucket.cumulative_mib for bucket in reversed(record.buckets)]
    assert figure_png(figure)[:4] == b"\x89PNG"


def test_exact_figures_have_no_band_and_say_so() -> None:
    record = made_up_record(ladder=list(LADDER))
    assert "the figures are exact" in _legend(plot_forecast_against_run(_of(record), record))


def test_a_frame_needs_its_source_in_words() -> None:
    taken = pd.DataFrame({"num_tokens": [64], "added_mib": [4.0], "cumulative_mib": [4.0]})
    forecast = _forecast({64: Range.exact(3.0)})
    assert "measured: a public log" in alt_text(plot_forecast_against_run(forecast, taken, "a public log"))
    assert "measured: source n/a" in alt_text(plot_forecast_against_run(forecast, taken))
    assert "negative: forecast too low" in _legend(plot_forecast_against_run(forecast, taken))


def test_a_measurement_far_above_the_forecast_is_inside_the_axes() -> None:
    taken = pd.DataFrame({"num_tokens": [64, 8], "added_mib": [400.0, None], "cumulative_mib": [400.0, None]})
    figure = plot_forecast_against_run(_forecast({64: Range.exact(3.0), 8: Range.exact(4.0)}), taken, "a public log")
    assert figure.axes[0].get_ylim()[1] > 400
    assert "n/a" in [text.get_text().strip() for text in figure.axes[0].texts]


def test_nothing_on_either_side_is_said_in_words() -> None:
    figure = plot_forecast_against_run(_forecast({}), skipped_record())
    assert "Neither side has a bucket" in alt_text(figure) and "old gate skipped" in alt_text(figure)


def test_field_errors_are_signed_and_the_worst_comes_first() -> None:
    table = field_errors(load_calibration())
    assert table["model"][0] == "Qwen3-VL-30B-A3B-Instruct" and table["loo_error_percent"][0] < -30
    assert table["loo_error_percent"].is_monotonic_increasing
    by_hand = 100 * (table["loo_forecast_gib"] - table["measured_gib"]) / table["measured_gib"]
    assert (by_hand - table["loo_error_percent"]).abs().max() < 0.06


def test_the_scatter_labels_every_row_and_draws_line_and_band() -> None:
    calibration = load_calibration()
    figure = plot_field_errors(calibration)
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    for row in calibration.rows:
        name = f"{row.model}: {row.loo_error_pct:+.1f} %\n{row.backend}, {row.n_buckets} buckets, tp {row.tp}"
        assert name in words
    assert "1:1" in _legend(figure) and "within 15 %" in _legend(figure)
    assert f"n = {len(calibration.rows)}" in alt_text(figure)
    assert figure_png(figure)[:4] == b"\x89PNG"


def test_no_field_rows_is_said_in_words() -> None:
    empty = load_calibration().model_copy(update={"rows": ()})
    assert "No capture was compared" in alt_text(plot_field_errors(empty))
    assert field_errors(empty).empty


def test_orders_are_drawn_with_their_last_figure() -> None:
    figure = plot_order({"largest first": [8.0, 8.0], "smallest first": [4.0, 12.0]}, "a made-up ladder")
    assert "largest first: 8 MiB" in _legend(figure) and "smallest first: 12 MiB" in _legend(figure)
    assert "a made-up ladder" in alt_text(figure)
    styles = [(line.get_marker(), line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert all(len(set(one)) == 2 for one in zip(*styles, strict=True))


def test_more_ways_than_can_be_told_apart_are_counted() -> None:
    figure = plot_order({f"way {number}": [1.0] for number in range(MAX_WAYS + 2)}, "a made-up ladder")
    assert "2 more not shown" in alt_text(figure)


def test_no_ladder_is_said_in_words() -> None:
    assert "No ladder was given" in alt_text(plot_order({}, "nothing"))
    assert "n/a" in alt_text(plot_order({"a": [1.0], "b": []}, "nothing"))
