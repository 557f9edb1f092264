"""A diagnosis as plain values: the stable keys of `prefill-lab diagnose --json`. Missing is None; GiB is 2**30."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.serverlogs.capture_report import CaptureReport
    from toolkit.serverlogs.diagnosis import Diagnosis
    from toolkit.serverlogs.replay import ReplayStats
    from toolkit.serverlogs.startup import Startup

_DIGITS = 4


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as dictionaries and lists, ready for `json.dumps`."""
    return {
        "source": diagnosis.source,
        "engine": diagnosis.engine,
        "version": diagnosis.version,
        "possible_versions": list(diagnosis.versions),
        "summary": diagnosis.summary,
        "startups": [_startup(startup) for startup in diagnosis.startups],
        "ranks": list(diagnosis.ranks),
        "captures": [_capture(each) for each in diagnosis.captures],
        "ledger": _ledger(diagnosis),
        "timings": [_rounded(dataclasses.asdict(each)) for each in diagnosis.timings],
        "replay": [_replay(each) for each in diagnosis.replay],
        "findings": [each.to_dict() for each in diagnosis.findings],
        "measured": _rounded(dataclasses.asdict(diagnosis.measured)) if diagnosis.measured else None,
        "notes": list(diagnosis.notes),
        "lines": {
            "read": diagnosis.counters.lines,
            "facts": diagnosis.counters.events,
            "ignored": diagnosis.counters.ignored,
            "unknown": diagnosis.counters.unknown,
            "cut": diagnosis.counters.cut,
            "undecodable": diagnosis.counters.undecodable,
            "damaged": diagnosis.counters.damaged or None,
        },
        "dropped_startups": diagnosis.dropped,
    }


def _startup(startup: Startup) -> dict[str, Any]:
    return {
        "startup": startup.index,
        "server": startup.server or None,
        "engine": None if startup.engine == "unknown" else startup.engine,
        "first_line": startup.first_line,
        "last_line": startup.last_line,
        "ready": startup.ready is not None,
        "ready_line": startup.ready.line if startup.ready else None,
    }


def _capture(report: CaptureReport) -> dict[str, Any]:
    values: dict[str, Any] = _rounded(dataclasses.asdict(report))
    values["line"] = report.lines[0] if report.lines else None
    return values


def _ledger(diagnosis: Diagnosis) -> dict[str, Any]:
    """The rank with the least free memory first of all, then every rank."""
    tight = diagnosis.tightest
    top = dataclasses.asdict(tight) if tight is not None else {}
    top.pop("stages", None)
    return {**_rounded(top), "ranks": [_rounded(dataclasses.asdict(each)) for each in diagnosis.ledger]}


def _replay(stats: ReplayStats) -> dict[str, Any]:
    values: dict[str, Any] = _rounded(dataclasses.asdict(stats))
    values["rows"] = values["rows"][:_MOST_ROWS]
    return values


_MOST_ROWS = 2_000


def _rounded(value: Any) -> Any:
    """Floats without the noise of subtraction."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
