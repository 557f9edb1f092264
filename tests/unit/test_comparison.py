"""Policies compared by execution: one row a run, prefill time over a mix of prompts, n/a where nothing is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from synthetic_records import made_up_record, oom_record, skipped_record

from toolkit.errors import InvalidInput
from toolkit.ladder import replay_share
from toolkit.runs.record import RunRecord, SpeedPoint
from toolkit.views.comparison import asked_buckets, compare_policies, default_mix, pooled_costs
from toolkit.views.comparison_plot import plot_policies
from toolkit.views.sheet import alt_text


def timed(policy: str, ladder: tuple[int, ...], eager_ms: float = 10.0, **fields: Any) -> RunRecord:
    """A captured run whose every eager pass takes `eager_ms` and every replay a millisecond a token."""
    record = made_up_record(ladder=list(ladder))
    speed = [SpeedPoint(num_tokens=tokens, eager_ms=eager_ms, replay_ms=float(tokens)) for tokens in ladder]
    settings = {**record.settings, "policy": policy}
    return record.model_copy(update={"settings": settings, "speed": speed, **fields})


def with_policy(record: RunRecord, policy: str) -> RunRecord:
    return record.model_copy(update={"settings": {**record.settings, "policy": policy}})


def test_the_mix_is_weighed_with_what_was_timed() -> None:
    # 4 prefills of 4 tokens replay in 1 x 4 ms, 4 of 100 tokens run eager in 10 ms.
    comparison = compare_policies([timed("ungated", (4, 8))], {4: 4, 100: 4})
    (row,) = comparison.frame.to_dict("records")
    assert row["prefill_ms"] == pytest.approx((4 * 4 + 4 * 10) / 8)
    assert (row["eager_percent"], row["padding_percent"]) == (50.0, 0.0)


def test_runs_under_the_same_settings_share_what_was_timed() -> None:
    fast, slow = timed("ungated", (4, 8), eager_ms=10), timed("budgeted", (4, 8), eager_ms=30)
    skipped = with_policy(skipped_record(settings=fast.settings), "gated")
    (cost,) = pooled_costs([fast, slow]).values()
    assert cost.eager.at(8) == 20.0
    frame = compare_policies([skipped, fast, slow], {4: 1}).frame
    assert list(frame["prefill_ms"]) == [20.0, 4.0, 4.0]
    assert list(frame["eager_percent"]) == [100.0, 0.0, 0.0]


def test_a_server_that_does_not_start_has_no_figures() -> None:
    (row,) = compare_policies([oom_record()]).frame.to_dict("records")
    assert row["outcome"] == "oom"
    for name in ("free_after_gib", "kv_tokens", "prefill_ms", "eager_percent", "padding_percent"):
        assert row[name] is None or str(row[name]) in ("nan", "<NA>"), name


def test_without_times_there_are_shares_and_no_milliseconds() -> None:
    comparison = compare_policies([timed("ungated", (4, 8)).model_copy(update={"speed": []})], {8: 1})
    (row,) = comparison.frame.to_dict("records")
    assert row["eager_percent"] == 0.0 and str(row["prefill_ms"]) == "nan"
    assert "fewer than two buckets were timed" in comparison.provenance


def test_the_even_mix_covers_every_order_of_magnitude_up_to_the_ceiling() -> None:
    mix = default_mix(8192)
    assert (min(mix.counts), max(mix.counts), mix.total) == (1, 8192, 200)
    for low in (1, 8, 64, 512):
        share = sum(count for tokens, count in mix.counts.items() if low <= tokens < 8 * low) / mix.total
        assert share == pytest.approx(3 / 13, abs=0.03)
    assert default_mix(1).counts == {1: 200}


def test_buckets_that_were_left_out_count_as_asked_for() -> None:
    record = timed("budgeted", (4, 8), trimmed=[16, 32])
    assert asked_buckets(record) == (4, 8, 16, 32)
    assert max(compare_policies([record]).mix.counts) == 32
    assert list(compare_policies([record]).frame["left_out"]) == [2]


def test_what_it_comes_to_is_said_in_sentences() -> None:
    busy = "the machine was busy (load 7.8 on 2 cores): times are inflated by other work"
    first = timed("capture_first", (4, 8, 16), kv_cache_tokens=900, notes=[busy])
    budgeted = timed("budgeted", (4, 8), kv_cache_tokens=1000, trimmed=[16], notes=[busy])
    comparison = compare_policies([budgeted, first, oom_record()], {16: 3, 8: 1})
    words = comparison.sentences
    assert words[0] == "budgeted: 2 buckets have a graph; 75 % of the prefills of the mix run eager"
    assert words[1].startswith("capture_first: 3 buckets have a graph, 100 KV tokens fewer than the most; 0 %")
    assert words[2] == "ungated: no server starts (oom)"
    assert "exit code 1, because no server would start under ungated" in words
    assert words[-1] == busy and words.count(busy) == 1
    assert any("on a CPU a replay saves no launches" in line for line in words)


def test_what_a_skip_leaves_out_is_counted_too() -> None:
    ungated = timed("ungated", (4, 8))
    gated = with_policy(skipped_record(settings=ungated.settings), "gated")
    assert list(compare_policies([ungated, gated]).frame["left_out"]) == [0, 2]


def test_no_run_is_refused() -> None:
    wrong: Any
    for wrong in ([], None, 5, [3]):
        with pytest.raises(InvalidInput, match="no run"):
            compare_policies(wrong)


def test_it_reads_as_json_html_and_text() -> None:
    comparison = compare_policies([timed("ungated", (4, 8)), oom_record()])
    rows = json.loads(json.dumps(comparison.to_dict()))["rows"]
    assert rows[1]["kv_tokens"] is None and rows[0]["outcome"] == "captured"
    assert "n/a" in comparison._repr_html_() and "ungated: captured" in repr(comparison)


def test_names_tell_runs_apart() -> None:
    one = timed("ungated", (4, 8))
    other, third = (
        one.model_copy(update={"id": name}) for name in ("20260101-000000-00000b", "20260101-000000-00000c")
    )
    gated = with_policy(one, "gated")
    assert compare_policies([one, gated]).names == ("ungated", "gated")
    full = one.model_copy(update={"settings": {**one.settings, "backend": "full"}})
    assert compare_policies([one, full]).names == ("ungated, breakable (auto)", "ungated, full")
    assert [name.split(", ")[-1] for name in compare_policies([other, third]).names] == [other.id, third.id]
    assert compare_policies([one, one]).names == ("ungated", "ungated")


def test_the_figure_says_what_it_shows() -> None:
    figure = plot_policies(compare_policies([timed("ungated", (4, 8)), oom_record()]))
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == [
        "buckets\nwith a graph", "free after\n(GiB)", "KV pool\n(tokens)", "mean prefill\nof the mix (ms)"
    ]  # fmt: skip
    assert "ungated: captured" in alt_text(figure) and "n/a" in alt_text(figure)


@pytest.mark.parametrize(("ladder", "ceiling", "expected"), [((4, 8), 8, 7 / 8), ((8,), 16, 5 / 16), ((), 4, 0.0)])
def test_the_share_of_token_counts_that_replay(ladder: tuple[int, ...], ceiling: int, expected: float) -> None:
    # A bucket replays from half of its tokens on: 2 to 8 of 8, 4 to 8 of 16.
    assert replay_share(ladder, ceiling) == expected


@pytest.mark.parametrize("records", ["x", [1, 2], [None]])
def test_what_is_no_run_is_refused(records: Any) -> None:
    with pytest.raises(InvalidInput, match="is no run"):
        compare_policies(records)


def test_runs_may_come_one_by_one() -> None:
    assert len(compare_policies(one for one in [timed("ungated", (4, 8))]).records) == 1  # type: ignore[arg-type]


def test_a_run_that_never_came_to_its_ladder_is_still_weighed_by_it() -> None:
    skipped = skipped_record(settings={"buckets": [8, 64]})
    assert asked_buckets(skipped) == (8, 64)
    assert max(compare_policies([skipped]).mix.counts) == 64
