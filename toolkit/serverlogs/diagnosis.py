"""A server's log, explained: who took which memory, what was captured, what went wrong and what to do about it.

    diagnosis = diagnose("server.log")
    diagnosis.findings, diagnosis.captures, diagnosis.ledger_frame

Everything here is read out of the log. With a model and a GPU, a forecast stands beside the measurement.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput
from toolkit.serverlogs.capture_report import CaptureReport, capture_reports
from toolkit.serverlogs.findings import check_log
from toolkit.serverlogs.findings.finding import Finding, in_order
from toolkit.serverlogs.fold import read_log
from toolkit.serverlogs.ledger import RankLedger, rank_ledgers, tightest
from toolkit.serverlogs.lines import Counters, Source
from toolkit.serverlogs.replay import ReplayStats, replay_stats
from toolkit.serverlogs.startup import Startup
from toolkit.serverlogs.versions import VERSIONS, possible_versions

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.serverlogs.measured import Measured


_VERSION = re.compile(r"\d{1,4}(?:\.\w{1,20}){1,5}(?:[+-][\w.]{1,40})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a start as printed. `seconds` by the log's own names; `captures` is the sum over printed captures."""

    startup: int
    seconds: dict[str, float]
    graphs: dict[str, float]
    captures_s: float | None


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What one log says. Sizes are GiB, None where the log does not say; nothing is guessed.

    Attributes:
        source: name of the log: its path, `standard input` or `text`.
        engine: `sglang`, `vllm`, `mixed`, or None when no line tells.
        version: as given or printed, None otherwise; `versions` are those that the wording allows (SGLang).
        versions: see `version`; empty when nothing narrows them down.
        startups: the facts of every start, in order (`toolkit.serverlogs.startup.Startup`).
        ranks: labels of all ranks, in order.
        captures: of all starts and ranks, in order.
        ledger: one per start and rank.
        timings: one per start that printed any.
        replay: prefill batches, one entry per start that has any.
        findings: most serious first.
        measured: a forecast beside the measurement, None without a model and a GPU.
        notes: what could not be done, in words.
        counters: how many lines were read, known, unknown, cut.
        dropped: starts between the first and the last ones that were not kept (a crash loop).
    """

    source: str
    engine: str | None
    version: str | None
    versions: tuple[str, ...]
    startups: tuple[Startup, ...] = field(repr=False)
    ranks: tuple[str, ...]
    captures: tuple[CaptureReport, ...]
    ledger: tuple[RankLedger, ...]
    timings: tuple[Timings, ...]
    replay: tuple[ReplayStats, ...]
    findings: tuple[Finding, ...]
    measured: Measured | None
    notes: tuple[str, ...]
    counters: Counters
    dropped: int = 0

    @property
    def worst(self) -> str | None:
        """The most serious severity found; None without findings."""
        return self.findings[0].severity if self.findings else None

    @property
    def tightest(self) -> RankLedger | None:
        """The ledger of the rank with the least free memory, of the last start that has one."""
        last = max((ledger.startup for ledger in self.ledger), default=None)
        return tightest([ledger for ledger in self.ledger if ledger.startup == last])

    @property
    def summary(self) -> str:
        """What the log is and what it shows, in one sentence."""
        from toolkit.serverlogs.diagnosis_words import summary

        return summary(self)

    @property
    def captures_frame(self) -> pd.DataFrame:
        """One row per capture: the fields of `CaptureReport` without its series."""
        from toolkit.serverlogs.diagnosis_frames import captures_frame

        return captures_frame(self)

    @property
    def buckets_frame(self) -> pd.DataFrame:
        """One row per bucket that bars showed: start, rank, role, phase and the fields of `BucketCost`."""
        from toolkit.serverlogs.diagnosis_frames import buckets_frame

        return buckets_frame(self)

    @property
    def ledger_frame(self) -> pd.DataFrame:
        """One row per start, rank and reading of free memory: what it took, what lines account for, the gap."""
        from toolkit.serverlogs.diagnosis_frames import ledger_frame

        return ledger_frame(self)

    @property
    def ranks_frame(self) -> pd.DataFrame:
        """One row per start and rank: weights, pools, graphs, free memory at each stage."""
        from toolkit.serverlogs.diagnosis_frames import ranks_frame

        return ranks_frame(self)

    @property
    def prefill_frame(self) -> pd.DataFrame:
        """One row per start, prefill length and replayed or eager: how many, which bucket, why eager."""
        from toolkit.serverlogs.diagnosis_frames import prefill_frame

        return prefill_frame(self)

    @property
    def findings_frame(self) -> pd.DataFrame:
        """One row per finding, most serious first."""
        from toolkit.serverlogs.diagnosis_frames import findings_frame

        return findings_frame(self)

    def timeline(self) -> pd.DataFrame:
        """Free memory through the start-up: startup, line, time (as printed, None if not), rank, stage, free_gib.

        `stage` is that of the ledger; `bucket N` inside a capture, with `capture` naming it (None outside).
        """
        from toolkit.serverlogs.diagnosis_frames import timeline

        return timeline(self)

    def to_dict(self) -> dict[str, Any]:
        """What `prefill-lab diagnose --json` prints."""
        from toolkit.serverlogs.diagnosis_json import diagnosis_json

        return diagnosis_json(self)

    def _repr_html_(self) -> str:
        from toolkit.serverlogs.diagnosis_page import diagnosis_html

        return diagnosis_html(self)

    def __repr__(self) -> str:
        return f"<Diagnosis of {self.source}: {self.summary}>"


def diagnose(
    source: Source,
    *,
    name: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    sglang_version: str | None = None,
) -> Diagnosis:
    """Read a server's log and say what it shows.

    Args:
        source: a path, the text itself, bytes, an open file (for example `sys.stdin`) or lines.
        name: what the log is called in reports; by default its path, `standard input` or `text`.
        model: catalogue id, folder or hub id, for a forecast beside the measurement; by default what the log names.
        gpu: catalogue id of the card, for example `h100-80gb`. Without it there is no forecast.
        sglang_version: the release that wrote it, for example `0.5.17`; logs rarely say.

    Raises:
        InvalidInput: the path cannot be read, or a name given is unknown. What a log holds never raises.
    """
    if sglang_version is not None and not _VERSION.fullmatch(sglang_version):
        raise InvalidInput(f"version {sglang_version!r}", "a release such as 0.5.17", "leave it out if not known")
    if sglang_version is not None and sglang_version not in VERSIONS:
        known = f"releases known here are {VERSIONS[0]} to {VERSIONS[-1]}"
        raise InvalidInput(f"SGLang version {sglang_version!r} is unknown", known, "leave it out")
    log = read_log(_checked(source))
    version = sglang_version or _printed_version(log.startups)
    startups = tuple(log.startups)
    engines = {startup.engine for startup in startups} - {"unknown"}
    measured, notes = _measured(startups, model, gpu, sglang_version)
    ledgers = [ledger for startup in startups for ledger in rank_ledgers(startup)]
    return Diagnosis(
        source=name or _name(source),
        engine=None if not engines else engines.pop() if len(engines) == 1 else "mixed",
        version=version,
        versions=possible_versions(startups),
        startups=startups,
        ranks=tuple(dict.fromkeys(each.rank.label for startup in startups for each in startup.sorted_ranks)),
        captures=tuple(report for startup in startups for report in capture_reports(startup)),
        ledger=tuple(ledgers),
        timings=tuple(filter(None, map(_timings, startups))),
        replay=tuple(filter(None, (replay_stats(startup, version) for startup in startups))),
        findings=in_order(
            [
                *check_log(log, sglang_version, measured.room if measured else None),
                *(measured.findings if measured else []),
            ]
        ),
        measured=measured,
        notes=notes,
        counters=log.counters,
        dropped=log.dropped,
    )


def _checked(source: Source) -> Source:
    """Several logs are no one log: their lines would carry the same numbers. A list of one path is that path."""
    if not isinstance(source, list | tuple) or not source or not all(map(_is_path, source[:_MOST_PATHS])):
        return source
    if len(source) == 1:
        return source[0]
    raise InvalidInput(f"{len(source)} logs at once", "one log", "compare several with toolkit.compare_logs(a, b)")


_MOST_PATHS = 20


def _is_path(item: object) -> bool:
    if isinstance(item, os.PathLike):
        return True
    return isinstance(item, str) and 0 < len(item) < 4096 and "\n" not in item and os.path.isfile(item)


def _name(source: Source) -> str:
    if isinstance(source, os.PathLike):
        return os.fspath(source)
    if isinstance(source, str):
        return "text" if "\n" in source or len(source) > 4096 or not os.path.exists(source) else source
    called = getattr(source, "name", None)
    if called == "<stdin>":
        return "standard input"
    return called if isinstance(called, str) else "text"


def _printed_version(startups: list[Startup]) -> str | None:
    printed = [startup.start.version for startup in startups if startup.start and startup.start.version]
    return printed[-1] if printed else None


def _timings(startup: Startup) -> Timings | None:
    elapsed = [each.end.elapsed_s for each in startup.captures if each.end and each.end.elapsed_s is not None]
    printed = startup.timings
    if printed is None and not elapsed:
        return None
    # Ranks capture at the same time: the slowest of each kind counts.
    slowest: dict[tuple[str, str], float] = {}
    for each in startup.captures:
        if each.end and each.end.elapsed_s is not None:
            key = (each.role, each.phase)
            slowest[key] = max(slowest.get(key, 0.0), each.end.elapsed_s)
    return Timings(
        startup.index,
        dict(printed.seconds) if printed else {},
        dict(printed.graphs) if printed else {},
        sum(slowest.values()) if slowest else None,
    )


def _measured(
    startups: tuple[Startup, ...], model: str | None, gpu: str | None, version: str | None
) -> tuple[Measured | None, tuple[str, ...]]:
    from toolkit.catalogue import resolve_model

    if model is not None:
        resolve_model(model)  # what a person names wrongly is an error; what the log lacks is a note
    if gpu is None:
        return None, ("no forecast: a log does not name the card; give gpu",) if model is not None else ()
    from toolkit.hardware import resolve_gpu
    from toolkit.serverlogs.measured import beside_forecast

    resolve_gpu(gpu)
    return beside_forecast(startups, model, gpu, version)
