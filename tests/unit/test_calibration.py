"""The fit on field data: what is stored is what the data gives, and nothing is hidden."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import PrefillLabError
from toolkit.forecast import calibrate, calibration
from toolkit.forecast.calibrate import fit, main, table
from toolkit.forecast.calibration import load_calibration
from toolkit.forecast.sglang_body import body_shape
from toolkit.forecast.sglang_engine import forecast_body
from toolkit.resources import data_dir


def test_the_stored_file_is_a_fresh_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert "median absolute error" in capsys.readouterr().out
    assert load_calibration() == fit()


def test_a_stale_file_is_found_and_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "field").symlink_to(data_dir() / "field")
    monkeypatch.setattr(calibrate, "data_dir", lambda: tmp_path)
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert (tmp_path / "calibration.json").read_bytes() == (data_dir() / "calibration.json").read_bytes()
    assert main(["--check"]) == 0
    assert main(["--verbose"]) == 2


def test_median_leave_one_out_error_is_within_15_percent() -> None:
    stored = load_calibration()
    print(table(stored))
    assert stored.median_abs_loo_error_pct <= 15
    assert len(stored.rows) == 6


def test_no_underestimate_is_hidden() -> None:
    stored = load_calibration()
    worst = min(row.loo_error_pct for row in stored.rows)
    assert worst < 0 and f"{worst:+.0f} %" in stored.error_history()
    for row in stored.rows:
        assert row.error_pct == pytest.approx((row.forecast_gib / row.measured_gib - 1) * 100, abs=0.1)
        assert row.residual_gib == pytest.approx(row.measured_gib - row.forecast_gib, abs=1e-3)


def test_the_error_history_says_of_which_memory() -> None:
    # data/field/captures.csv has the usage that servers print when a ladder is done.
    assert "of the memory that the graphs keep" in load_calibration().error_history()


def test_every_row_of_the_fit_lies_in_the_range_of_its_forecast() -> None:
    fitted = load_calibration().coefficients
    rows = [row for row in calibrate._read("captures.csv") if row["use"] == "fit"]
    assert {row["id"] for row in rows} == {row.id for row in load_calibration().rows}
    for row in rows:
        shape, ladder = calibrate._shape(row), calibrate.generate_prefill_buckets(int(row["max_bucket_tokens"]))
        backend = calibrate.Backend(row["backend"])
        decode_first = row["decode_first"] == "yes"
        total = forecast_body(shape, tuple(ladder[::-1]), backend, fitted, decode_first=decode_first).total
        # Logs print hundredths of a GiB, and the range of the constant is rounded.
        assert total.low - 6 <= float(row["mem_usage_gib"]) * 1024 <= total.high + 6, row["id"]


def test_the_driver_takes_7_7_mib_a_bucket_of_49_segments() -> None:
    # 10.30 GiB before bucket 7680, 9.88 before bucket 4, 56 buckets later; printed in hundredths.
    per_bucket = load_calibration().coefficients.driver_mib_per_segment["moe"].mid * 49
    assert (10.30 - 9.88 - 0.01) * 1024 / 56 <= per_bucket <= (10.30 - 9.88 + 0.01) * 1024 / 56


def test_field_rows_say_what_they_are() -> None:
    for row in calibrate._read("captures.csv"):
        assert row["source_url"], row
        if row["use"] == "fit":
            assert row["model"] and row["backend"] and row["n_buckets"] and row["mem_usage_gib"], row
            body_shape(calibrate.get_model(row["catalogue_id"]).config, int(row["tp"]))
        else:
            assert row["use"] == "left_out" and row["reason"], row
    assert len(load_calibration().left_out) == len(calibrate._read("captures.csv")) - len(load_calibration().rows)


def test_a_damaged_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "data_dir", lambda: tmp_path)
    load_calibration.cache_clear()
    try:
        with pytest.raises(PrefillLabError, match=r"calibration\.json is damaged"):
            load_calibration()
    finally:
        load_calibration.cache_clear()
