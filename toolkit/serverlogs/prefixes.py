"""What stands before a server's own words on a line, and which rank it names.

`[2026-08-27 00:00:52 DP0 TP1] `, the names that docker compose and kubectl put first, time stamps of container run
times, Ray's and vLLM's `(Worker_TP0 pid=123, ip=10.0.0.1) `, levels, and `[gpu_model_runner.py:1234] `, in any order.
"""

from __future__ import annotations

import re

from toolkit.serverlogs.events import NO_RANK, Rank

_MOST_PREFIXES = 12
_MOST_CACHED = 4096
_FARTHEST = 160

# Every repetition is bounded and no two neighbours can match the same text, so one try costs little whatever comes.
_PART = re.compile(
    r"""
      (?P<blank>[ \t]{1,400})
    | \[(?P<bracket>[^\][\n]{1,200})\]:?(?=[ ]|$)
    | \((?P<actor>[A-Za-z_][\w.<>]{0,80}(?:[ ](?!pid=)[\w]{1,20}){0,3})?[ ]?(?:pid=(?P<pid>\d{1,10}))?
      (?:,[ ]ip=[\w.:]{1,60})?\)(?=[ ]|$)
    | \d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?
      (?:[ ]std(?:out|err)[ ][FP])?(?:[ ][|-])?(?=[ ]|$)
    | (?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL)(?=[ ])
    | \d\d-\d\d[ ]\d\d:\d\d:\d\d(?:[.]\d{1,6})?(?=[ ])
    | [\w/.-]{1,80}\.py:\d{1,6}(?:\]|:)(?=[ ])
    | (?P<service>[A-Za-z0-9][\w.-]{0,100})[ ]{1,60}\|(?=[ ]|$)
    """,
    re.VERBOSE | re.ASCII,
)
_RANK = re.compile(r"(?<![A-Za-z])(DP|PP|TP|EP)_?(\d{1,5})(?![A-Za-z0-9])", re.ASCII)
_GLOBAL_RANK = re.compile(r"rank ?(\d{1,5})$", re.ASCII)
_POD = "pod/"
_OF_API = ("APIServer", "ApiServer")


def rank_in(text: str, server: str = "", worker: str = "") -> Rank:
    """The rank that `DP0 PP1 TP2 EP3` (any order, also `Worker_TP2_EP3`) names; `NO_RANK` when none is named."""
    found: dict[str, int] = {}
    for name, number in _RANK.findall(text.replace("_", " ")):
        found.setdefault(name.lower(), int(number))
    if not found and not server and not worker:
        return NO_RANK
    return Rank(**found, worker="" if found else worker, server=server)


class Prefixes:
    """Finds where the words begin, remembering what it has seen: a log has few different prefixes."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, str, str], Rank] = {}
        self._outer: dict[str, tuple[bool, Rank]] = {}

    def rank(self, text: str, server: str = "", worker: str = "") -> Rank:
        """`rank_in`, from memory where possible."""
        key = (text, server, worker)
        known = self._ranks.get(key)
        if known is None:
            known = rank_in(text, server, worker)
            if len(self._ranks) < _MOST_CACHED:
                self._ranks[key] = known
        return known

    def strip(self, line: str, server: str = "") -> tuple[int, Rank]:
        """Where the words of `line` begin, and the rank before them. `server` is whose line it is if none is named."""
        inner = line.find("[20", 1, _FARTHEST)
        end = line.find("] ", inner + 20, inner + 160) if inner > 0 else -1
        if end < 0:
            return self._strip(line, server)
        # [2026-08-27 00:00:52 TP0] is all that changes from line to line behind the name of a container or actor.
        outer = line[:inner]
        known = self._outer.get(outer)
        if known is None:
            start, rank = self._strip(outer, "")
            known = (start == inner and (not rank.named or bool(rank.worker)), rank)
            if len(self._outer) < _MOST_CACHED:
                self._outer[outer] = known
        whole, rank = known
        if not whole:
            return self._strip(line, server)
        return end + 2, self.rank(line[inner + 20 : end], rank.server or server, rank.worker)

    def _strip(self, line: str, server: str) -> tuple[int, Rank]:
        at, named, worker = 0, "", ""
        for _ in range(_MOST_PREFIXES):
            match = _PART.match(line, at)
            if match is None or match.end() == at:
                break
            at = match.end()
            kind = match.lastgroup
            if kind == "bracket":
                inside = match["bracket"]
                if inside.startswith(_POD):
                    server = inside
                elif whole := _GLOBAL_RANK.match(inside):
                    worker = f"rank {whole[1]}"
                else:
                    # The first 20 characters are a time stamp, which would make every prefix a new one.
                    named = named or _ranks_only(inside)
            elif kind in ("actor", "pid"):
                actor = match["actor"] or ""
                named = named or _ranks_only(actor)
                if match["pid"] and not actor.startswith((*_OF_API, "EngineCore")):
                    worker = f"pid {match['pid']}"
            elif kind == "service" and not server:
                server = match["service"]
        return at, self.rank(named, server, worker)


def _ranks_only(text: str) -> str:
    return " ".join(name + number for name, number in _RANK.findall(text.replace("_", " ")))
