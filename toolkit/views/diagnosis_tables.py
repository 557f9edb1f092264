"""A diagnosis as tables and sentences for a terminal or a pipe. Pure functions; every figure has its unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

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
    for diagnosis in comparison.diagnoses:
        table.add_column(plain(diagnosis.source), justify="right", overflow="fold")
    for key in comparison.rows[0]:
        if key != "source":
            table.add_row(_named(key), *(plain(_figure(row[key])) for row in comparison.rows))
    return [*parts, table, *_findings(comparison.findings, nothing="")]


def _head(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.version is not None:
        yield f"version: {diagnosis.version}"
    elif diagnosis.versions and diagnosis.versions != VERSIONS:
        first, last = diagnosis.versions[0], diagnosis.versions[-1]
        yield f"version: {first} to {last} by its wording" if first != last else f"version: {first} by its wording"
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
    table = _table("capture (GiB, s)", "outcome", "backend")
    for name in ("buckets", "free before", "usage", "peak need", "least free", "free after", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in captures[:_SHOWN_ROWS]:
        figures = (one.free_before_gib, one.mem_usage_gib, one.peak_need_gib, one.min_free_gib, one.free_after_gib)
        name = f"{_of(one.startup, captures)}{one.rank} {one.role} {one.phase}"
        row = (plain(name), one.outcome, plain(one.backend or NA), count(one.n_buckets))
        table.add_row(*row, *map(_figure, (*figures, one.elapsed_s)))
    return [table, *_more(captures)]


def _ranks(ledgers: Sequence[RankLedger]) -> list[RenderableType]:
    table = _table("memory (GiB)")
    names = ("free at start", "weights", "KV pool", "KV tokens", "state", "after pools", "before capture", "prefill")
    for name in (*names, "other graphs", "free at end"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in ledgers[:_SHOWN_ROWS]:
        early = (one.baseline_gib, one.weights_gib, one.kv_cache_gib)
        late = (one.state_gib, one.free_after_pools_gib, one.free_before_capture_gib, one.prefill_graph_gib)
        table.add_row(
            plain(f"{_of(one.startup, ledgers)}{one.rank}"),
            *map(_figure, early),
            count(one.kv_cache_tokens),
            *map(_figure, (*late, one.other_graphs_gib, one.free_at_end_gib)),
        )
    return [table, *_more(ledgers)]


def _stages(ledger: RankLedger) -> Table:
    table = _table(f"free memory of {ledger.rank} (GiB)")
    for name in ("line", "free", "taken", "said by lines", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in ledger.stages[:_SHOWN_ROWS]:
        figures = (stage.free_gib, stage.taken_gib, stage.said_gib, stage.gap_gib)
        table.add_row(plain(stage.stage), str(stage.line), *map(_figure, figures))
    return table


def _buckets(report: CaptureReport) -> Table:
    table = _table(f"{report.rank} {report.role} {report.phase}: bucket")
    for name in ("free before (GiB)", "added (MiB)", "of buckets", "step (s)"):
        table.add_column(name, justify="right", no_wrap=True)
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
    table = _table(f"forecast for {measured.model} on {measured.gpu}, rules of SGLang {measured.sglang_version}")
    for name in (f"measured ({measured.rank})", "forecast", "low", "high"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in measured.rows:
        digits = 0 if row.unit == "tokens" else 2
        figures = (row.measured, row.forecast, row.low, row.high)
        table.add_row(plain(f"{row.what} ({row.unit})"), *(_figure(value, digits) for value in figures))
    lines = [
        f"policy {one.policy} on the measured free memory: {one.outcome}, {one.reason}" for one in measured.verdicts
    ]
    return [table, *(plain(line) for line in lines), *(plain(f"assumed: {one}") for one in measured.assumptions)]


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(plain(name), no_wrap=True)
    return table


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


def _named(key: str) -> str:
    """`free before (GiB)` for `free_before_gib`."""
    for ending, unit in (("_gib", " (GiB)"), ("_s", " (s)")):
        if key.endswith(ending):
            return key.removesuffix(ending).replace("_", " ") + unit
    return key.replace("_", " ")
