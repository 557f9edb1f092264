"""Which SGLang releases can have written a log, by wording that came or went with a release.

Source: SGLang 0.5.15 to 0.5.23, released code, executed or read (data/sglang_rules.json has the rules by release).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from toolkit.serverlogs.events import DisableLine
from toolkit.serverlogs.startup import Startup

_FIRST, _LAST = 15, 23
VERSIONS = tuple(f"0.5.{patch}" for patch in range(_FIRST, _LAST + 1))


def possible_versions(startups: Sequence[Startup]) -> tuple[str, ...]:
    """Releases whose wording the log has; empty when nothing narrows them down, nothing fits, or it is older."""
    bounds = [bound for startup in startups for bound in _bounds(startup)]
    if not bounds or any(is_older(startup) for startup in startups):
        return ()
    least, most = max(low for low, _ in bounds), min(high for _, high in bounds)
    return VERSIONS[least - _FIRST : most - _FIRST + 1]


def replay_limit_factor(startup: Startup, version: str | None = None) -> int | None:
    """How many times its tokens a bucket may be for a replay; None where the release has no such rule.

    Where the release is not known and only some that can have written the log have the rule, theirs.
    """
    from toolkit.memory.release import get_release

    if is_older(startup):
        return None
    releases = (version,) if version in VERSIONS else possible_versions([startup]) or VERSIONS
    factors = [get_release(each).replay_limit_factor for each in releases]
    return max((factor for factor in factors if factor is not None), default=None)


def with_rule(cause: str) -> tuple[str, ...]:
    """Releases whose breakable backend has a config rule of that name; empty when it is unknown."""
    return tuple(version for version in VERSIONS if cause in _names_of_rules(version))


def newest_version(startups: Sequence[Startup]) -> tuple[str | None, str]:
    """The newest release that wording allows, whose rules and flags are taken, and why in words.

    None and no words where nothing narrows it down. For builds older than all of `VERSIONS` it is the first of them:
    no rules are known that are nearer.
    """
    if any(is_older(startup) for startup in startups):
        return VERSIONS[0], f"the log's wording is older than {VERSIONS[0]}, the oldest release with known rules"
    found = possible_versions(startups)
    if not found or found == VERSIONS:
        return None, ""
    if len(found) == 1:
        return found[0], f"the log's wording is that of {found[0]}"
    return found[-1], f"the newest release that the log's wording allows ({found[0]} to {found[-1]})"


@cache
def _names_of_rules(version: str) -> frozenset[str]:
    from toolkit.memory.release import get_release

    return frozenset(rule.name for rule in get_release(version).rules if rule.line is not None)


def is_older(startup: Startup) -> bool:
    """Whether a start has the wording of builds before the first of `VERSIONS`."""
    said = [capture.begin or capture.end for capture in startup.captures]
    return any(line.wording == "old" for line in said if line is not None)


def _bounds(startup: Startup) -> Iterator[tuple[int, int]]:
    if startup.gates:
        yield 16, 17
    if startup.timings is not None:
        yield 17, _LAST
    for log in startup.ranks.values():
        if log.baseline is not None:
            yield 21, _LAST
        if log.init is not None and log.init.usage_gib is not None:
            yield _FIRST, 20
        for capture in log.captures:
            if capture.begin is not None:
                yield _of_backend(capture.begin.backend if capture.phase == "prefill" else None)
            if capture.end is not None and capture.end.ladder is not None:
                yield 22, _LAST
    if any(notice.code == "moved_to_tc_piecewise" for notice in startup.notices):
        yield 16, 21
    if startup.start is not None and startup.start.values.get("cuda_graph_backend_prefill") == "tc_piecewise":
        yield _of_backend("tc_piecewise")
    for line in startup.disables:
        yield from _of_rule(line)


def _of_backend(name: str | None) -> tuple[int, int]:
    """Releases that take a prefill backend of that name; all of them where none does, as on other devices."""
    from toolkit.memory.release import get_release

    found = [version for version in VERSIONS if name in get_release(version).prefill_backends] or VERSIONS
    return VERSIONS.index(found[0]) + _FIRST, VERSIONS.index(found[-1]) + _FIRST


def _of_rule(line: DisableLine) -> Iterator[tuple[int, int]]:
    found = with_rule(line.cause) if line.code == "breakable_rule" else ()
    if found:
        yield VERSIONS.index(found[0]) + _FIRST, VERSIONS.index(found[-1]) + _FIRST
