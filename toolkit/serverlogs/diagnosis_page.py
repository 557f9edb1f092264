"""A diagnosis as HTML for a notebook: what it is, the findings, captures and memory as tables. All is escaped."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.serverlogs.diagnosis import Diagnosis

_MOST_ROWS = 40
_CAPTURES = ["rank", "role", "phase", "backend", "outcome", "n_buckets", "free_before_gib", "mem_usage_gib"]
_CAPTURES += ["peak_need_gib", "min_free_gib", "free_after_gib", "elapsed_s"]
_LEDGER = ["rank", "weights_gib", "kv_cache_gib", "kv_cache_tokens", "free_after_pools_gib"]
_LEDGER += ["free_before_capture_gib", "prefill_graph_gib", "other_graphs_gib", "free_at_end_gib"]


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """The diagnosis as one piece of HTML."""
    items = "".join(
        f"<li><strong>{html.escape(one.code)}</strong> ({one.severity}, line {one.line or 'n/a'}): "
        f"{html.escape(one.message)}{f' <em>{html.escape(one.advice)}</em>' if one.advice else ''}</li>"
        for one in diagnosis.findings[:_MOST_ROWS]
    )
    parts = [f"<p><strong>{html.escape(repr(diagnosis)[1:-1])}</strong></p><ul>{items}</ul>"]
    if diagnosis.captures:
        parts.append(_table(diagnosis.captures_frame, _CAPTURES))
    if diagnosis.ledger:
        parts.append(_table(diagnosis.ranks_frame, _LEDGER))
    parts += [f"<p>{html.escape(note)}</p>" for note in diagnosis.notes]
    return "".join(parts)


def _table(frame: pd.DataFrame, columns: list[str]) -> str:
    shown = frame[columns].head(_MOST_ROWS)
    more = f"<p>{len(frame) - _MOST_ROWS} more rows</p>" if len(frame) > _MOST_ROWS else ""
    names = {name: name.removesuffix("_gib") + " (GiB)" for name in columns if name.endswith("_gib")}
    text = shown.rename(columns=names).to_html(index=False, border=0, float_format="{:.2f}".format, na_rep="n/a")
    return text + more
