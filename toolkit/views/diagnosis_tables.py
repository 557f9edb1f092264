"""A diagnosis as tables and sentences for a terminal or a pipe. Pure functions; every figure has its unit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.compare import Comparison
from toolkit.serverlogs.diagnosis import Diagnosis
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.ledger import RankLedger
from toolkit.serverlogs.measured import Measured
from toolkit.serverlogs.replay import REASONS, ReplayStats
from toolkit.serverlogs.versions import VERSIONS
from toolkit.views.frames import NA
from toolkit.views.tables import count, plain

_FOR_NAMES, _LEAST_NAME = 46, 12
"""Characters of 80 that a comparison has for the names of its logs, and the least for each."""
_SHOWN_ROWS, _SHOWN_BUCKETS, _SHOWN_LINES = 16, 10, 6


def diagnosis_view(diagnosis: Diagnosis) -> list[RenderableType]:
    """One log: what it is, the findings, captures, memory, buckets, prefills, and a forecast where there is one."""
    parts: list[RenderableType] = [plain(f"{diagnosis.source}: {diagnosis.summary}")]
    parts += [plain(line) for line in _head(diagnosis)]
    parts += _findings(diagnosis.findings, starts=len(diagnosis.startups))
    if diagnosis.captures:
        parts += _captures(diagnosis.captures)
    if diagnosis.ledger:
        parts += _ranks(diagnosis.ledger)
    tight = diagnosis.tightest
    if tight is not None and tight.stages:
        parts.append(_stages(tight))
    parts += [_buckets(each) for each in diagnosis.captures if len(each.series) > 1 and each.phase == "prefill"][:2]
    parts += [plain(_prefills(each)) for each in diagnosis.replay]
    if diagnosis.measured is not None:
        parts += _beside_forecast(diagnosis.measured)
    return [*parts, *(plain(f"note: {note}") for note in diagnosis.notes)]


def comparison_view(comparison: Comparison) -> list[RenderableType]:
    """Several logs: each report, then their figures side by side and what only the comparison shows."""
    parts: list[RenderableType] = []
    for diagnosis in comparison.diagnoses:
        parts += [*diagnosis_view(diagnosis), plain("")]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    width = max(_LEAST_NAME, _FOR_NAMES // len(comparison.diagnoses) - 2)
    for diagnosis in comparison.diagnoses:
        table.add_column(_broken(_wrapped(diagnosis.source, width)), justify="right", overflow="fold")
    for key in comparison.rows[0]:
        if key != "source":
            table.add_row(_NAMES.get(key) or _named(key), *(plain(_compared(key, row[key])) for row in comparison.rows))
    return [*parts, table, *_findings(comparison.findings, nothing="")]


def _wrapped(name: str, width: int) -> str:
    """A name of a file on lines of `width`, broken behind its separators, so that no word of it is cut."""
    lines = [""]
    for part in re.findall(r"[^/_. -]*[/_. -]|[^/_. -]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _head(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.version is not None:
        yield f"version: {diagnosis.version}"
    elif diagnosis.versions and diagnosis.versions != VERSIONS:
        first, last = diagnosis.versions[0], diagnosis.versions[-1]
        yield f"version: {first} to {last} by its wording" if first != last else f"version: {first} by its wording"
    if diagnosis.dropped:
        yield f"starts: {len(diagnosis.startups):,} kept, {diagnosis.dropped:,} between the first and the last left out"
    counters = diagnosis.counters
    unread = f", {counters.unknown:,} not known" if counters.unknown else ""
    cut = f", {counters.cut:,} cut at 65,536 characters" if counters.cut else ""
    yield f"read: {counters.lines:,} lines, {counters.events:,} facts{unread}{cut}"


def _findings(findings: Sequence[Finding], nothing: str = "no findings", starts: int = 1) -> list[RenderableType]:
    if not findings:
        return [plain(nothing)] if nothing else []
    parts: list[RenderableType] = []
    for one in findings:
        where = _lines(one) + (_starts(one) if starts > 1 else "")
        parts.append(plain(f"{one.severity} {one.code}{where}: {one.message}"))
        if one.advice:
            parts.append(plain(f"next: {one.advice}"))
        if one.source:
            parts.append(plain(f"source: {one.source}"))
    return parts


def _lines(one: Finding) -> str:
    if not one.lines:
        return ""
    shown = ", ".join(str(line) for line in one.lines[:_SHOWN_LINES])
    more = f" and {len(one.lines) - _SHOWN_LINES} more" if len(one.lines) > _SHOWN_LINES else ""
    return f" (line{'s' if len(one.lines) > 1 else ''} {shown}{more})"


def _starts(one: Finding) -> str:
    """Counted from 1, as people do; the JSON counts from 0."""
    if not one.startups:
        return ""
    shown = ", ".join(str(number + 1) for number in one.startups[:_SHOWN_LINES])
    more = f" and {len(one.startups) - _SHOWN_LINES} more" if len(one.startups) > _SHOWN_LINES else ""
    return f" in start{'s' if len(one.startups) > 1 else ''} {shown}{more}"


def _captures(captures: Sequence[CaptureReport]) -> list[RenderableType]:
    """What was captured, and what memory it moved: two tables, so that each fits 80 columns."""
    table = _table("capture", "outcome", "backend", right=("buckets", "time (s)"))
    memory = _table("captures (GiB)", right=("free\nbefore", "usage", "peak\nneed", "least\nfree", "free\nafter"))
    for one in captures[:_SHOWN_ROWS]:
        figures = (one.free_before_gib, one.mem_usage_gib, one.peak_need_gib, one.min_free_gib, one.free_after_gib)
        name = plain(f"{_of(one.startup, captures)}{one.rank} {one.role} {one.phase}")
        table.add_row(name, one.outcome, plain(one.backend or NA), count(one.n_buckets), _figure(one.elapsed_s))
        memory.add_row(name, *map(_figure, figures))
    return [table, memory, *_more(captures)]


def _ranks(ledgers: Sequence[RankLedger]) -> list[RenderableType]:
    """The memory of each rank up to its captures, and from them on."""
    until = _table(
        "memory (GiB)", right=("free at\nstart", "weights", "KV\npool", "KV\ntokens", "state", "free after\npools")
    )
    graphs = _table("graphs (GiB)", right=("free before\ncapture", "prefill", "other\ngraphs", "free at\nend"))
    for one in ledgers[:_SHOWN_ROWS]:
        name = plain(f"{_of(one.startup, ledgers)}{one.rank}")
        early = (one.baseline_gib, one.weights_gib, one.kv_cache_gib)
        late = (one.free_before_capture_gib, one.prefill_graph_gib, one.other_graphs_gib, one.free_at_end_gib)
        pools = count(one.kv_cache_tokens), _figure(one.state_gib), _figure(one.free_after_pools_gib)
        until.add_row(name, *map(_figure, early), *pools)
        graphs.add_row(name, *map(_figure, late))
    return [until, graphs, *_more(ledgers)]


def _stages(ledger: RankLedger) -> Table:
    table = _table(f"free memory of\n{ledger.rank} (GiB)", right=("line", "free", "taken", "said by\nlines", "gap"))
    for stage in ledger.stages[:_SHOWN_ROWS]:
        figures = (stage.free_gib, stage.taken_gib, stage.said_gib, stage.gap_gib)
        table.add_row(plain(stage.stage), str(stage.line), *map(_figure, figures))
    return table


def _buckets(report: CaptureReport) -> Table:
    figures = ("free before\n(GiB)", "added\n(MiB)", "of\nbuckets", "step\n(s)")
    table = _table(f"{report.rank}\n{report.role} {report.phase}:\nbucket", right=figures)
    rows = [
        (
            str(one.bucket if one.bucket is not None else NA),
            _figure(one.free_gib),
            NA if one.added_gib is None else f"{one.added_gib * 1024:.0f}",
            str(one.buckets),
            _figure(one.seconds),
        )
        for one in report.series
    ]
    if len(rows) > _SHOWN_BUCKETS:
        half = _SHOWN_BUCKETS // 2
        rows = [*rows[:half], ("...",) * 5, *rows[-half:]]
    for row in rows:
        table.add_row(*row)
    return table


def _prefills(stats: ReplayStats) -> str:
    hit = NA if stats.hit_rate is None else f"{100 * stats.hit_rate:.1f} % replayed"
    padded = "" if stats.padded_share is None else f", {100 * stats.padded_share:.1f} % of their rows are padding"
    why = "; ".join(f"{number:,} eager {REASONS[reason]}" for reason, number in stats.eager_by_reason.items())
    return f"prefills: {stats.batches:,} ({hit}{padded}){'; ' + why if why else ''}"


def _beside_forecast(measured: Measured) -> list[RenderableType]:
    head = f"forecast for {measured.about}:"
    table = _table("", right=(f"measured\n({measured.rank})", "forecast", "low", "high"))
    for row in measured.rows:
        digits = 0 if row.unit == "tokens" else 2
        figures = (row.measured, row.forecast, row.low, row.high)
        name = row.what if row.unit in row.what else f"{row.what} ({row.unit})"
        table.add_row(plain(name), *(_figure(value, digits) for value in figures))
    lines = [f"policy {one.policy} on the measured free memory: {one.words}, {one.reason}" for one in measured.verdicts]
    return [
        plain(head),
        table,
        *(plain(line) for line in lines),
        *(plain(f"assumed: {one}") for one in measured.assumptions),
    ]


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Columns of words, then of figures. Long names are broken: a table has to fit a terminal of 80 columns."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(_broken(name), no_wrap=True)
    for name in right:
        table.add_column(_broken(name), justify="right", no_wrap=True)
    return table


def _broken(name: str) -> Text:
    return Text("\n").join(plain(part) for part in name.split("\n"))


def _of(startup: int, rows: Sequence[CaptureReport] | Sequence[RankLedger]) -> str:
    return f"start {startup + 1}: " if len({row.startup for row in rows}) > 1 else ""


def _more(rows: Sequence[object]) -> list[RenderableType]:
    left = len(rows) - _SHOWN_ROWS
    return [plain(f"... {left} more in --json")] if left > 0 else []


def _figure(value: object, digits: int = 2) -> str:
    if value is None:
        return NA
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


_NAMES = {
    "mem_fraction": "mem_fraction_static",
    "kv_cache_gib": "KV pool (GiB)",
    "kv_cache_tokens": "KV pool (tokens)",
    "free_before_gib": "free before capture (GiB)",
    "prefill": "prefill graph: outcome",
    "backend": "prefill graph: backend",
    "n_buckets": "prefill graph: buckets",
    "largest": "prefill graph: largest (tokens)",
    "prefill_gib": "prefill graph: usage (GiB)",
    "peak_need_gib": "prefill graph: peak need (GiB)",
    "prefill_s": "prefill graph: capture (s)",
    "all_graphs_gib": "all graphs: usage (GiB)",
    "captures_s": "all captures (s)",
    "hit_rate": "prefills replayed",
    "findings": "findings above info",
}
"""What the rows of a comparison are called, where the key says too little."""


def _compared(key: str, value: object) -> str:
    return f"{100 * value:.1f} %" if key == "hit_rate" and isinstance(value, float) else _figure(value)


def _named(key: str) -> str:
    """`free before (GiB)` for `free_before_gib`."""
    for ending, unit in (("_gib", " (GiB)"), ("_s", " (s)")):
        if key.endswith(ending):
            return key.removesuffix(ending).replace("_", " ") + unit
    return key.replace("_", " ")
