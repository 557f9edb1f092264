"""Two runs over each other: which is which, what differs, and by how much."""

from __future__ import annotations

import warnings
import xml.etree.ElementTree as ET

import pytest
from matplotlib.figure import Figure
from synthetic_records import SMALL, made_up_record, oom_record, skipped_record

from toolkit.ladder import generate_prefill_buckets
from toolkit.runs.record import RunRecord
from toolkit.views import frames, plots
from toolkit.views.overlay import (
    bucket_difference_table,
    difference_table,
    overlay_tips,
    plot_overlay,
    run_labels,
)
from toolkit.views.svg import figure_svg

H100 = {"label": "synthetic H100"}
A = made_up_record(id="20261129-130501-a1b2c3", ladder=[8, 32, 128], settings={"policy": "gated"})
B = made_up_record(id="20261129-130801-d4e5f6", ladder=[8, 64, 128], settings={"backend": "full"}, device=H100)


def words(figure: Figure) -> str:
    figure.canvas.draw()
    found = [figure.get_suptitle(), *(text.get_text() for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
        found += [text.get_text() for text in (*axes.texts, *axes.get_xticklabels())]
    return " ".join(" ".join(found).split())


def with_first(record: RunRecord, seconds: float) -> RunRecord:
    slow = record.buckets[0].model_copy(update={"elapsed_s": seconds})
    return record.model_copy(update={"buckets": [slow, *record.buckets[1:]]})


# --- the figure -------------------------------------------------------------------------------------------


def test_the_figure_says_which_run_is_which_and_where_each_was_measured() -> None:
    text = words(plot_overlay(A, B))
    assert "A (run a1b2c3): policy gated, backend breakable (auto), device synthetic cpu (accounted)" in text
    assert "B (run d4e5f6): policy ungated, backend full, device synthetic H100" in text
    assert "A: measured on synthetic cpu (accounted): memory accounted by an allocator model" in text
    assert "B: measured on synthetic H100 | model synthetic-135m | backend full | policy ungated" in text
    assert "(MiB)" in text and "time per bucket (s)" in text and "tokens" in text
    alt = plots.alt_text(plot_overlay(A, B))
    assert alt.startswith("Two runs compared") and "synthetic H100" in alt and "3 buckets" in alt


def test_where_both_were_measured_alike_it_is_said_once() -> None:
    text = words(plot_overlay(A, made_up_record(id="20261129-130801-d4e5f6", settings={"policy": "gated"})))
    assert "A and B: measured on synthetic cpu (accounted)" in text
    assert text.count("measured on") == 1


def test_a_bucket_that_one_run_lacks_is_a_gap() -> None:
    figure = plot_overlay(with_first(A, 0.1), with_first(B, 0.1))
    for axes in figure.axes:
        first, second = axes.get_lines()
        # The ladder of both is 8, 32, 64, 128.
        assert [value != value for value in first.get_ydata()] == [False, False, True, False]
        assert [value != value for value in second.get_ydata()] == [False, True, False, False]
        looks = [(line.get_linestyle(), line.get_marker()) for line in (first, second)]
        assert looks[0][0] != looks[1][0] and looks[0][1] != looks[1][1]
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["8", "32", "64", "128"]


def test_a_first_bucket_that_dwarfs_the_others_is_left_out_and_named() -> None:
    figure = plot_overlay(with_first(A, 114.6), B)
    text = words(figure)
    assert "A captured first: 128 tokens, 114.60 s (off the scale)" in text
    assert "B captured first: 128 tokens, 1.05 s (off the scale)" in text  # 0.952 + 0.093 + 0.010 s
    assert figure.axes[1].get_ylim()[1] < 2
    first, _ = figure.axes[1].get_lines()
    assert first.get_ydata()[-1] != first.get_ydata()[-1]
    assert "off the scale" not in words(plot_overlay(with_first(A, 0.1), with_first(B, 0.1)))


def test_out_of_memory_is_marked_for_each_run() -> None:
    lower = oom_record(oom_bucket=1024, ladder=[n for n in generate_prefill_buckets(8192) if n > 1024])
    text = words(plot_overlay(oom_record(), lower))
    assert "A: out of memory at 640 tokens" in text
    assert "B: out of memory at 1024 tokens" in text
    assert "A and B: out of memory at 640 tokens" in words(plot_overlay(oom_record(), oom_record()))


def test_a_run_without_buckets_is_named_and_two_are_said_in_words() -> None:
    assert "A (run 5eed): same settings; no bucket captured (skipped)" in words(
        plot_overlay(skipped_record(), made_up_record(settings={"policy": "gated"}))
    )
    figure = plot_overlay(skipped_record(), skipped_record(device=H100))
    text = words(figure)
    assert "B: measured on synthetic H100" in text
    assert text.count("the old gate skipped the capture: 3.97 GiB free") == 2


def test_other_settings_that_differ_are_in_the_label() -> None:
    first = made_up_record(settings={"free_memory_gib": 3.0, "buckets": [8, 16], "dtype": "float16"})
    second = made_up_record(settings={"free_memory_gib": 5.0, "buckets": None})
    assert run_labels(first, second) == (
        "A (run 5eed): dtype float16, free_memory_gib 3.0, buckets 8, 16",
        "B (run 5eed): dtype bfloat16, free_memory_gib 5.0, buckets not set",
    )
    assert run_labels(first, first)[1] == "B (run 5eed): same settings"


LONG_NAMES = made_up_record(
    id="x" * 300,
    ladder=generate_prefill_buckets(8192),
    settings={"model": "<b>/" + "Llama-4-" * 40, "policy": "a\nb\x1b[31m", "a": "y " * 200, "max_tokens": 8192},
    device={"label": "synthetic " + "device " * 20},
)


@pytest.mark.parametrize(
    ("first", "second"),
    [(A, B), (LONG_NAMES, A), (with_first(A, 1e308), with_first(B, 1e308)), (oom_record(ladder=[]), skipped_record())],
    ids=["two", "long names", "1e308", "nothing"],
)
def test_it_draws_without_a_warning_and_inside_its_sheet(first: RunRecord, second: RunRecord) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot_overlay(first, second)
        svg = figure_svg(figure, overlay_tips(first, second))
    ET.fromstring(svg)
    assert len(svg) < 250_000
    figure.canvas.draw()
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0


def test_each_bucket_of_both_has_a_line_for_each_run() -> None:
    tips = overlay_tips(A, B)
    assert list(tips) == [8, 32, 64, 128]
    first, second = tips[64].splitlines()
    assert first == "A: bucket 64 tokens: not captured"
    assert second.startswith("B: bucket 64 tokens: captured 2 of 3; added 0.57 MiB")
    assert figure_svg(plot_overlay(A, B), tips).count('class="bucket"') == 4 * 2


# --- the tables -------------------------------------------------------------------------------------------


def test_quantities_stand_side_by_side_with_their_difference() -> None:
    first = made_up_record(free_before_gib=3.5, capture_time_s=10.0, kv_cache_tokens=1000, mem_fraction_static=0.8)
    second = made_up_record(
        free_before_gib=4.25, capture_time_s=8.0, kv_cache_tokens=750, settings={"policy": "gated"}, ladder=[8, 16]
    )
    table = difference_table(first, second).set_index("quantity")
    assert list(table.columns) == ["A", "B", "difference", "differs"]
    assert table.loc["policy"].tolist() == ["ungated", "gated", None, "differs"]
    assert table.loc["model", "differs"] == "same"
    assert table.loc["buckets captured"].tolist() == [7, 2, -5, "differs"]
    assert table.loc["free before (GiB)"].tolist() == [3.5, 4.25, 0.75, "differs"]
    assert table.loc["capture (s)", "difference"] == -2.0
    assert table.loc["KV cache (tokens)"].tolist() == [1000, 750, -250, "differs"]
    assert table.loc["mem_fraction_static"].tolist() == [0.8, None, None, "differs"]
    shown = frames.display_table(difference_table(first, second))
    assert shown.loc["KV cache (tokens)", "difference"] == "-250"
    assert shown.loc["mem_fraction_static"].tolist() == ["0.800", "n/a", "n/a", "differs"]
    assert shown.loc["free before (GiB)", "difference"] == "0.750"


def test_what_neither_run_knows_is_not_called_the_same() -> None:
    row = difference_table(made_up_record(), made_up_record()).set_index("quantity").loc["KV cache (tokens)"]
    assert row.tolist() == [None, None, None, None]


def test_settings_that_differ_have_a_row_each() -> None:
    table = difference_table(made_up_record(settings={"seed": 1}), made_up_record()).set_index("quantity")
    assert table.loc["setting seed"].tolist() == ["1", "not set", None, "differs"]
    assert "setting dtype" not in table.index


def test_buckets_stand_side_by_side() -> None:
    table = bucket_difference_table(A, B)
    assert table.num_tokens.tolist() == [8, 32, 64, 128]
    table = table.set_index("num_tokens")
    # Both made-up runs take 128 / 20 MiB for their first bucket; 32 is A's alone, 0.5 + 32 / 900 MiB.
    assert table.loc[128, ["a_added_mib", "b_added_mib", "difference_added_mib"]].tolist() == [6.4, 6.4, 0.0]
    assert table.loc[32, "a_added_mib"] == pytest.approx(0.535556, abs=1e-6)
    assert table.loc[32, ["b_added_mib", "difference_added_mib", "b_elapsed_s"]].isna().all()
    shown = frames.display_table(bucket_difference_table(A, B))
    assert shown.loc["32", ["b_added_mib", "difference_elapsed_s"]].tolist() == ["n/a", "n/a"]
    assert all("(" in frames.heading(str(column)) for column in shown.columns)


def test_empty_tables_keep_their_columns() -> None:
    empty = bucket_difference_table(skipped_record(), skipped_record())
    assert list(empty.columns) == list(bucket_difference_table(A, B).columns)
    assert len(empty) == 0
    assert len(bucket_difference_table(skipped_record(), made_up_record())) == len(SMALL)
