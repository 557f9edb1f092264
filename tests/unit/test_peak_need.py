"""When bars show what a capture needed at its worst moment, and what a card that is shared shows: nothing."""

from __future__ import annotations

import pytest

from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.capture_report import CaptureReport

LADDER = sorted(generate_prefill_buckets(8192), reverse=True)
STAMP = "[2026-08-27 00:00:00] "
BEGIN = (
    f"{STAMP}Capture target prefill CUDA graph begin. backend=breakable, num_tokens={LADDER[::-1]}, "
    "avail mem=12.00 GB\n"
)
END = f"{STAMP}Capture target prefill CUDA graph end. elapsed=20.00 s, mem usage={{used}} GB, avail mem=9.10 GB.\n"
UP = f"{STAMP}The server is fired up and ready to roll!\n"
# The first bucket takes 2.30 GiB and each later one 0.01: before the last bucket 9.14 GiB are free.
FREE = [12.0, *(round(9.7 - 0.01 * later, 2) for later in range(57))]


def _text(seen: list[int], free: list[float] | None = None, used: str = "2.90") -> str:
    bars = "".join(
        f"Capturing num tokens (num_tokens={LADDER[at]} avail_mem={(free or FREE)[at]:.2f} GB): "
        f" 10%| | {at}/58 [00:01<?]\n"
        for at in seen
    )
    return f"{BEGIN}{bars}{END.format(used=used)}{UP}"


def _capture(text: str) -> CaptureReport:
    (report,) = diagnose(text).captures
    return report


def _codes(text: str, **given: str) -> set[str]:
    return {one.code for one in diagnose(text, **given).findings}


@pytest.mark.parametrize("seen", [range(58), [0, 1, *range(4, 58, 4)], [0, 1, 57], [0, 1, 44]])
def test_bars_from_the_first_bucket_on_show_the_peak(seen: list[int]) -> None:
    assert _capture(_text(list(seen))).peak_need_gib == pytest.approx(2.9)  # 12.00 - 9.10


@pytest.mark.parametrize("seen", [[57], [28], [0, 57], [1, *range(2, 58)], [0, 1], [0, 1, 43], [0]])
def test_bars_that_leave_the_inside_out_show_no_peak(seen: list[int]) -> None:
    report = _capture(_text(seen))
    assert report.peak_need_gib is None
    assert report.min_free_gib is not None  # what was seen is still said
    assert "PEAK_ABOVE_PRINTED_USAGE" not in _codes(_text(seen))


def test_no_peak_is_held_against_a_forecast_that_bars_do_not_show() -> None:
    memory = f"{STAMP}Load weight begin. avail mem=78.48 GB\n{STAMP}Memory pool end. avail mem=12.10 GB\n"
    diagnosis = diagnose(memory + _text([57]), model="qwen3-8b", gpu="h100-80gb")
    assert diagnosis.measured is not None
    peak = next(row for row in diagnosis.measured.rows if row.what == "peak inside the capture")
    assert peak.measured is None
    assert not any("peak" in one.message for one in diagnosis.findings)


def test_a_card_that_is_shared_gives_no_plan_and_no_verdict_on_a_forecast() -> None:
    """Somebody takes 9 GiB from the 21st to the 30th bucket."""
    free = [gib - 9.0 if 20 <= at < 30 else gib for at, gib in enumerate(FREE)]
    memory = f"{STAMP}Load weight begin. avail mem=78.48 GB\n{STAMP}Memory pool end. avail mem=12.10 GB\n"
    text = memory + _text(list(range(58)), free)
    assert _codes(text, model="qwen3-8b", gpu="h100-80gb") == {"OTHER_PROCESS_ON_GPU"}
    assert _capture(text).peak_need_gib is None
    # Alone, the same capture is above the forecast and needs what the plan says.
    alone = memory + _text(list(range(58)), used="2.60")
    assert _codes(alone, model="qwen3-8b", gpu="h100-80gb") == {"PEAK_ABOVE_PRINTED_USAGE", "ESTIMATE_MISS"}


def test_a_capture_that_gave_memory_back_is_held_against_nothing() -> None:
    text = f"{STAMP}Load weight begin. avail mem=78.48 GB\n" + _text(list(range(58)), used="-0.50")
    assert _codes(text, model="qwen3-8b", gpu="h100-80gb") == {"NEGATIVE_USAGE"}
    assert _capture(text).peak_need_gib is None
