"""What a Log Doctor shows, as HTML: a diagnosis in, text out. Pure, and everything of the log is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.serverlogs.diagnosis import Diagnosis
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.focus import ExcerptLine
from toolkit.serverlogs.measured import Measured
from toolkit.serverlogs.used_settings import UsedSettings
from toolkit.views import frames, markup
from toolkit.views.log_words import release_words
from toolkit.widgets.panels import figure_html

if TYPE_CHECKING:
    import pandas as pd

MOST_FINDINGS, MOST_LINES, MOST_ROWS = 30, 6, 40
"""Findings, lines of each, and rows of a table that are shown; the rest is counted in words."""
SIGNS = {"error": "\u2717", "warning": "!", "info": "i"}
"""Beside the word for how serious a finding is, so that no colour has to be told apart."""
_POINTS_AT = "&#9654; "
_BOXES = {"error": "oom", "warning": "skipped"}
_LEDGER = {
    "baseline_gib": "free at start (GiB)",
    "weights_gib": "weights (GiB)",
    "kv_cache_gib": "KV pool (GiB)",
    "kv_cache_tokens": "KV tokens",
    "free_after_pools_gib": "free after pools (GiB)",
    "free_before_capture_gib": "free before capture (GiB)",
    "prefill_graph_gib": "prefill graph (GiB)",
    "other_graphs_gib": "other graphs (GiB)",
    "free_at_end_gib": "free at end (GiB)",
}
_CAPTURES = {
    "outcome": "outcome",
    "backend": "backend",
    "n_buckets": "buckets",
    "free_before_gib": "free before (GiB)",
    "mem_usage_gib": "printed usage (GiB)",
    "peak_need_gib": "needed inside (GiB)",
    "min_free_gib": "least free (GiB)",
    "free_after_gib": "free after (GiB)",
    "elapsed_s": "time (s)",
}

STYLE = """<style>
.plab .finding { border-left: 9px solid #767676; padding: 2px 12px; margin: 4px 0; }
.plab .finding p { margin: 2px 0; }
.plab .finding-error { border-left: 9px double #b34700; }
.plab .finding-warning { border-left: 9px dashed #8a5f00; }
.plab .finding-info { border-left: 9px dotted #0072b2; }
.plab .excerpt { max-height: 20em; overflow: auto; border: 1px solid #b0b0b0; padding: 4px; margin: 2px 0; }
.plab .excerpt table { width: 100%; }
.plab .excerpt td, .plab .excerpt th
  { font-family: monospace; font-size: 12px; text-align: left; vertical-align: top; padding: 0 6px; }
.plab .excerpt td { white-space: pre-wrap; overflow-wrap: anywhere; }
.plab .excerpt th { text-align: right; white-space: nowrap; font-weight: normal; }
.plab .excerpt .meant > * { background: #fff3c4; color: #1a1a1a; font-weight: 700; }
.plab .plab-paste textarea { white-space: pre; overflow: auto; font-family: monospace; font-size: 12px; }
</style>"""

HINT = (
    '<p class="source">Paste the log of an SGLang or vLLM server, from its start on and with standard error (bars are '
    "there), or upload the file, also gzip. It stays in this kernel. <b>Up to 9 MB</b>: a notebook server ends the "
    "page's connection at messages over 10 MiB, and the page has to be loaded again. Upload a larger log as gzip, or "
    "use <code>prefill-lab diagnose FILE</code> or <code>toolkit.LogDoctor('FILE')</code> where the file is. A text "
    "field makes lines of the states of a progress bar: only an uploaded file keeps its own line numbers.</p>"
)


def summary_html(diagnosis: Diagnosis | None) -> str:
    """What the log is and shows, and how much of it was read."""
    if diagnosis is None:
        return ""
    counters = diagnosis.counters
    unknown = f", {counters.unknown:,} not known" if counters.unknown else ""
    cut = f", {counters.cut:,} cut at 65,536 characters" if counters.cut else ""
    broken = f", {counters.undecodable:,} places that are not UTF-8" if counters.undecodable else ""
    read = f"{counters.lines:,} lines read, {counters.events:,} facts found{unknown}{cut}{broken}"
    lines = [f"{diagnosis.source}: {diagnosis.summary}", f"{release_words(diagnosis)}; {read}", *diagnosis.notes]
    paragraphs = "".join(f"<p>{markup.safe(line)}</p>" for line in lines)
    return f'<div class="verdict {_BOXES.get(diagnosis.worst or "", "captured")}" role="status">{paragraphs}</div>'


def finding_html(finding: Finding) -> str:
    """One finding: how serious in word and sign, its code, what was found, what to do, and the fact behind it."""
    parts = [
        f"<p><b>{SIGNS[finding.severity]} {markup.safe(finding.severity)}: {markup.safe(finding.code)}</b></p>",
        f"<p>{markup.safe(finding.message)}</p>",
    ]
    if finding.advice:
        parts.append(f"<p><b>What to do:</b> {markup.safe(finding.advice)}</p>")
    if finding.source:
        parts.append(f"<p>Source: {_link(finding.source)}</p>")
    return f'<div class="finding finding-{markup.safe(finding.severity)}">{"".join(parts)}</div>'


def _link(address: str) -> str:
    safe = markup.safe(address)
    if not address.startswith("https://"):
        return safe
    return f'<a href="{safe}" target="_blank" rel="noopener noreferrer">{safe}</a>'


def excerpt_html(lines: Sequence[ExcerptLine]) -> str:
    """Lines of the log with their numbers; the one that is meant is marked by a sign as well as by its background."""
    if not lines:
        return '<p class="source">n/a: the log has no such line.</p>'
    rows = "".join(
        f'<tr{" class=meant" if one.meant else ""}><th scope="row">{_POINTS_AT if one.meant else ""}{one.number}</th>'
        f"<td>{markup.safe(one.text)}</td></tr>"
        for one in lines
    )
    label = next((f"line {line.number} of the log" for line in lines if line.meant), "no such line")
    place = f'<div class="excerpt" tabindex="0" role="region" aria-label="{label}">'
    return f"{place}<table><tbody>{rows}</tbody></table></div>"


def tables_html(diagnosis: Diagnosis | None) -> str:
    """Who took which memory, the captures, and a forecast beside them where there is one."""
    if diagnosis is None:
        return ""
    several = len(diagnosis.startups) > 1
    parts = [
        _table(diagnosis.ranks_frame, "rank", _LEDGER, "Memory by rank, from the log", several),
        _table(diagnosis.captures_frame, "capture", _CAPTURES, "Captures, from the log", several),
    ]
    if diagnosis.measured is not None:
        parts.append(measured_html(diagnosis.measured))
    return "".join(parts)


def _table(frame: pd.DataFrame, index: str, columns: dict[str, str], caption: str, several: bool) -> str:
    """The columns as text; rows are named by rank and, where a log has several, by their start."""
    if frame.empty:
        return f'<p class="source">{markup.safe(caption)}: n/a, the log has none.</p>'
    shown = frame.head(MOST_ROWS)
    names = [str(name) for name in shown["rank"]]
    if "phase" in shown.columns:
        names = [
            f"{name} {role} {phase}" for name, role, phase in zip(names, shown["role"], shown["phase"], strict=True)
        ]
    if several:
        names = [f"start {number + 1}: {name}" for number, name in zip(shown["startup"], names, strict=True)]
    text = shown[list(columns)].astype(object)
    for column in columns:
        text[column] = [_cell(column, value) for value in shown[column]]
    text.insert(0, index, names)
    left = len(frame) - len(shown)
    more = f'<p class="source">{left} more rows are not shown.</p>' if left else ""
    return markup.table(text.rename(columns=columns).set_index(index), caption) + more


def _cell(column: str, value: object) -> str:
    """Counts have no decimals, and a log prints hundredths of GiB."""
    if value is None or str(value) in ("nan", "<NA>"):
        return frames.NA
    if column in ("n_buckets", "kv_cache_tokens"):
        return f"{int(float(str(value))):,}"
    return f"{value:.2f}" if isinstance(value, float) else frames.display_value(column, value)


def measured_html(measured: Measured) -> str:
    """Figures of the log beside a forecast, and what each policy would do with the memory that was free."""
    import pandas as pd

    rows = []
    for row in measured.rows:
        digits = 0 if row.unit == "tokens" else 2
        values = (row.measured, row.forecast, row.low, row.high)
        texts = [frames.NA if value is None else f"{value:,.{digits}f}" for value in values]
        rows.append((f"{row.what} ({row.unit})", *texts))
    heads = ["", f"measured, {measured.rank} (field data)", "forecast", "low", "high"]
    table = markup.table(
        pd.DataFrame(rows, columns=heads).set_index(""), f"Measured beside the forecast: {measured.about}"
    )
    policies = [f"{one.policy}: {one.words}, {one.reason}" for one in measured.verdicts]
    assumed = markup.bullets("Assumed", measured.assumptions)
    return table + markup.bullets("Each policy on the memory that was free (forecast)", policies) + assumed


def figures_html(diagnosis: Diagnosis | None) -> str:
    """Free memory through the start-up, and memory against bucket; one that cannot be drawn is a sentence."""
    if diagnosis is None:
        return ""
    from toolkit.views.doctor_plots import plot_log_buckets, plot_timeline

    parts = []
    for plot in (plot_timeline, plot_log_buckets):
        try:
            parts.append(figure_html(plot(diagnosis), {}))
        except Exception as error:  # a log is data from somewhere, and Matplotlib has limits
            why = markup.safe(f"{type(error).__name__}: {error}")
            parts.append(f'<div class="problem">This figure cannot be drawn ({why}).</div>')
    return f'<div class="figures">{"".join(parts)}</div>'


def taken_html(used: UsedSettings | None, in_lab: bool) -> str:
    """Which settings were taken over, why where it is not plain, and what was not; without a Lab as Python."""
    if used is None:
        return ""
    given = {name: value for name, value in used.settings.items() if value is not None}
    if in_lab:
        words = "; ".join(f"{name} {_value(value)}" for name, value in given.items())
        head = f"<p><b>Set in the Lab:</b> {markup.safe(words)}</p>"
    else:
        code = f"toolkit.Lab({', '.join(f'{name}={value!r}' for name, value in given.items())})"
        head = f'<p><b>A Lab with these settings:</b></p><pre tabindex="0">{markup.safe(code)}</pre>'
    return head + markup.bullets("Why", used.why) + markup.bullets("Not taken over", used.left_out)


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} buckets to {value[-1]}"
    return str(value)
