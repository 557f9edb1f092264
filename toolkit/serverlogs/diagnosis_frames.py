"""A diagnosis as DataFrames. Columns carry their unit; what the log does not say is None or NaN."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pandas as pd

from toolkit.serverlogs.capture_report import BucketCost, CaptureReport
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.ledger import RankLedger, Stage
from toolkit.serverlogs.replay import LengthRow

if TYPE_CHECKING:
    from toolkit.serverlogs.diagnosis import Diagnosis


def _names(record: type[Any], *without: str) -> list[str]:
    return [each.name for each in dataclasses.fields(record) if each.name not in without]


def _row(record: Any, names: list[str]) -> list[Any]:
    return [getattr(record, name) for name in names]


def captures_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """One row per capture."""
    names = _names(CaptureReport, "series")
    frame = pd.DataFrame([_row(each, names) for each in diagnosis.captures], columns=names)
    return _typed(frame, CaptureReport)


def buckets_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """One row per bucket that bars showed."""
    names = _names(BucketCost)
    rows = [
        [each.startup, each.rank, each.role, each.phase, *_row(point, names)]
        for each in diagnosis.captures
        for point in each.series
    ]
    return _typed(pd.DataFrame(rows, columns=["startup", "rank", "role", "phase", *names]), BucketCost)


def ledger_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """One row per reading of free memory."""
    names = _names(Stage)
    rows = [[each.startup, each.rank, *_row(stage, names)] for each in diagnosis.ledger for stage in each.stages]
    return _typed(pd.DataFrame(rows, columns=["startup", "rank", *names]), Stage)


def ranks_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """One row per start and rank."""
    names = _names(RankLedger, "stages")
    return _typed(pd.DataFrame([_row(each, names) for each in diagnosis.ledger], columns=names), RankLedger)


def prefill_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """One row per start, length and replayed or eager."""
    names = _names(LengthRow)
    rows = [[each.startup, *_row(row, names)] for each in diagnosis.replay for row in each.rows]
    return pd.DataFrame(rows, columns=["startup", *names])


def findings_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """One row per finding."""
    names = _names(Finding)
    rows = [[each.line, *_row(each, names)] for each in diagnosis.findings]
    return pd.DataFrame(rows, columns=["line", *names])[
        ["code", "severity", "line", "message", "advice", "source", "lines", "ranks", "startups"]
    ]


def timeline(diagnosis: Diagnosis) -> pd.DataFrame:
    """Free memory through the start-up, readings and bars together, in the order of lines."""
    rows: list[tuple[Any, ...]] = []
    for each in diagnosis.ledger:
        rows += [(each.startup, stage.line, each.rank, stage.stage, None, stage.free_gib) for stage in each.stages]
    for capture in diagnosis.captures:
        name = f"{capture.role} {capture.phase}"
        rows += [
            (capture.startup, point.line, capture.rank, f"bucket {point.bucket}", name, point.free_gib)
            for point in capture.series
            if point.free_gib is not None
        ]
    rows.sort(key=lambda row: (row[0], row[1]))
    times = diagnosis.counters.times
    timed = [(startup, line, times.get(line), *rest) for startup, line, *rest in rows]
    return pd.DataFrame(timed, columns=["startup", "line", "time", "rank", "stage", "capture", "free_gib"])


def _typed(frame: pd.DataFrame, record: type[Any]) -> pd.DataFrame:
    """A column of figures that are all missing must not turn into objects, nor counts with gaps into fractions."""
    figures = [name for name in frame.columns if name.endswith(("_gib", "_s")) or name == "seconds"]
    counts = [each.name for each in dataclasses.fields(record) if each.type == "int | None"]
    return frame.astype(dict.fromkeys(figures, "float64") | dict.fromkeys(counts, "Int64"))
