"""What the Lab says each policy would do, from numbers alone: no model is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.forecast.before_capture import BeforeCapture
from toolkit.forecast.kv_last import KvLast
from toolkit.forecast.terms import GRAPH_POOL, BucketForecast, Forecast, Range, Term
from toolkit.policies import POLICIES
from toolkit.settings import Backend, CaptureSettings
from toolkit.widgets.choice import Choice, preview
from toolkit.widgets.panels import kv_words, verdicts_html
from toolkit.widgets.verdicts import Foreseen, Foresight, Moment, verdicts

LADDER = (8, 128, 512)


def forecast(ladder: tuple[int, ...]) -> Forecast:
    """Largest first: 1 MiB for each token of the largest bucket, nothing more for the others."""
    taken = Range.exact(float(max(ladder)))
    steps = tuple(BucketForecast(tokens, taken, taken, taken) for tokens in sorted(ladder, reverse=True))
    return Forecast("made up", (Term(GRAPH_POOL, taken, "made up"),), steps, ())


# A KV pool of 1 GiB, 1024 tokens a GiB; half of it for the largest bucket.
FORESIGHT = Foresight(
    forecast,
    LADDER,
    BeforeCapture(1024, KvLast(512, 0.5, 0.5, lambda gib: int(gib * 1024), lambda tokens: tokens / 1024)),
)


def seen(free_gib: float, foresight: Foresight | None = FORESIGHT, **settings: object) -> dict[str, Foreseen]:
    return verdicts(Moment(CaptureSettings.create(**settings), LADDER, free_gib, True, True), foresight)


def test_without_a_forecast_only_the_budget_has_to_wait() -> None:
    now = seen(3.0, None)
    assert list(now) == list(POLICIES)
    assert now["budgeted"].skips is None and now["budgeted"].words == "n/a until the forecast is there"
    assert now["gated"].skips is True and now["ungated"].skips is False and now["capture_first"].skips is False
    assert all(one.kv_tokens is None for one in now.values())


def test_with_room_all_but_the_gate_capture() -> None:
    now = seen(3.0)
    assert {name: one.kind for name, one in now.items()} == {
        "gated": "skipped", "ungated": "captured", "budgeted": "captured", "capture_first": "captured"
    }  # fmt: skip
    assert seen(4.0)["gated"].kind == "captured"


def test_short_of_memory_each_does_something_else() -> None:
    # 512 MiB are needed and 307 are free: 31 of them are the reserve, so that 128 tokens fit and 512 do not.
    now = seen(0.3)
    assert now["ungated"].kind == "oom" and now["ungated"].short == "out of memory at bucket 512"
    assert now["ungated"].skips is False and "(forecast)" in now["ungated"].words
    assert now["budgeted"].kind == "trimmed" and now["budgeted"].trimmed == (512,)
    assert now["budgeted"].short == "trims to 2 of 3 buckets" and "1 of 3 buckets left out" in now["budgeted"].reason
    # 0.3 + 1 GiB, less 0.5 of graphs and 0.03 of reserve.
    last = now["capture_first"]
    assert last.kv_tokens == int(0.77 * 1024) and last.kv_change == int(0.77 * 1024) - 1024


def test_a_declared_need_is_told_to_starve() -> None:
    # 1 GiB free, 0.5 taken by graphs, 0.75 needed later.
    now = seen(1.0, post_capture_gib=0.75)
    assert now["ungated"].starved_gib == pytest.approx(0.25) and "lacks 0.25 GiB" in now["ungated"].reason
    assert now["budgeted"].starved_gib == 0 and now["budgeted"].trimmed == (512,)


def test_disabled_blocked_and_not_started_are_the_same_for_all() -> None:
    assert {one.short for one in seen(3.0, backend=Backend.DISABLED).values()} == {"skips"}
    blocked = seen(3.0, Foresight(blocked="nothing is captured: no attention layer"))
    assert {one.kind for one in blocked.values()} == {"skipped"} and "no attention" in blocked["ungated"].words
    stuck = seen(3.0, Foresight(no_start="weights leave -1.00 GiB"))
    assert {one.short for one in stuck.values()} == {"does not start"}


def test_no_forecast_is_no_promise() -> None:
    assert seen(3.0, Foresight(problem="no forecast: x"))["budgeted"].words == "n/a: no forecast: x"
    watched = seen(3.0, Foresight(problem="no forecast: compiled", unforeseen=True))["budgeted"]
    assert watched.kind == "captured" and "tried and watched" in watched.words


def test_a_forecast_on_the_edge_of_the_gate_does_not_claim_to_know() -> None:
    now = Moment(CaptureSettings(), LADDER, 4.05, asked=False, exact=False)
    assert verdicts(now, FORESIGHT)["gated"].skips is None
    assert verdicts(replace(now, exact=True), FORESIGHT)["gated"].kind == "captured"


# --- as HTML ------------------------------------------------------------------------------------------------


CHOICE = Choice(
    model="smollm2-135m", device="cpu", device_memory_gib=8.0, auto_fraction=False, mem_fraction=0.9, backend="auto",
    policy="budgeted", ladder="own", max_tokens=512, buckets="8,128,512", leave_exactly=True, free_memory_gib=0.3,
)  # fmt: skip


def test_the_table_has_a_row_for_every_policy_and_marks_the_chosen_one() -> None:
    html = verdicts_html(preview(CHOICE, 8192.0, FORESIGHT))
    assert html.count("<tr") == 1 + len(POLICIES) and html.count("(chosen)") == 1
    assert 'class="does-trimmed chosen"' in html and "forecast" in html
    for sign, words in (("\u2713", "captures 3 buckets"), ("\u2702", "trims to 2"), ("\u2717", "out of memory at")):
        assert f"{sign} {words}" in html, "a verdict is told by words and a sign, not by colour alone"


def test_settings_that_cannot_be_used_have_no_verdicts() -> None:
    assert "n/a" in verdicts_html(preview(replace(CHOICE, model="nonsense"), 8192.0))


def test_tokens_that_are_not_known_are_not_made_up() -> None:
    assert kv_words(seen(3.0, None)["gated"]) == "n/a" and kv_words(seen(0.3)["ungated"]) == "n/a"
    assert kv_words(seen(0.3)["capture_first"]) == "788 (-236)"


def test_what_is_chosen_decides_what_the_preview_says() -> None:
    shown = preview(CHOICE, 8192.0, FORESIGHT)
    assert shown.foreseen and shown.skips is False and shown.verdict == shown.verdicts["budgeted"].words
