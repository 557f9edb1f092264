"""The few figures of the sglang forecast that no derivation gives: fitted once on field data, kept in a file.

`python -m toolkit.forecast.calibrate` writes `data/calibration.json`; here it is read. MiB is 2**20 bytes.
"""

from __future__ import annotations

import functools
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from toolkit.errors import PrefillLabError
from toolkit.forecast.terms import Range
from toolkit.resources import data_dir, short

FeedForward = Literal["dense", "moe"]
CALIBRATION_FILE = "calibration.json"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Coefficient(_Part):
    """A fitted figure: what is expected, the extremes the data showed, and where it comes from."""

    mid: float
    low: float
    high: float
    source: str

    def times(self, factor: float) -> Range:
        """The figure taken so many times, as a range of MiB."""
        return Range(self.mid * factor, self.low * factor, self.high * factor)


class Coefficients(_Part):
    """Everything that is fitted.

    Attributes:
        driver_mib_per_segment: what the driver keeps for each graph segment of each bucket, by kind of layers.
        driver_mib_per_full_layer: what it keeps for each layer of a graph that covers the whole body.
        first_use_mib: what the first bucket takes once: kernels loaded on first use and library workspaces. The middle
            is fitted on all rows, the range spans the rows of the same kind of layers.
        warm_up_factor: memory that the eager warm-up leaves in torch's cache, as a multiple of what the body derives.
        first_bucket_s: seconds the first bucket of a breakable capture takes.
        later_bucket_s: seconds each later one takes.
    """

    driver_mib_per_segment: dict[FeedForward, Coefficient]
    driver_mib_per_full_layer: Coefficient
    first_use_mib: dict[FeedForward, Coefficient]
    warm_up_factor: Coefficient
    first_bucket_s: Coefficient
    later_bucket_s: Coefficient


class FieldRow(_Part):
    """One measured capture against the forecast. Errors are (forecast - measured) / measured: negative is too low.

    `measured_gib` is the usage that the server printed when the ladder was done: what the graphs keep, not the peak.
    The leave-one-out figures come from a fit of `first_use_mib` without the row.
    """

    id: str
    model: str
    backend: str
    n_buckets: int
    tp: int
    measured_gib: float
    forecast_gib: float
    residual_gib: float
    error_pct: float
    loo_forecast_gib: float
    loo_error_pct: float
    source_url: str


class LeftOut(_Part):
    """A measured capture that the forecast is not compared with, and why."""

    id: str
    model: str
    measured_gib: float | None
    reason: str


class Calibration(_Part):
    """The fit: method, figures, every row with its signed error, and what was left out."""

    method: str
    coefficients: Coefficients
    rows: tuple[FieldRow, ...]
    median_abs_error_pct: float
    median_abs_loo_error_pct: float
    left_out: tuple[LeftOut, ...]

    def error_history(self) -> str:
        """One line with the signed leave-one-out errors: the extremes, the median of their sizes, their number.

        They are of the memory that the graphs keep, `FieldRow.measured_gib`: few logs show the peak.
        """
        errors = [row.loo_error_pct for row in self.rows]
        worst = max(self.rows, key=lambda row: abs(row.loo_error_pct))
        return (
            f"field errors of this method: {min(errors):+.0f} % ... {max(errors):+.0f} % of the memory that the graphs "
            "keep (the usage a server prints; the peak was not compared), median absolute "
            f"{self.median_abs_loo_error_pct:.0f} %, n={len(errors)}, each row left out of its fit; "
            f"worst: {worst.model} {worst.loo_error_pct:+.0f} % (negative is an underestimate)"
        )


@functools.cache
def load_calibration() -> Calibration:
    """The stored fit.

    Raises:
        PrefillLabError: the file is missing or damaged.
    """
    try:
        return Calibration.model_validate_json((data_dir() / CALIBRATION_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        what = f"data/{CALIBRATION_FILE} is damaged ({short(error)})"
        raise PrefillLabError(f"{what}; run python -m toolkit.forecast.calibrate, or reinstall prefill-lab") from None
