"""Records in, one self-contained HTML file out: verdict, tables, figures, log, provenance. It loads nothing.

It is meant to be mailed, printed and read in a year by somebody who was not there: what happened comes first,
in words, then the figures, then everything they were made with.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InvalidInput, one_line
from toolkit.runs.record import ReplayCheck, RunRecord
from toolkit.views import frames, markup, plots
from toolkit.views.files import write_file
from toolkit.views.frames import NA, memory_words, seconds_words
from toolkit.views.report_style import CSS, HOW_TO_READ

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MAX_RUNS_IN_DETAIL = 12
"""Later runs are in the first table only, and the report says so: a sweep must not make a file of many MB."""
_FIGURE_BYTES = 1_000_000
_MAX_TRANSPOSED = 4


def write_report(records: Sequence[RunRecord], path: Path, title: str) -> Path:
    """Write the report of `records` to `path` and return the path: HTML, under 2 MB for up to 500 runs.

    The file is complete or absent: an older one of that name stays until the new one is whole. Raises
    InvalidInput when there is no record, StorageError in one line when the file cannot be written.
    """
    if not records:
        raise InvalidInput("there is no run to report", "at least one run", "see prefill-lab runs list")
    return write_file(path, _page(records, title).encode("utf-8", "replace"), "the report")


def verdict(record: RunRecord) -> list[str]:
    """What happened, who decided and why, what was left out and whether a later need fits, in plain sentences."""
    sentences = [_what_happened(record), _who_decided(record), f"Reason: {one_line(record.reason).rstrip('.')}."]
    left_out, later = frames.left_out_words(record), frames.needed_later_words(record)
    sentences += [f"Left out: {left_out}."] if left_out is not None else []
    return sentences + ([f"Needed later, as declared: {later}."] if later is not None else [])


# --- words --------------------------------------------------------------------------------------------------


def _what_happened(record: RunRecord) -> str:
    count = len(record.buckets)
    if record.outcome == "captured":
        tokens = [bucket.num_tokens for bucket in record.buckets]
        span = f" ({min(tokens)} to {max(tokens)} tokens)" if tokens else ""
        took = f"{seconds_words(record.capture_time_s)}, using {memory_words(record.mem_usage_gib)}"
        before, after = memory_words(record.free_before_gib), memory_words(record.free_after_gib)
        return (
            f"Captured: {_buckets(count)}{span} became prefill graphs in {took}; free memory was {before} "
            f"before and {after} after. Prefill is served by {record.runner or NA}."
        )
    if record.outcome == "skipped":
        return f"Skipped: no prefill graph was captured. Prefill is served by {record.runner or NA}."
    if record.outcome == "oom":
        if not _reached_capture(record):
            return "Out of memory before the capture began: no prefill graph was captured."
        at = NA if record.oom_bucket is None else f"{record.oom_bucket} tokens"
        return (
            f"Out of memory at bucket {at}, after {_buckets(count)} had been captured. "
            "The server would not have started: a failed capture has no graceful way back to eager."
        )
    how = {
        "crashed": f"Crashed: the capturing process ended{f' by {record.signal}' if record.signal else ''}",
        "cancelled": "Cancelled: somebody asked the capture to stop, and it stopped",
    }.get(record.outcome, "Failed: the capture ended with an error")
    return f"{how} after {_buckets(count)}. There is no runner to serve with."


def _who_decided(record: RunRecord) -> str:
    from toolkit.prefill.guards import GUARDS

    policy, code = frames.policy_name(record), record.reason_code
    if code in {guard_code for guard_code, _, _ in GUARDS}:
        return f"Decided by a guard ({code}): a compatibility rule, asked before the policy ({policy})."
    if record.outcome in ("captured", "skipped"):
        return f"Decided by the policy {policy}" + (f" ({code})." if code not in (None, policy) else ".")
    if record.outcome == "oom" and _reached_capture(record):
        return f"Decided by the policy {policy}: it let the capture start. Running out of memory is no decision."
    return f"The policy was {policy}; what ended the run was no decision of it."


def _reached_capture(record: RunRecord) -> bool:
    return bool(record.buckets) or record.oom_bucket is not None


def _replay_words(check: ReplayCheck | None) -> str:
    if check is None:
        return "Replay was not checked against eager in this run."
    exact = "bit-equal to" if check.bit_equal else "not bit-equal to"
    words = f"Replay check over {check.tokens_checked} tokens: {exact} eager on the same padded batch; "
    largest = "n/a" if check.max_abs_diff is None else f"{check.max_abs_diff:.3g}"
    words += f"largest difference to unpadded eager {largest}"
    words += "." if check.tolerance is None else f" (tolerance {check.tolerance:.3g})."
    if check.next_token is not None:
        words += f" Prompt {check.prompt!r} was continued with {check.next_token!r}."
    return words


def _others_words(others: int | None) -> str:
    if others is None:
        return "Other processes on the device: not known (n/a)."
    if others == 0:
        return "No other process used the device."
    return f"{others} other processes used the device: its free memory includes what they took and gave back."


def _buckets(count: int) -> str:
    return f"{count} bucket{'' if count == 1 else 's'}"


# --- the page -----------------------------------------------------------------------------------------------


def _page(records: Sequence[RunRecord], title: str) -> str:
    heading = markup.safe(one_line(title) or "Prefill graph capture")
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Nothing in a record can make this page load or run anything, even if an escape were missed.
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
            f"<title>{heading}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n<h1>{heading}</h1>",
            *_body(records),
            "</main>\n</body>\n</html>\n",
        )
    )


def _body(records: Sequence[RunRecord]) -> Iterator[str]:
    figures = _Figures()
    detailed = records[:MAX_RUNS_IN_DETAIL]
    yield '<section aria-labelledby="glance">\n<h2 id="glance">At a glance</h2>\n<ol class="glance">'
    for number, record in enumerate(detailed, 1):
        yield f'<li><a href="#run{number}">{markup.safe(_name(record))}</a>: {markup.safe(_what_happened(record))}</li>'
    yield "</ol>"
    if len(records) > len(detailed):
        left = len(records) - len(detailed)
        yield f"<p>{left} more runs are in the table only; prefill-lab runs report ID shows one of them.</p>"
    yield markup.table(_overview(records), "Runs")
    if len(records) > 1:
        yield figures.show(plots.plot_compare(records))
    yield "</section>"
    for number, record in enumerate(detailed, 1):
        yield from _run(number, record, figures)
    yield HOW_TO_READ


def _run(number: int, record: RunRecord, figures: _Figures) -> Iterator[str]:
    yield f'<section aria-labelledby="run{number}">'
    yield f'<h2 id="run{number}">Run {number}: {markup.safe(_name(record))}</h2>'
    source = f"{frames.provenance(record)} | run {record.id} | {record.created}"
    yield f'<p class="source">{markup.safe(source)}</p>'
    yield f'<div class="verdict {markup.safe(record.outcome)}">'
    yield "\n".join(f"<p>{markup.safe(sentence)}</p>" for sentence in verdict(record))
    yield "</div>"
    yield markup.bullets("What to do next", record.advice)
    yield f"<p>{markup.safe(_replay_words(record.replay_check))}</p>"
    yield from _evidence(record, figures)
    yield markup.bullets("Notes", [*record.notes, _others_words(record.other_processes)])
    yield markup.log("Log", record.log)
    # Kept by the supervisor of a child that died; an extra key of the record.
    yield markup.log("End of the child's standard error", (record.model_extra or {}).get("stderr_tail"))
    yield '<div class="pairs">'
    for caption, pairs in (
        ("Settings", record.settings),
        ("Device", record.device),
        ("Software", record.software),
    ):
        yield markup.pairs(caption, pairs)
    yield "</div>\n</section>"


def _evidence(record: RunRecord, figures: _Figures) -> Iterator[str]:
    """Figures, each with the table of what it shows. An empty figure is left out; the table says so."""
    if _reached_capture(record):
        yield figures.show(plots.plot_memory(record))
        yield figures.show(plots.plot_capture_time(record))
    yield markup.table(frames.display_table(frames.bucket_table(record)), "Buckets captured")
    if record.speed:
        yield figures.show(plots.plot_speed(record))
    yield markup.table(
        frames.display_table(frames.speed_table(record)), "Replay against eager, median of a full bucket"
    )
    if record.ledger:
        yield figures.show(plots.plot_ledger(record))
    yield markup.table(frames.display_table(frames.ledger_table(record)), "Ledger: who owns which GiB")


def _overview(records: Sequence[RunRecord]) -> pd.DataFrame:
    """All runs; a few stand side by side, figures downwards, so that nobody has to scroll to the right."""
    table = frames.display_table(frames.run_table(records))
    table = table.rename(columns=frames.heading)
    return table.T if len(records) <= _MAX_TRANSPOSED else table


class _Figures:
    """Figures as data URIs, until the file would become too large; then words instead, never silence."""

    def __init__(self) -> None:
        self._left = _FIGURE_BYTES

    def show(self, figure: Figure) -> str:
        words = plots.alt_text(figure)
        if self._left <= 0:
            return f'<p class="source">Figure left out to keep this file small. {markup.safe(words)}</p>'
        png = base64.b64encode(plots.figure_png(figure)).decode()
        self._left -= len(png)
        width, height = (round(inches * 96) for inches in figure.get_size_inches())
        size = f'width="{width}" height="{height}"'
        return f'<figure><img src="data:image/png;base64,{png}" {size} alt="{markup.safe(words)}"></figure>'


def _name(record: RunRecord) -> str:
    policy, model, backend = (f(record) for f in (frames.policy_name, frames.model_name, frames.backend_name))
    return f"policy {policy}, {model}, {backend}: {record.outcome}"
