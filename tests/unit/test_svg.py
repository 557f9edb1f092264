"""Figures as inline SVG, and the words that stand under the pointer for each bucket."""

from __future__ import annotations

import re
import sys
import warnings
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_records import SMALL, made_up_record, oom_record, skipped_record

from toolkit.ladder import choose_bucket, exceeds_replay_limit, generate_prefill_buckets
from toolkit.runs.record import BucketFigures, RunRecord, SpeedPoint
from toolkit.views import plots
from toolkit.views.buckets import bucket_tips, bucket_words
from toolkit.views.frames import display_value, memory_words, padding_percent
from toolkit.views.svg import figure_svg

SVG = "{http://www.w3.org/2000/svg}"
PER_RECORD = (plots.plot_memory, plots.plot_capture_time, plots.plot_speed, plots.plot_ledger)
LONG = made_up_record(ladder=generate_prefill_buckets(8192))


def ids_and_references(svg: str) -> tuple[list[str], set[str]]:
    return re.findall(r'\bid="([^"]*)"', svg), set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))


# --- the element ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plot", PER_RECORD)
def test_one_element_that_says_what_it_shows(plot) -> None:
    figure = plot(LONG)
    svg = figure_svg(figure, bucket_tips(LONG))
    root = ET.fromstring(svg)
    assert svg.startswith("<svg ") and svg.endswith("</svg>")
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.get("aria-label") == plots.alt_text(figure)
    assert root.findtext(f"{SVG}title") == figure.get_suptitle()
    width, height = (float(number) for number in root.get("viewBox", "").split()[2:])
    assert (width, height) == pytest.approx(tuple(figure.get_size_inches() * 72))
    assert "width:100%" in root.get("style", "")
    assert len(svg) < 250_000


@pytest.mark.parametrize("plot", PER_RECORD)
def test_the_same_record_gives_the_same_text(plot) -> None:
    once, again = (figure_svg(plot(made_up_record()), bucket_tips(made_up_record())) for _ in range(2))
    assert once == again


def test_figures_on_one_page_keep_to_themselves() -> None:
    all_ids: list[str] = []
    for record in (made_up_record(), LONG):
        for plot in PER_RECORD:
            svg = figure_svg(plot(record), bucket_tips(record))
            ids, references = ids_and_references(svg)
            assert references and references <= set(ids)
            all_ids += ids
            # No rule but that of its own buckets: a rule of `*` would restyle every drawing of the page.
            rules = re.findall(r"<style[^>]*>(.*?)</style>", svg)
            assert all(rule.startswith(f"#{ids[0]} .bucket:hover{{") and rule.count("{") == 1 for rule in rules)
    assert len(all_ids) == len(set(all_ids))


def test_nothing_in_a_record_becomes_markup() -> None:
    record = made_up_record(settings={"model": "<script>\"&'--></svg>", "policy": "a\x00\x1b[31m\u202e"})
    for plot in PER_RECORD:
        svg = figure_svg(plot(record), {8: '<b>"hot" & \x07</b>'})
        root = ET.fromstring(svg)
        assert "<script>\"&'--></svg>" in root.get("aria-label", "")
        assert not [element for element in root.iter() if element.tag in (f"{SVG}script", f"{SVG}b")]
        assert "<!--" not in svg


# --- the buckets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plot", "panels"), [(plots.plot_memory, 2), (plots.plot_capture_time, 1)])
@pytest.mark.parametrize("ladder", [[512], SMALL, generate_prefill_buckets(8192)])
def test_each_bucket_has_its_words_over_every_panel(plot, panels: int, ladder: list[int]) -> None:
    record = made_up_record(ladder=ladder)
    root = ET.fromstring(figure_svg(plot(record), bucket_tips(record)))
    found = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "bucket"]
    assert [int(rect.get("data-num-tokens", "")) for rect in found] == ladder * panels
    for rect in found:
        words = rect.findtext(f"{SVG}title")
        assert words == bucket_words(record, int(rect.get("data-num-tokens", "")))


def test_the_rectangles_stand_where_the_bars_are() -> None:
    record = made_up_record(ladder=[8, 32, 128])
    svg = figure_svg(plots.plot_capture_time(record), bucket_tips(record))
    root = ET.fromstring(svg)
    found = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "bucket"]
    # A bar is a closed path of four corners, 0.8 of a bucket wide, clipped to its panel.
    corners = re.compile(r"M ([\d.]+) (-?[\d.]+) L ([\d.]+) \2 L \3 (-?[\d.]+) L \1 \4 z")
    bars = {
        (round(float(hit[1]), 1), round(float(hit[3]), 1))
        for path in root.iter(f"{SVG}path")
        if path.get("clip-path") and (hit := corners.search(path.get("d", "")))
    }
    assert len(bars) == 3
    for rect, (left, right) in zip(found, sorted(bars), strict=True):
        x, width = float(rect.get("x", "")), float(rect.get("width", ""))
        assert x + width / 2 == pytest.approx((left + right) / 2, abs=0.1)
        assert right - left == pytest.approx(0.8 * width, abs=0.2)


def test_without_words_or_a_bucket_axis_there_is_no_rectangle() -> None:
    record = made_up_record()
    assert 'class="bucket"' not in figure_svg(plots.plot_memory(record))
    assert 'class="bucket"' not in figure_svg(plots.plot_ledger(record), bucket_tips(record))
    assert 'class="bucket"' not in figure_svg(plots.plot_memory(record), {7: "no such bucket"})


# --- whatever a record holds ------------------------------------------------------------------------------


def with_every_figure(record: RunRecord, value: float) -> RunRecord:
    memory = dict.fromkeys(("added_mib", "cumulative_mib", "free_after_gib"), value)
    times = dict.fromkeys(("elapsed_s", "warmup_s", "capture_s"), value)
    whole = ("free_before_gib", "free_after_gib", "mem_usage_gib", "capture_time_s")
    return record.model_copy(
        update={
            "buckets": [bucket.model_copy(update={**memory, **times}) for bucket in record.buckets],
            "speed": [SpeedPoint(num_tokens=8, eager_ms=5e-324, replay_ms=1e308)],
            "ledger": {"total_gib": value, "weights_gib": value, "free_gib": value},
            **dict.fromkeys(whole, value),
        }
    )


@pytest.mark.parametrize("value", [1e308, -1e308, sys.float_info.max, 5e-324, float("nan"), float("inf")])
@pytest.mark.parametrize("plot", [*PER_RECORD, lambda record: plots.plot_compare([record, made_up_record()])])
def test_no_figure_breaks_a_drawing(plot, value: float) -> None:
    record = with_every_figure(made_up_record(), value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ET.fromstring(figure_svg(plot(record), bucket_tips(record)))


@pytest.mark.parametrize("plot", PER_RECORD)
@pytest.mark.parametrize("record", [skipped_record(), skipped_record(ledger={}), oom_record(ladder=[])])
def test_nothing_captured_still_draws(plot, record: RunRecord) -> None:
    ET.fromstring(figure_svg(plot(record), bucket_tips(record)))


def test_an_absurd_figure_does_not_fill_the_page() -> None:
    assert display_value("added_mib", 1e308) == "1e+308"
    assert memory_words(1e308) == "1e+308 GiB"
    assert display_value("added_mib", 123456789.0) == "123456789.00"


# --- words ------------------------------------------------------------------------------------------------


def one_bucket(**changes: object) -> RunRecord:
    figures = {
        "num_tokens": 8, "elapsed_s": 1.3, "warmup_s": 0.9, "capture_s": 0.25, "added_mib": 12.5,
        "cumulative_mib": 20.0, "free_after_gib": 3.5, "segments": 31, "graph_nodes": 930,
    }  # fmt: skip
    bucket = BucketFigures.model_validate({**figures, **changes})
    speed = [SpeedPoint(num_tokens=8, eager_ms=10.0, replay_ms=9.0)]
    return made_up_record(ladder=[16, 8], capture_order=[16, 8], speed=speed).model_copy(
        update={"buckets": [BucketFigures.model_validate({**figures, "num_tokens": 16}), bucket]}
    )


def test_a_bucket_in_words() -> None:
    assert bucket_words(one_bucket(), 8) == (
        "bucket 8 tokens: captured 2 of 2; added 12.50 MiB, cumulative 20.00 MiB, free after 3.500 GiB; "
        "warm-up 0.900 s, capture 0.250 s; segments 31, graph nodes 930; "
        "eager 10.00 ms, replay 9.00 ms (replay / eager 0.90); padding 25.0 % on average, 50.0 % at most"
    )
    assert "eager" not in bucket_words(one_bucket(), 16)


def test_what_is_not_known_is_said() -> None:
    unknown = {"added_mib": None, "cumulative_mib": None, "free_after_gib": None, "graph_nodes": None}
    words = bucket_words(one_bucket(**unknown), 8)
    assert "added n/a, cumulative n/a, free after n/a;" in words
    assert "graph nodes n/a" in words
    assert bucket_words(oom_record(), 640) == "bucket 640 tokens: out of memory here"
    assert bucket_words(skipped_record(), 8) == "bucket 8 tokens: not captured"
    assert bucket_tips(skipped_record()) == {}


@settings(deadline=None, max_examples=40)
@given(st.sets(st.integers(1, 200), min_size=1, max_size=8))
def test_padding_agrees_with_the_runner_request_by_request(buckets: set[int]) -> None:
    ladder = sorted(buckets)
    served: dict[int, list[float]] = {bucket: [] for bucket in ladder}
    for tokens in range(1, ladder[-1] + 1):
        bucket = choose_bucket(ladder, tokens)
        if bucket is not None and not exceeds_replay_limit(bucket, tokens):
            served[bucket].append(100 * (bucket - tokens) / bucket)
    expected = {bucket: (sum(shares) / len(shares), max(shares)) for bucket, shares in served.items()}
    found = padding_percent(made_up_record(ladder=ladder))
    assert found == {bucket: pytest.approx(shares) for bucket, shares in expected.items()}
