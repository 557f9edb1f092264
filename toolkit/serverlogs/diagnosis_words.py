"""A diagnosis in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.serverlogs.findings.failed import ends_in_error

if TYPE_CHECKING:
    from toolkit.serverlogs.capture_report import CaptureReport
    from toolkit.serverlogs.diagnosis import Diagnosis

_WORDS = {"oom": "ran out of memory", "incomplete": "has no end in this log"}


def summary(diagnosis: Diagnosis) -> str:
    """What the log is and what it shows: engine, ranks, the prefill capture, how many findings of which kind."""
    if diagnosis.engine is None:
        return f"nothing of SGLang or vLLM in {diagnosis.counters.lines:,} lines"
    starts = f"{len(diagnosis.startups)} starts, " if len(diagnosis.startups) > 1 else ""
    ranks = f"{len(diagnosis.ranks)} ranks, " if len(diagnosis.ranks) > 1 else "1 rank, " if diagnosis.ranks else ""
    found = {severity: sum(one.severity == severity for one in diagnosis.findings) for severity in ("error", "warning")}
    counts = [f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in found.items() if count]
    wrong = any(ends_in_error(startup) for startup in diagnosis.startups)
    end = ", ".join(counts) or ("ended in an error" if wrong else "nothing wrong")
    return f"{diagnosis.engine}, {starts}{ranks}{_graph(diagnosis)}; {end}"


def _graph(diagnosis: Diagnosis) -> str:
    prefills = [each for each in diagnosis.captures if each.phase in ("prefill", "all") and each.role == "target"]
    begun = {(each.startup, each.rank) for each in prefills if each.outcome not in ("skipped", "estimate")}
    # A word against a graph that the same rank did capture is of another graph, or came too late.
    real = [
        each
        for each in prefills
        if each.outcome != "estimate" and (each.outcome != "skipped" or (each.startup, each.rank) not in begun)
    ]
    if not real:
        return "no prefill capture" if diagnosis.ranks else "no start-up in this log"
    worst = min(real, key=lambda each: ("oom", "failed", "skipped", "incomplete", "captured").index(each.outcome))
    name = "graphs" if worst.phase == "all" else "prefill graph"
    return f"{name} {_WORDS.get(worst.outcome, worst.outcome)}{_figures(worst)}"


def _figures(report: CaptureReport) -> str:
    parts = []
    if report.n_buckets is not None:
        parts.append(f"{report.n_buckets} buckets")
    if report.mem_usage_gib is not None:
        parts.append(f"{report.mem_usage_gib:.2f} GiB")
    if report.elapsed_s is not None:
        parts.append(f"{report.elapsed_s:.1f} s")
    if report.stopped_at is not None:
        parts.append(f"at bucket {report.stopped_at}")
    return f" ({', '.join(parts)})" if parts else ""
