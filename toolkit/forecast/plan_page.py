"""A plan, or a map of policies, as HTML for a notebook: tables of what was settled. Everything is escaped."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.forecast.plan import Plan
    from toolkit.forecast.policy_map import PolicyMap
    from toolkit.forecast.ranks import RankDecision


def plan_html(plan: Plan) -> str:
    """The plan as one piece of HTML."""
    ledger = plan.ledger_frame[["name", "gib", "low_gib", "high_gib"]].rename(
        columns={"name": "each rank", "gib": "GiB", "low_gib": "low", "high_gib": "high"}
    )
    said = {"assumed": plan.assumptions, "note": plan.notes, "next": plan.advice}
    notes = [f"{kind}: {line}" for kind, lines in said.items() for line in lines]
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return (
        f"<p><strong>{html.escape(repr(plan)[1:-1])}</strong></p>"
        f"{_table(ledger)}{_table(plan.policies_frame)}<ul>{items}</ul>"
    )


def map_html(policies: PolicyMap) -> str:
    """A map: a grid of letters for each policy, what they stand for, and the counts."""
    from toolkit.forecast.verdicts import MARKS

    marks = policies.frame["mark"].unique()
    legend = "; ".join(f"{letter}: {words}" for letter, words in MARKS.items() if letter in marks)
    grids = "".join(f"<p>{html.escape(name)}</p>{policies.grid(name).to_html(border=0)}" for name in policies.policies)
    over = policies.columns.label + (f" x {policies.rows.label}" if policies.rows is not None else "")
    return (
        f"<p><strong>{html.escape(over)}</strong>; {html.escape(policies.provenance)}</p>{grids}"
        f"<p>{html.escape(legend)}</p>{_counts(policies.counts)}"
    )


def ranks_html(decision: RankDecision) -> str:
    """What each rank would decide alone, and what is decided for all."""
    return f"<p><strong>{html.escape(repr(decision)[1:-1])}</strong></p>{_table(decision.frame)}"


def _counts(frame: pd.DataFrame) -> str:
    return frame.T.to_html(border=0, float_format="{:.1f}".format, na_rep="n/a")


def _table(frame: pd.DataFrame) -> str:
    return frame.to_html(index=False, border=0, float_format="{:.2f}".format, na_rep="n/a")
