"""What the Lab shows, as HTML: a state in, text out. Pure, so that it can be tested without a front end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from toolkit.policies import POLICIES
from toolkit.runs.record import RunRecord
from toolkit.views import frames, markup
from toolkit.views.report import verdict
from toolkit.views.snippets import as_command, as_python
from toolkit.widgets.choice import Preview
from toolkit.widgets.verdicts import Foreseen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panel = Callable[[RunRecord, RunRecord | None], str]
EMPTY = '<p class="source">Nothing captured yet. Press Capture, or pick a run under "Runs".</p>'
MOST_RUNS = 50
"""Runs in the table; the rest is counted below it."""

STYLE = """<style>
.plab { font-size: 14px; line-height: 1.45; }
.plab .widget-html-content { line-height: 1.45; overflow-wrap: anywhere; min-width: 0; }
/* A label without a tooltip gets the tooltip "null" from ipywidgets 8.1. */
.plab .widget-label[title="null"] { pointer-events: none; }
.plab .plab-auto { margin-left: 138px; }
.plab h3 { font-size: 15px; margin: 8px 0 4px; }
.plab .source { color: var(--jp-ui-font-color1, #4a4a4a); }
.plab .says { border-collapse: collapse; }
.plab .says th { text-align: left; vertical-align: top; padding: 2px 12px 2px 0; white-space: nowrap; }
.plab .says td { text-align: left; padding: 2px 0; }
.plab .verdict { border: 1px solid #767676; border-left-width: 9px; padding: 2px 12px; margin: 6px 0; }
.plab .verdict p { margin: 4px 0; }
.plab .verdict p:first-child { font-weight: 700; }
.plab .captured { border-left-color: #007a59; border-left-style: solid; }
.plab .skipped, .plab .cancelled { border-left-color: #8a5f00; border-left-style: dashed; }
.plab .oom, .plab .crashed, .plab .failed { border-left-color: #b34700; border-left-style: double; }
.plab .running { border-left-color: #0072b2; border-left-style: dotted; }
.plab .who { border-collapse: collapse; width: 99%; }
.plab .who th, .plab .who td
  { text-align: left; vertical-align: top; padding: 3px 10px; border-bottom: 1px solid #b0b0b0; }
.plab .who tbody th { white-space: nowrap; border-left: 9px solid #767676; }
.plab .who td.kv { text-align: right; white-space: nowrap; }
.plab .who td.short { white-space: nowrap; font-weight: 700; }
.plab .who .does-captured th { border-left: 9px solid #007a59; }
.plab .who .does-trimmed th { border-left: 9px dotted #0072b2; }
.plab .who .does-skipped th { border-left: 9px dashed #8a5f00; }
.plab .who .does-oom th { border-left: 9px double #b34700; }
.plab .who .chosen > * { border-top: 2px solid #0072b2; border-bottom: 2px solid #0072b2; }
.plab .problem { border: 2px dashed #b34700; padding: 2px 10px; }
.plab .wide { overflow-x: auto; }
.plab table { overflow-wrap: normal; }
.plab .wide td, .plab .wide tbody th { white-space: nowrap; }
.plab .widget-toggle-buttons { display: flex; align-items: baseline; margin: 3px 2px; }
.plab .widget-toggle-buttons > .widget-label { flex: 0 0 128px; margin-right: 8px; text-align: right; }
.plab table { font-variant-numeric: tabular-nums; font-size: 13px; border-collapse: collapse; }
.plab .wide th, .plab .wide td, .plab .pairs th, .plab .pairs td
  { border: 1px solid #b0b0b0; padding: 2px 8px; text-align: right; }
.plab .wide tbody th { text-align: left; }
.plab caption { text-align: left; font-weight: 700; caption-side: top; color: inherit; padding: 4px 0; }
.plab pre { max-height: 24em; overflow: auto; white-space: pre-wrap; border: 1px solid #b0b0b0; padding: 8px; }
.plab figure { margin: 0; background: white; }
.plab .figures { display: flex; flex-wrap: wrap; gap: 8px; }
.plab .figures figure { flex: 1 1 600px; min-width: 0; max-width: 900px; }
.plab .widget-toggle-button.mod-active { text-decoration: underline; font-weight: 700; outline: 2px solid #0072b2; }
.plab :focus-visible { outline: 3px solid #0072b2; outline-offset: 1px; }
</style>"""


def preview_html(shown: Preview | None) -> str:
    """What the controls mean, before anything is captured."""
    if shown is None:
        return ""
    if shown.settings is None:
        return f'<div class="problem" role="alert"><b>Cannot be captured:</b> {markup.safe(shown.problem)}</div>'
    rows = (
        ("model", shown.model),
        ("memory fraction", shown.fraction),
        ("backend", shown.backend),
        ("ladder", shown.ladder),
        ("free before capture", shown.free),
        ("reserve", shown.reserve),
        (f"policy {shown.settings.policy}", shown.verdict),
    )
    cells = "".join(
        f'<tr><th scope="row">{markup.safe(name)}</th><td>{markup.safe(text)}</td></tr>' for name, text in rows
    )
    return f'<table class="says"><tbody>{cells}</tbody></table>'


SIGNS = {"captured": "\u2713", "trimmed": "\u2702", "skipped": "\u2013", "oom": "\u2717", "unknown": "?"}
"""Before the words of a verdict, so that no colour has to be told apart."""


def verdicts_html(shown: Preview | None) -> str:
    """What every policy would do: one row each, the chosen one marked."""
    if shown is None or shown.settings is None:
        return '<p class="source">n/a: these settings cannot be captured.</p>'
    chosen = shown.settings.policy
    rows = "".join(_verdict_row(verdict, name == chosen) for name, verdict in shown.verdicts.items())
    source = "Before anything runs: free memory as you ask or forecast; needs and KV tokens forecast for this engine"
    source += "." if shown.foreseen else ", which is being made."
    head = "".join(f'<th scope="col">{name}</th>' for name in ("policy", "verdict", "KV tokens (forecast)", "reason"))
    return (
        f'<table class="who"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        f'<p class="source">{markup.safe(source)}</p>'
    )


def _verdict_row(verdict: Foreseen, chosen: bool) -> str:
    classes = f"does-{verdict.kind}{' chosen' if chosen else ''}"
    name = markup.safe(verdict.policy) + (" (chosen)" if chosen else "")
    return (
        f'<tr class="{classes}"><th scope="row" title="{markup.safe(POLICIES[verdict.policy].summary)}">{name}</th>'
        f'<td class="short">{SIGNS[verdict.kind]} {markup.safe(verdict.short)}</td>'
        f'<td class="kv">{markup.safe(kv_words(verdict))}</td><td>{markup.safe(verdict.reason)}</td></tr>'
    )


def kv_words(verdict: Foreseen) -> str:
    """Tokens of the KV pool, and how many more or fewer than with a pool that is sized first."""
    if verdict.kv_tokens is None or verdict.kind == "oom":
        return "n/a"
    change = "" if verdict.kv_change is None else f" ({verdict.kv_change:+,})"
    return f"{verdict.kv_tokens:,}{change}"


def snippets_html(shown: Preview | None) -> str:
    """The settings as code, folded, each with a button that copies it; the code can be selected as well."""
    if shown is None or shown.settings is None:
        return ""
    codes = {"Python": as_python(shown.settings), "command": as_command(shown.settings)}
    # Selected as well: a page that is not served over https, or not from this machine, has no clipboard.
    copy = (
        "getSelection().selectAllChildren(this.nextElementSibling);"
        "navigator.clipboard?.writeText(this.nextElementSibling.textContent)"
    )
    return "".join(
        f'<details><summary>As {name}</summary><button type="button" onclick="{copy}">Copy as {name}</button>'
        f'<pre tabindex="0">{markup.safe(code)}</pre></details>'
        for name, code in codes.items()
    )


def verdict_html(record: RunRecord | None, other: RunRecord | None = None) -> str:
    """What happened in the run shown, who decided, and what to do next; of the run laid over it as well."""
    if record is None:
        return EMPTY
    if other is None:
        return _verdict_box(record, "")
    return _verdict_box(record, "A: ") + _verdict_box(other, "B: ")


def _verdict_box(record: RunRecord, letter: str) -> str:
    if record.is_running:
        lines = [f"Capturing now: {frames.provenance(record)}", record.reason]
        if record.decision is not None:
            why = record.decision.get("reason", frames.NA)
            lines.append(f"Decided by the policy {frames.policy_name(record)}: {why}")
        lines += record.log[-1:]
    else:
        lines = verdict(record)
    paragraphs = "".join(f"<p>{markup.safe(line)}</p>" for line in [letter + lines[0], *lines[1:]])
    advice = markup.bullets("What to do next", record.advice)
    return f'<div class="verdict {markup.safe(record.outcome)}" role="status">{paragraphs}</div>{advice}'


def memory_and_time(record: RunRecord, other: RunRecord | None) -> str:
    """Memory and capture time against bucket size; of two runs, both laid over each other."""
    from toolkit.views.plots import plot_capture_time, plot_memory

    if other is not None:
        return overlay(record, other)
    if record.is_running and not record.buckets:
        _figure(plot_memory, record)  # loads what drawing takes now, and not beside a bucket that is being timed
        return '<p class="source">No bucket is captured yet.</p>'
    if not record.buckets and record.oom_bucket is None:
        return f'<p class="source">No bucket was captured ({record.outcome}): there is nothing to plot.</p>'
    return f'<div class="figures">{_figure(plot_memory, record)}{_figure(plot_capture_time, record)}</div>'


def overlay(record: RunRecord, other: RunRecord) -> str:
    """Two runs over each other, and what differs."""
    from toolkit.views.overlay import bucket_difference_table, difference_table, overlay_tips, plot_overlay

    differences = frames.display_table(difference_table(record, other))
    per_bucket = frames.display_table(bucket_difference_table(record, other))
    return (
        f'<div class="figures">{figure_html(plot_overlay(record, other), overlay_tips(record, other))}</div>'
        + markup.table(differences, "A and B, and what differs")
        + markup.table(per_bucket, "A and B by bucket")
    )


def ledger(record: RunRecord, other: RunRecord | None) -> str:
    """Who owns which GiB, as a stacked bar and a table."""
    from toolkit.views.plots import plot_ledger

    shown = [record] if other is None else [record, other]
    return "".join(
        _figure(plot_ledger, run)
        + markup.table(frames.display_table(frames.ledger_table(run)), f"Ledger, measured on {frames.device_name(run)}")
        for run in shown
    )


def speed(record: RunRecord, other: RunRecord | None) -> str:
    """Replay against eager by bucket, with the share of padding."""
    from toolkit.views.plots import plot_speed

    shown = [record] if other is None else [record, other]
    return "".join(
        _figure(plot_speed, run)
        + markup.table(
            frames.display_table(frames.speed_table(run)),
            f"Replay against eager, median of a full bucket, measured on {frames.device_name(run)}",
        )
        for run in shown
    )


def buckets(record: RunRecord, other: RunRecord | None) -> str:
    """Every figure of every bucket."""
    caption = f"Buckets, measured on {frames.device_name(record)}"
    table = markup.table(frames.display_table(frames.bucket_table(record)), caption)
    return table + (overlay(record, other) if other is not None else "")


def log(record: RunRecord, _other: RunRecord | None) -> str:
    """The log in SGLang's wording, the notes, and what a child said that ended badly."""
    tail = getattr(record, "stderr_tail", None)
    return (
        (markup.log("Log, in SGLang's wording (its GB is GiB)", record.log) or '<p class="source">No log line yet.</p>')
        + markup.bullets("Notes", record.notes)
        + markup.log("Standard error of the child, its end", tail)
    )


PANELS: dict[str, Panel] = {
    "Memory and time": memory_and_time,
    "Ledger": ledger,
    "Replay and eager": speed,
    "Buckets": buckets,
    "Log": log,
}
"""What can be shown of a run, by the name of its button."""


def panel_html(name: str, record: RunRecord | None, other: RunRecord | None) -> str:
    """One panel; a figure that cannot be drawn is replaced by a sentence and never breaks the Lab."""
    if record is None:
        return EMPTY
    try:
        return PANELS[name](record, other)
    except Exception as error:  # a record is data from somewhere, and Matplotlib has limits
        why = markup.safe(f"{type(error).__name__}: {error}")
        return f'<div class="problem">This panel cannot be shown for run {markup.safe(record.id)} ({why}).</div>'


def runs_html(runs: tuple[RunRecord, ...], folder: str) -> str:
    """The table of runs, newest first."""
    import pandas as pd

    where = f"Runs in {folder}"
    if not runs:
        return f'<p class="source">{markup.safe(where)}: none yet.</p>'
    shown = runs[:MOST_RUNS]
    table = frames.run_table(shown)
    table.insert(0, "run", pd.Series([run.id for run in shown], dtype="str"))
    more = f'<p class="source">{len(runs) - MOST_RUNS} older runs are not shown.</p>' if len(runs) > MOST_RUNS else ""
    return markup.table(frames.display_table(table), where) + more


def figure_html(figure: Figure, tips: Mapping[int, str]) -> str:
    """A figure as inline SVG; hovering over a bucket shows its words in `tips`."""
    from toolkit.views.svg import figure_svg

    return f"<figure>{figure_svg(figure, tips)}</figure>"


def _figure(plot: Callable[[RunRecord], Figure], record: RunRecord) -> str:
    from toolkit.views.buckets import bucket_tips

    return figure_html(plot(record), bucket_tips(record))
