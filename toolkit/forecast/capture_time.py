"""Seconds of a forecast capture, with the range of the captures that the figure was fitted on."""

from __future__ import annotations

from toolkit.forecast.calibration import load_calibration
from toolkit.forecast.engines import SGLANG


def seconds_range(engine: str, buckets: int) -> tuple[float, float] | None:
    """(least, most) seconds that a breakable capture of so many buckets should take; None where no data has a range.

    By count alone: the public captures do not tell how seconds depend on the model or on the tokens of a bucket.
    """
    if engine != SGLANG or buckets < 1:
        return None
    fitted = load_calibration().coefficients
    first, later = fitted.first_bucket_s, fitted.later_bucket_s
    return first.low + later.low * (buckets - 1), first.high + later.high * (buckets - 1)
