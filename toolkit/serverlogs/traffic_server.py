"""The server that a traffic's log is of: its release and the ladder it had, for a ladder design."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import PrefillLabError
from toolkit.ladder import generate_prefill_buckets
from toolkit.memory.rules import resolve
from toolkit.serverlogs.chosen import positive
from toolkit.serverlogs.findings import facts_of
from toolkit.serverlogs.server_ladder import server_ladder
from toolkit.serverlogs.startup import ServerLog, Startup
from toolkit.serverlogs.versions import is_older, newest_version


@dataclass(frozen=True, slots=True)
class TrafficServer:
    """What a log shows of its server.

    Attributes:
        version: the newest release that the wording allows, None where nothing narrows it down.
        why: how that is known, in words; empty without a version.
        older: whether it is a build before all releases with known rules, with other flags.
        own: buckets of its ladder as the log shows them; None where it does not.
        default: the default ladder of its release and chunk, where the log shows those; None where it does not.
        ladder_words: what shows either of the two.
    """

    version: str | None
    why: str
    older: bool
    own: tuple[int, ...] | None
    default: tuple[int, ...] | None
    ladder_words: str


def traffic_server(log: ServerLog) -> TrafficServer | None:
    """The server of the last start that served prefills, None for a log that shows nothing of one."""
    starts = [startup for startup in log.startups if startup.engine != "vllm"]
    served = next((startup for startup in reversed(starts) if startup.prefills.batches), None)
    if served is None:
        return None
    version, why = newest_version(starts)
    shown = server_ladder(served)
    if shown is None:
        default, words = _default(served, version)
        return TrafficServer(version, why, is_older(served), None, default, words)
    ladders = {found.buckets for startup in starts if (found := server_ladder(startup)) is not None}
    words = f"{shown.shown_by}, line {shown.line} of the log"
    if len(ladders) > 1:
        words += f"; the log has starts with {len(ladders)} different ladders, and this is that of the last one"
    return TrafficServer(version, why, is_older(served), shown.buckets, None, words)


def _default(startup: Startup, version: str | None) -> tuple[tuple[int, ...] | None, str]:
    """The ladder that its release builds from the chunk that the log shows."""
    facts = facts_of(startup, version)
    if facts.chunk is None:
        return None, ""
    words = f"chunks of {facts.chunk} tokens, as the log shows them"
    if is_older(startup):
        return tuple(generate_prefill_buckets(facts.chunk)), words
    most = positive(facts.argument("max_total_tokens"))
    try:
        found = resolve(version, None, 1, facts.mla, facts.chunk, "breakable", max_total_tokens=most)
    except PrefillLabError:
        return None, ""
    return found.buckets or None, f"rules of SGLang {found.sglang_version}, {words}"
