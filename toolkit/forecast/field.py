"""Captures that others measured, as facts to lay beside a forecast: `data/field/captures.csv`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from toolkit.resources import data_dir

if TYPE_CHECKING:
    import pandas as pd


@cache
def field_captures() -> pd.DataFrame:
    """One row per capture: model, card, backend, ladder, GiB, and where the figure was published. Read once."""
    import pandas as pd

    return pd.read_csv(data_dir() / "field" / "captures.csv")
