"""Every finding there is: code -> check. A check says nothing without a line that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from toolkit.serverlogs.capture_report import capture_reports
from toolkit.serverlogs.findings import ceiling, decisions, ends, estimates, failed, memory, pools, readings, traffic
from toolkit.serverlogs.findings.facts import Check, Facts
from toolkit.serverlogs.findings.finding import Finding, in_order
from toolkit.serverlogs.findings.room import ForecastRoom
from toolkit.serverlogs.ledger import rank_ledgers
from toolkit.serverlogs.replay import replay_stats
from toolkit.serverlogs.startup import ServerLog, Startup

FINDINGS: Mapping[str, Check] = MappingProxyType(
    {
        "GATE_SKIPPED": decisions.gate_skipped,
        "DISABLED_BY_RULE": decisions.disabled_by_rule,
        "EXPLICIT_BACKEND_IGNORED": decisions.explicit_backend_ignored,
        "NO_PREFILL_CAPTURE_UNEXPLAINED": decisions.no_prefill_capture_unexplained,
        "OOM_IN_CAPTURE": memory.oom_in_capture,
        "OOM_AFTER_CAPTURE": memory.oom_after_capture,
        "OOM_BEFORE_CAPTURE": memory.oom_before_capture,
        "NO_ROOM_FOR_KV": memory.no_room_for_kv,
        "NOT_A_MEMORY_FAILURE": failed.not_a_memory_failure,
        "SERVER_FAILED": failed.server_failed,
        "COMPILING_NOT_HUNG": ends.compiling_not_hung,
        "LOG_INCOMPLETE": ends.log_incomplete,
        "PEAK_ABOVE_PRINTED_USAGE": readings.peak_above_printed_usage,
        "NEGATIVE_USAGE": readings.negative_usage,
        "OTHER_PROCESS_ON_GPU": readings.other_process_on_gpu,
        "RANK_SKEW": readings.rank_skew,
        "CEILING_BELOW_CHUNK": ceiling.ceiling_below_chunk,
        "LADDER_UNUSED": traffic.ladder_unused,
        "EAGER_PREFILLS": traffic.eager_prefills,
        "ESTIMATE_MISS": estimates.estimate_miss,
        "ESTIMATE_PASS_NOT_REAL": estimates.estimate_pass_not_real,
        "POST_CAPTURE_KV_SIZING_OFF": pools.post_capture_kv_sizing_off,
        "KV_UNCHANGED_BY_TRIMMING": pools.kv_unchanged_by_trimming,
    }
)


def check_log(log: ServerLog, version: str | None = None, room: ForecastRoom | None = None) -> tuple[Finding, ...]:
    """The findings of every start of a log, most serious first; the same of several starts is said once.

    Args:
        log: as `fold.read_log` returns it.
        version: SGLang release that wrote it, None when not known.
        room: what a forecast says about the capture of one of its starts, None without one.
    """
    found: dict[tuple[str, str, str], Finding] = {}
    last: dict[str, Facts] = {}
    for index, startup in enumerate(log.startups):
        followed = any(later.server == startup.server for later in log.startups[index + 1 :])
        facts = facts_of(startup, version, last.get(startup.server), followed)
        last[startup.server] = replace(facts, previous=None)
        if room is not None and room.startup == startup.index:
            facts = replace(facts, room=room)
        for one in check_startup(facts):
            key = (one.code, one.severity, one.message)
            known = found.get(key)
            found[key] = one if known is None else _both(known, one)
    return in_order([*found.values(), *_of_the_file(log)])


def check_startup(facts: Facts) -> list[Finding]:
    """The findings of one start, in the order of `FINDINGS`."""
    number = (facts.startup.index,)
    return [
        replace(one, lines=tuple(sorted(set(one.lines))), startups=number)
        for check in FINDINGS.values()
        for one in check(facts)
    ]


def facts_of(
    startup: Startup, version: str | None = None, previous: Facts | None = None, followed: bool = False
) -> Facts:
    """What checks look at, drawn from one start."""
    return Facts(
        startup,
        tuple(capture_reports(startup)),
        tuple(rank_ledgers(startup)),
        replay_stats(startup, version),
        version,
        previous,
        followed,
    )


def _of_the_file(log: ServerLog) -> list[Finding]:
    found = []
    if not log.startups:
        message = f"Nothing in {log.counters.lines:,} lines is a start-up line of SGLang or vLLM."
        advice = "Give the server's own standard output and error from its start on."
        found.append(Finding("NOTHING_RECOGNISED", "info", message, (), advice))
    if log.counters.damaged:
        message = f"The file is damaged, {log.counters.damaged}: what follows is missing."
        found.append(Finding("LOG_INCOMPLETE", "info", message, (log.counters.lines,), "Copy the file again."))
    return found


_MOST_LINES = 1_000


def _both(first: Finding, second: Finding) -> Finding:
    return replace(
        first,
        advice=second.advice,  # the later start is the one to mend, and the one that a forecast is for
        lines=tuple(sorted({*first.lines, *second.lines}))[:_MOST_LINES],
        ranks=tuple(dict.fromkeys((*first.ranks, *second.ranks))),
        startups=(*first.startups, *second.startups),
    )
