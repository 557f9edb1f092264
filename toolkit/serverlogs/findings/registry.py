"""Every finding there is: code -> check. A check says nothing without a line that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from toolkit.serverlogs.capture_report import capture_reports
from toolkit.serverlogs.findings import decisions, pools
from toolkit.serverlogs.findings.facts import Check, Facts
from toolkit.serverlogs.findings.finding import Finding, in_order
from toolkit.serverlogs.ledger import rank_ledgers
from toolkit.serverlogs.replay import replay_stats
from toolkit.serverlogs.startup import ServerLog, Startup

FINDINGS: Mapping[str, Check] = MappingProxyType(
    {
        "GATE_SKIPPED": decisions.gate_skipped,
        "DISABLED_BY_RULE": decisions.disabled_by_rule,
        "EXPLICIT_BACKEND_IGNORED": decisions.explicit_backend_ignored,
        "NO_PREFILL_CAPTURE_UNEXPLAINED": decisions.no_prefill_capture_unexplained,
        "KV_UNCHANGED_BY_TRIMMING": pools.kv_unchanged_by_trimming,
    }
)


def check_log(log: ServerLog, version: str | None = None) -> tuple[Finding, ...]:
    """The findings of every start of a log, most serious first; the same of several starts is said once.

    Args:
        log: as `fold.read_log` returns it.
        version: SGLang release that wrote it, None when not known.
    """
    found: dict[tuple[str, str, str], Finding] = {}
    last: dict[str, Facts] = {}
    for index, startup in enumerate(log.startups):
        followed = any(later.server == startup.server for later in log.startups[index + 1 :])
        facts = facts_of(startup, version, last.get(startup.server), followed)
        last[startup.server] = replace(facts, previous=None)
        for one in check_startup(facts):
            key = (one.code, one.severity, one.message)
            known = found.get(key)
            found[key] = one if known is None else _both(known, one)
    return in_order(list(found.values()))


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
        replay_stats(startup),
        version,
        previous,
        followed,
    )


_MOST_LINES = 1_000


def _both(first: Finding, second: Finding) -> Finding:
    return replace(
        first,
        lines=(*first.lines, *second.lines)[:_MOST_LINES],
        ranks=tuple(dict.fromkeys((*first.ranks, *second.ranks))),
        startups=(*first.startups, *second.startups),
    )
