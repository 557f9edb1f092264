"""Figures and the tables beside them: what they say, in which unit, from where, not by colour alone."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from synthetic_records import CPU_LABEL, SMALL, made_up_record, oom_record, skipped_record

from toolkit.ladder import generate_prefill_buckets
from toolkit.runs.record import RunRecord, SpeedPoint
from toolkit.views import frames, plots, sheet

PER_RECORD = (plots.plot_memory, plots.plot_capture_time, plots.plot_speed, plots.plot_ledger)


def all_text(figure: Figure) -> str:
    """Everything a reader can see in words: titles, labels, ticks, annotations, legends."""
    figure.canvas.draw()
    found = [figure.get_suptitle()]
    found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
        found += [text.get_text() for text in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())]
    return "\n".join(found)


def without_memory(record: RunRecord, *tokens: int) -> RunRecord:
    unknown = {"added_mib": None, "cumulative_mib": None, "free_after_gib": None, "graph_nodes": None}
    buckets = [
        bucket.model_copy(update=unknown) if bucket.num_tokens in tokens else bucket for bucket in record.buckets
    ]
    return record.model_copy(update={"buckets": buckets})


# --- what every figure says -------------------------------------------------------------------------------


@pytest.mark.parametrize("plot", PER_RECORD)
def test_every_figure_says_what_it_was_measured_on(plot) -> None:
    figure = plot(made_up_record())
    flat = " ".join(all_text(figure).split())
    for part in (
        f"measured on {CPU_LABEL}",
        "memory accounted by an allocator model, times are real CPU times",
        "model synthetic-135m",
        "backend breakable (auto)",
        "policy ungated",
    ):
        assert part in flat
    assert plots.alt_text(figure).startswith(figure.get_suptitle())


@pytest.mark.parametrize("plot", PER_RECORD)
def test_a_real_device_is_not_called_accounted(plot) -> None:
    record = made_up_record(device={"label": "synthetic H100"}, settings={"backend": "full"})
    text = " ".join(all_text(plot(record)).split())
    assert "measured on synthetic H100 | model" in text
    assert "accounted" not in text
    assert "backend full | policy" in text


@pytest.mark.parametrize("plot", PER_RECORD)
@pytest.mark.parametrize("record", [made_up_record(), made_up_record(ladder=generate_prefill_buckets(16384))])
def test_text_is_large_enough_for_a_projector(plot, record: RunRecord) -> None:
    figure = plot(record)
    figure.canvas.draw()
    texts = [text for text in figure.findobj(mpl.text.Text) if text.get_text() and text.get_visible()]
    assert texts
    assert min(text.get_fontsize() for text in texts) >= 11


def test_axes_have_units() -> None:
    memory = plots.plot_memory(made_up_record())
    assert "(MiB)" in memory.axes[0].get_ylabel()
    assert "(GiB)" in memory.axes[1].get_ylabel()
    assert "tokens" in memory.axes[1].get_xlabel()
    assert "(s)" in plots.plot_capture_time(made_up_record()).axes[0].get_ylabel()
    assert "(ms)" in plots.plot_speed(made_up_record()).axes[0].get_ylabel()
    assert "(GiB)" in plots.plot_ledger(made_up_record()).axes[0].get_xlabel()
    assert "(GiB)" in plots.plot_compare([made_up_record()]).axes[0].get_xlabel()


def test_series_differ_in_more_than_colour() -> None:
    record = made_up_record()
    for figure in (plots.plot_memory(record), plots.plot_speed(record)):
        for axes in figure.axes:
            looks = [(line.get_linestyle(), line.get_marker()) for line in axes.get_lines()]
            assert len(looks) == len(set(looks))
    for figure in (plots.plot_capture_time(record), plots.plot_compare([record])):
        looks = [group.patches[0].get_hatch() for group in figure.axes[0].containers]
        assert len(looks) > 1
        assert len(looks) == len(set(looks))
    bars = plots.plot_ledger(record).axes[0].containers
    assert len({(b.patches[0].get_hatch(), b.patches[0].get_facecolor()) for b in bars}) == len(bars)
    assert len({b.patches[0].get_hatch() for b in bars}) >= len(bars) - 1  # `free` and the context are plain


# --- bucket axis ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ceiling", [512, 8192, 16384])
def test_tick_labels_of_a_long_ladder_do_not_touch(ceiling: int) -> None:
    figure = plots.plot_memory(made_up_record(ladder=generate_prefill_buckets(ceiling)))
    figure.canvas.draw()
    axes = figure.axes[1]
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) >= 8
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[0] == "4"
    assert labels[-1] == str(ceiling)
    # Every bucket has a tick, labelled or not.
    assert len(set(axes.get_xticks()) | set(axes.get_xticks(minor=True))) == len(generate_prefill_buckets(ceiling))


def test_a_short_ladder_is_labelled_in_full() -> None:
    labels = plots.plot_capture_time(made_up_record()).axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == [str(tokens) for tokens in SMALL]


def test_the_bucket_that_failed_is_marked() -> None:
    record = oom_record()
    for plot in (plots.plot_memory, plots.plot_capture_time):
        figure = plot(record)
        assert "out of memory at 640 tokens" in all_text(figure)
        assert "640" in [label.get_text() for label in figure.axes[-1].get_xticklabels()]
        assert all(any(patch.get_hatch() == "xx" for patch in axes.patches) for axes in figure.axes)
    assert "out of memory at bucket 640" in plots.alt_text(plots.plot_memory(record))


def test_out_of_memory_at_the_very_first_bucket() -> None:
    figure = plots.plot_memory(oom_record(ladder=[]))
    assert "out of memory at 640 tokens" in all_text(figure)
    assert plots.figure_png(figure).startswith(b"\x89PNG")


# --- memory and time --------------------------------------------------------------------------------------


def test_the_old_gate_is_drawn_and_named() -> None:
    for figure, axes in (
        (memory := plots.plot_memory(made_up_record()), memory.axes[1]),
        (compare := plots.plot_compare([made_up_record()]), compare.axes[0]),
    ):
        gate = next(line for line in axes.get_lines() if line.get_label() == plots.GATE_LABEL)
        assert 4.0 in (gate.get_xdata()[0], gate.get_ydata()[0])
        assert "old gate 4.00 GiB (SGLang 0.5.16-0.5.17)" in all_text(figure)


def test_the_gate_is_in_view_or_named_above_the_axis() -> None:
    for free, drawn in ((0.3, False), (1.01, True), (3.97, True), (140.0, True)):
        figure = plots.plot_memory(made_up_record(free_before_gib=free))
        low, high = figure.axes[1].get_ylim()
        assert bool(low < 4.0 < high) is drawn
        legend = " ".join(text.get_text() for text in figure.legends[0].get_texts())
        assert ("above this axis" in legend) is not drawn


def test_bars_carry_the_figures_of_the_record() -> None:
    record = made_up_record()
    added = plots.plot_memory(record).axes[0].containers[0]
    expected = [bucket.added_mib for bucket in sorted(record.buckets, key=lambda b: b.num_tokens)]
    assert [bar.get_height() for bar in added] == expected
    warm, capture, _ = plots.plot_capture_time(record).axes[0].containers
    assert [bar.get_height() for bar in warm][-1] == pytest.approx(record.buckets[0].warmup_s)
    assert [bar.get_y() for bar in capture][-1] == pytest.approx(record.buckets[0].warmup_s)


def test_unknown_memory_is_a_gap_and_says_so() -> None:
    some = plots.plot_memory(without_memory(made_up_record(), 64))
    assert [text.get_text().strip() for text in some.axes[0].texts] == ["n/a"]
    free = next(line for line in some.axes[1].get_lines() if "free after" in str(line.get_label()))
    assert [value != value for value in free.get_ydata()] == [tokens == 64 for tokens in SMALL]

    none = plots.plot_memory(without_memory(made_up_record(), *SMALL).model_copy(update={"free_before_gib": None}))
    text = all_text(none)
    assert "free after each bucket: n/a" in text
    assert "free before the capture (n/a)" in text
    assert "free n/a before" in plots.alt_text(none)


def test_the_bucket_captured_first_is_named() -> None:
    assert "captured first: 512 tokens" in all_text(plots.plot_capture_time(made_up_record()))
    ascending = made_up_record(capture_order=SMALL)
    assert "captured first: 8 tokens" in all_text(plots.plot_capture_time(ascending))


def test_a_first_bucket_that_dwarfs_the_others_is_cut_and_says_so() -> None:
    record = made_up_record()
    slow = record.buckets[0].model_copy(update={"warmup_s": 114.0, "elapsed_s": 114.6})
    figure = plots.plot_capture_time(record.model_copy(update={"buckets": [slow, *record.buckets[1:]]}))
    assert "captured first: 512 tokens, 114.60 s (bar cut)" in all_text(figure).replace("114.61", "114.60")
    assert figure.axes[0].get_ylim()[1] < 2


# --- speed, comparison, ledger ----------------------------------------------------------------------------


def test_speed_shows_the_ratio_and_leaves_out_what_cannot_be_divided() -> None:
    points = [
        SpeedPoint(num_tokens=8, eager_ms=10, replay_ms=9),
        SpeedPoint(num_tokens=16, eager_ms=0, replay_ms=1),
    ]
    record = made_up_record(speed=points)
    ratio = next(
        line for line in plots.plot_speed(record).axes[1].get_lines() if "replay / eager" in str(line.get_label())
    )
    values = list(ratio.get_ydata())
    assert values[0] == pytest.approx(0.9)
    assert values[1] != values[1]
    assert frames.median_ratio(record) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("ladder", "expected"),
    [
        # 8 serves 4 to 8 tokens (3 and fewer run eager): 4+3+2+1+0 rows of padding in 5 replays of 8 rows.
        ([8, 32], {8: (25.0, 50.0), 32: (25.0, 50.0)}),
        # 6 serves 5 and 6, 7 only 7; 5 alone serves 3 to 5.
        ([4, 6, 7], {4: (25.0, 50.0), 6: (100 / 12, 100 / 6), 7: (0.0, 0.0)}),
        ([5], {5: (20.0, 40.0)}),
        ([1, 2], {1: (0.0, 0.0), 2: (0.0, 0.0)}),
        ([], {}),
    ],
)
def test_padding_is_of_the_requests_a_bucket_replays(ladder: list[int], expected: dict) -> None:
    record = made_up_record(ladder=ladder)
    assert frames.padding_percent(record) == {n: pytest.approx(shares) for n, shares in expected.items()}
    table = frames.speed_table(record)
    assert table.padding_mean_percent.tolist() == pytest.approx([mean for mean, _ in expected.values()])
    assert table.padding_most_percent.tolist() == pytest.approx([most for _, most in expected.values()])


def test_compare_puts_runs_side_by_side() -> None:
    runs = [skipped_record(), made_up_record(), oom_record(device={"label": "synthetic H100"})]
    text = all_text(plots.plot_compare(runs))
    for part in (
        "gated",
        "ungated",
        "0 (skipped)",
        "7 (captured)",
        "26 (oom)",
        "3.97 GiB",
        "n/a",
        "synthetic H100",
    ):
        assert part in text
    assert "measured on (see each row)" in text


def test_compare_counts_what_it_cannot_show() -> None:
    figure = plots.plot_compare([made_up_record()] * 30)
    assert "6 more runs not shown" in " ".join(all_text(figure).split())


def test_ledger_lists_every_owner_with_its_figure() -> None:
    text = all_text(plots.plot_ledger(made_up_record()))
    for part in ("weights: 0.25 GiB", "KV pool: 3.20 GiB (40.0 %)", "ballast: n/a", "free:"):
        assert part in text


def test_ledger_shows_what_nobody_owns() -> None:
    record = made_up_record(ledger={"total_gib": 8.0, "weights_gib": 2.0, "later_gib": 1.0, "free_gib": 4.0})
    table = frames.ledger_table(record).set_index("owner")
    assert list(table.index) == ["weights", "later", "free", "not accounted for"]
    assert table.gib["not accounted for"] == pytest.approx(1.0)
    assert table.share_percent.sum() == pytest.approx(100)


# --- nothing to plot --------------------------------------------------------------------------------------


@pytest.mark.parametrize("plot", PER_RECORD[:3])
def test_a_skipped_run_says_why_in_words(plot) -> None:
    figure = plot(skipped_record())
    text = " ".join(all_text(figure).split())
    assert "the old gate skipped the capture: 3.97 GiB free, under 4.00 GiB" in text
    assert "policy gated" in text
    assert "the old gate skipped" in plots.alt_text(figure)


def test_nothing_known_is_said_in_words() -> None:
    assert "not known (n/a)" in all_text(plots.plot_ledger(made_up_record(ledger={})))
    assert "not known (n/a)" in all_text(plots.plot_ledger(made_up_record(ledger={"weights_gib": None})))
    assert "no run to compare" in all_text(plots.plot_compare([]))


@pytest.mark.parametrize("plot", PER_RECORD)
@pytest.mark.parametrize(
    "record",
    [
        made_up_record(ladder=[512]),
        made_up_record(ladder=generate_prefill_buckets(16384)),
        made_up_record(free_before_gib=None, free_after_gib=None, mem_usage_gib=None, capture_time_s=None),
        made_up_record(settings={"model": "$HOME/$m_{", "policy": "a\nb\x1b[31m\ud800"}, device={}),
        oom_record(),
        skipped_record(outcome="crashed", signal="SIGKILL", runner=None),
    ],
    ids=["one bucket", "74 buckets", "nothing known", "odd names", "oom", "crashed"],
)
def test_every_figure_draws_without_a_warning(plot, record: RunRecord) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plots.figure_png(plot(record), dpi=40).startswith(b"\x89PNG")


# --- purity -----------------------------------------------------------------------------------------------


def test_users_style_neither_changes_nor_is_changed() -> None:
    plain = plots.figure_png(plots.plot_memory(made_up_record()), dpi=40)
    with mpl.rc_context({"axes.facecolor": "black", "font.size": 5, "text.color": "white"}):
        before = dict(mpl.rcParams)
        assert plots.figure_png(plots.plot_memory(made_up_record()), dpi=40) == plain
        assert dict(mpl.rcParams) == before


def test_no_pyplot_and_a_light_import() -> None:
    code = (
        "import sys, toolkit.views.plots as p, toolkit.views.report, toolkit.views.frames\n"
        "assert not {'matplotlib', 'pandas', 'torch', 'PIL'} & set(sys.modules), 'heavy import'\n"
        "from synthetic_records import made_up_record as record\n"
        "figure = p.plot_memory(record()); p.figure_png(figure, dpi=30)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    tests = Path(__file__).resolve().parents[1]
    path = ":".join((str(tests.parent), str(tests)))
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_jupyter_shows_a_figure_by_itself() -> None:
    figure = plots.plot_memory(made_up_record())
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert repr(figure) == "<Figure: Memory against bucket size>"


def test_a_png_keeps_white_white() -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(plots.figure_png(plots.plot_ledger(made_up_record())))).convert("RGB")
    assert image.getpixel((1, 1)) == (255, 255, 255)
    assert image.width == round(sheet.WIDTH_IN * 144)


# --- tables -----------------------------------------------------------------------------------------------


def test_bucket_table_is_sorted_and_knows_the_order_of_capture() -> None:
    table = frames.bucket_table(made_up_record())
    assert list(table.num_tokens) == SMALL
    assert list(table.order) == [7, 6, 5, 4, 3, 2, 1]
    assert {"warmup_s", "capture_s", "elapsed_s", "added_mib", "free_after_gib", "segments"} <= set(table.columns)


def test_missing_is_missing_and_shows_as_na() -> None:
    record = without_memory(made_up_record(), 8)
    table = frames.bucket_table(record)
    assert table.added_mib.isna().tolist() == [True] + [False] * 6
    shown = frames.display_table(table)
    assert shown.loc["8", ["added_mib", "free_after_gib", "graph_nodes"]].tolist() == ["n/a"] * 3
    assert shown.loc["16", "graph_nodes"] == "930"
    runs = frames.display_table(frames.run_table([skipped_record(free_before_gib=None)]))
    assert runs.loc["gated", ["free_before_gib", "capture_s", "replay_vs_eager"]].tolist() == ["n/a"] * 3
    assert runs.loc["gated", "buckets_captured"] == "0"


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("free_gib", 3.9899, "3.990"),
        ("added_mib", -0.001, "0.00"),
        ("eager_ms", 12.345, "12.35"),
        ("ratio", float("inf"), "n/a"),
        ("runner", None, "n/a"),
        ("policy", "nan", "nan"),
        ("share_percent", 12.34, "12.3"),
    ],
)
def test_values_are_shown_by_their_unit(column: str, value: object, shown: str) -> None:
    assert frames.display_value(column, value) == shown


def test_empty_tables_keep_their_columns_and_types() -> None:
    full, empty = made_up_record(), skipped_record(ledger={})
    for table in (frames.bucket_table, frames.speed_table, frames.ledger_table):
        assert list(table(empty).columns) == list(table(full).columns)
        assert len(frames.display_table(table(empty))) == 0
    assert (frames.bucket_table(empty).dtypes == frames.bucket_table(full).dtypes).all()
