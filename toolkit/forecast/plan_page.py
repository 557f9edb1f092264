"""A plan as HTML for a notebook: what was settled, the ledger and the policies as tables. Everything is escaped."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.forecast.plan import Plan


def plan_html(plan: Plan) -> str:
    """The plan as one piece of HTML."""
    ledger = plan.ledger_frame[["name", "gib", "low_gib", "high_gib"]].rename(
        columns={"name": "each rank", "gib": "GiB", "low_gib": "low", "high_gib": "high"}
    )
    notes = [*(f"assumed: {line}" for line in plan.assumptions), *(f"next: {line}" for line in plan.advice)]
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return (
        f"<p><strong>{html.escape(repr(plan)[1:-1])}</strong></p>"
        f"{_table(ledger)}{_table(plan.policies_frame)}<ul>{items}</ul>"
    )


def _table(frame: pd.DataFrame) -> str:
    return frame.to_html(index=False, border=0, float_format="{:.2f}".format, na_rep="n/a")
