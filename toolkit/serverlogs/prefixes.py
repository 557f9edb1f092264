"""What stands before a server's own words on a line, and which rank, process and server it names.

`[2026-08-27 00:00:52 DP0 TP1] `, the names that docker compose and swarm, kubectl and stern put first, time stamps of
container run times, `Aug 27 00:00:52 host sglang[99]: ` of syslog and journald, task numbers of srun and mpirun, Ray's
and vLLM's `(Worker_TP0 pid=123, ip=10.0.0.1) `, levels, and `[gpu_model_runner.py:1234] `, in any order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from toolkit.serverlogs.events import NO_RANK, Rank
from toolkit.serverlogs.failures import is_exception

_MOST_PREFIXES = 16
_MOST_CACHED = 4096
_MOST_LEARNED = 32
_FARTHEST = 160

# Every repetition is bounded and no two neighbours can match the same text, so one try costs little whatever comes.
_TIME = re.compile(
    r"""
      (?:<\d{1,3}>(?:1[ ])?)?                                         # syslog's priority, and its version
      (?: \d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d
        | (?:[A-Z][a-z][a-z][ ])?(?:\d{4}-\d\d-\d\d[ ]\d\d:\d\d:\d\d|[A-Z][a-z][a-z][ ]{1,2}\d{1,2}[ ]\d\d:\d\d:\d\d)
        | \d\d-\d\d[ ]\d\d:\d\d:\d\d
        | \d\d:\d\d:\d\d )
      (?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d|[ ][A-Z]{3,4}(?=[ ][\w.-]{1,64}[ ]))?
      (?:[ ]std(?:out|err)[ ][FP])?(?:[ ][|-])?(?=[ ]|$)
    """,
    re.VERBOSE | re.ASCII,
)
# Behind a time: the host and the program of syslog and journald, as RFC 3164 and as RFC 5424 write them.
_HOST = re.compile(
    r"[ ](?P<host>[\w.-]{1,64})[ ](?:(?P<tag>[\w./@-]{1,80})\[(?P<pid>\d{1,10})\]:"
    r"|(?P<app>[\w./@-]{1,64})[ ](?P<proc>\d{1,10})[ ][\w-]{1,32}[ ](?:-|\[[^\]\n]{0,200}\]))(?=[ ]|$)",
    re.ASCII,
)
_HOST_ALONE = re.compile(r"[ ](?P<host>[\w.-]{1,64})[ ](?P<tag>[\w./@-]{1,80}):(?=[ ]|$)", re.ASCII)
_PART = re.compile(
    r"""
      (?P<blank>[ \t]{1,400})
    | \[(?P<bracket>[^\][\n]{1,200})\](?::|(?=[ ]|$))
    | \((?P<actor>[^()\n]{1,100}?(?:\([^()\n]{0,60}\))?)?[ ]?pid=(?P<pid>\d{1,10})
      (?:,[ ]ip=(?P<ip>[\w.:]{1,60}))?\)(?=[ ]|$)
    | \((?P<name>[A-Za-z_][\w.<>]{0,80}(?:[ ][\w]{1,20}){0,3})(?:,[ ]ip=[\w.:]{1,60})?\)(?=[ ]|$)
    | (?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL)(?:[ ]-)?(?=[ ])
    | (?:INFO|WARNING|ERROR|DEBUG|CRITICAL):[a-z_][a-z0-9_.]{0,100}:
    | (?=[^ :\n]{1,83}+:\d)[\w/.-]{1,80}\.py:\d{1,6}(?:\]|:)(?=[ ])
    | [a-z_][a-z0-9_]{0,40}(?:\.[a-z_][a-z0-9_]{0,40}){1,8}:(?=[ ])  # a logger; an exception has capitals
    | (?P<task>\d{1,7}):(?=[ ]|\[20)                                  # srun --label
    | \[\d{1,4},(?P<process>\d{1,7})\]<std(?:out|err)>:               # mpirun --tag-output
    | \d{1,9}\t                                                       # cat -n
    | (?P<ranks>(?:DP|PP|TP|EP)\d{1,5}(?:[ ](?:DP|PP|TP|EP)\d{1,5}){0,3}):?(?=[ ])
    | (?P<service>[A-Za-z0-9][\w.-]{0,100}+)(?:@[\w.-]{1,64}+)?[ ]{1,60}+\|(?=[ ]|$)
    """,
    re.VERBOSE | re.ASCII,
)
# Only where the server's own bracket or a name learned from one follows: two words could be anything else.
_POD_AND_CONTAINER = re.compile(r"[a-z0-9][a-z0-9.-]{0,100} (?:› )?[a-z0-9][a-z0-9-]{0,62} ")  # stern
_STREAM = re.compile(r"[\w.-]{1,80}(?:/[\w.-]{1,80}){1,4} ", re.ASCII)  # of CloudWatch: ecs/server/3f5c
_UNKNOWN = re.compile(r"[^\"'=(){}|%\n]{1,80}[ :>|\t]")
_RANK = re.compile(r"(?<![A-Za-z])(DP|PP|TP|EP)_?(\d{1,5})(?![A-Za-z0-9])", re.ASCII)
_GLOBAL_RANK = re.compile(r"rank ?(\d{1,5})$", re.ASCII)
_SWARM_TASK = re.compile(r"(.{1,90}\.\d{1,4})\.[a-z0-9]{1,30}$")
_POD = "pod/"
# Names of vLLM's own processes, perhaps with a rank behind: several belong to one server. Not so Ray's `WorkerDict`.
_OF_ENGINE = ("APIServer", "ApiServer", "EngineCore")
_OF_VLLM = re.compile(
    rf"(?:{'|'.join(_OF_ENGINE)}|Worker(?:Proc)?|VllmWorker(?:Process)?|RayWorker(?:Wrapper|Proc)?)(?![A-Za-z])"
)
_REPLICA = "ServeReplica:"


def rank_in(text: str, outer: Rank = NO_RANK) -> Rank:
    """The rank that `DP0 PP1 TP2 EP3` (any order, also `Worker_TP2_EP3`) names; that of `outer` when none is named.

    Server and process are those of `outer`.
    """
    found: dict[str, int] = {}
    for name, number in _RANK.findall(text.replace("_", " ")):
        found.setdefault(name.lower(), int(number))
    if not found:
        return outer
    dp, pp, tp, ep = (found.get(name) for name in ("dp", "pp", "tp", "ep"))
    return Rank(dp, pp, tp, ep, server=outer.server, process=outer.process)


class Prefixes:
    """Finds where the words begin, remembering what it has seen: a log has few different prefixes.

    Args:
        says: whether a text begins with words of a server, which are never a prefix.
    """

    def __init__(self, says: Callable[[str], bool]) -> None:
        self._says = says
        self._plain: dict[str, Rank] = {}
        # What stands before the bracket: the rank that it names, and by the bracket's inside the rank of the line.
        self._outer: dict[tuple[bool, str], tuple[Rank, dict[str, Rank]] | None] = {}
        self._learned: dict[str, Rank] = {}
        # Whether a line was understood without a learned name, and names that stood on one line since.
        self._understood = False
        self._once: set[str] = set()

    def plain(self, inside: str) -> Rank:
        """The rank of `[2026-08-27 00:00:52 TP0] ` by what follows the time there."""
        return self._remembered(self._plain, inside, NO_RANK)

    def _remembered(self, known: dict[str, Rank], inside: str, outer: Rank) -> Rank:
        rank = known.get(inside)
        if rank is None:
            rank = rank_in(inside, outer)
            if len(known) < _MOST_CACHED:
                known[inside] = rank
        return rank

    def strip(self, line: str, carried: Rank = NO_RANK) -> tuple[int, Rank]:
        """Where the words of `line` begin, and the rank before them. `carried` is whose line it is if none is named."""
        time = _TIME.match(line)
        begin = time.end() if time else 0
        inner = line.find("[20", begin, begin + _FARTHEST)
        end = line.find("] ", inner + 20, inner + 160) if inner >= 0 else -1
        if end < 0:
            return self._strip(line, begin, carried)
        # [2026-08-27 00:00:52 TP0] is all that changes from line to line behind the name of a container or actor.
        inside, name = line[inner + 20 : end], line[begin:inner]
        if not name.strip():
            return end + 2, self.plain(inside) if carried is NO_RANK else rank_in(inside, carried)
        key = (begin > 0, name)
        if key in self._outer:
            known = self._outer[key]
        else:
            waiting = len(self._once)
            known = self._before_bracket(line[:inner], begin)
            if len(self._outer) < _MOST_CACHED and len(self._once) == waiting:
                self._outer[key] = known
        if known is None:
            return self._strip(line, begin, carried)
        rank = self._remembered(known[1], inside, known[0])
        if carried.server and not rank.server:
            rank = replace(rank, server=carried.server, process=rank.process or carried.process)
        return end + 2, rank

    def strip_behind(self, words: str, outer: Rank) -> tuple[int, Rank]:
        """The same behind a server's own bracket: nothing is learned there, for one more may be what somebody typed."""
        time = _TIME.match(words)
        return self._strip(words, time.end() if time else 0, outer)

    def _before_bracket(self, outer: str, begin: int) -> tuple[Rank, dict[str, Rank]] | None:
        """What `outer`, which stands before a server's bracket, names; a name that is not known is learned."""
        at, rank = self._strip(outer, begin, NO_RANK)
        if at < len(outer):
            name, server = self._unknown(outer, at, rank.server)
            if not name or not self._is_a_prefix(name):
                return None
            if len(self._learned) < _MOST_LEARNED and (any(map(str.isalpha, name)) or not any(map(str.isdigit, name))):
                self._learned[name] = Rank(server=server)
            at, rank = len(outer), replace(rank, server=server)
        elif not any(name in outer for name in self._learned):
            self._understood = True
        return rank, {}

    def _unknown(self, outer: str, at: int, server: str) -> tuple[str, str]:
        """A name that begins at `at` and the server that it stands for, empty when what stands there is no name.

        A pod and its container are on each of their lines. Two words that were printed before one line are not them.
        """
        named = _POD_AND_CONTAINER.match(outer, at) or _STREAM.match(outer, at)
        if named is not None and self._strip(outer, named.end(), NO_RANK)[0] == len(outer):
            pod = named[0].split(" ", 1)[0]
            of_cluster = not (self._plain or self._understood) or any(sign.isdigit() or sign == "-" for sign in pod)
            if server or of_cluster:
                return named[0], server or named[0].strip().replace(" › ", " ")
        name = outer[at:]
        return (name, server) if _UNKNOWN.fullmatch(name) and _is_a_name(name) else ("", server)

    def _is_a_prefix(self, name: str) -> bool:
        """Whether `name` stands before lines, and was not printed before one: lines came without it, it came once."""
        if self._says(name):
            return False
        if name in self._once or not (self._plain or self._understood):
            return True
        if len(self._once) < _MOST_CACHED:
            self._once.add(name)
        return False

    def _strip(self, line: str, begin: int, carried: Rank) -> tuple[int, Rank]:
        at, named, server, worker, process = begin, "", "", "", ""
        if begin and (host := _HOST.match(line, begin)):
            at = host.end()
            server = f"{host['host']} {host['tag'] or host['app']}"
            process = f"pid {host['pid'] or host['proc']}"
        elif line[:begin].lstrip("<0123456789>")[:1].isalpha() and (host := _HOST_ALONE.match(line, begin)):
            at, server = host.end(), f"{host['host']} {host['tag']}"
        for _ in range(_MOST_PREFIXES):
            match = _PART.match(line, at) or _TIME.match(line, at)
            if match is None or match.end() == at:
                learned = next((name for name in self._learned if line.startswith(name, at)), None)
                if learned is None:
                    break
                at, server = at + len(learned), server or self._learned[learned].server
                continue
            at = match.end()
            kind = match.lastgroup
            if kind == "bracket":
                inside = match["bracket"]
                if inside.startswith(_POD):
                    server = f"{server} {inside}".lstrip()
                elif whole := _GLOBAL_RANK.match(inside):
                    worker = f"rank {whole[1]}"
                elif inside.startswith("pid "):
                    process = process or inside
                else:
                    # The first 20 characters are a time stamp, which would make every prefix a new one.
                    named = named or _ranks_only(inside)
            elif kind in ("pid", "ip"):
                actor = match["actor"] or ""
                named = named or _ranks_only(actor)
                worker = worker if actor.startswith((*_OF_ENGINE, _REPLICA)) else f"pid {match['pid']}"
                if not _OF_VLLM.match(actor):
                    process = process or " ".join(filter(None, (actor, f"pid {match['pid']}", match["ip"])))
            elif kind in ("name", "ranks"):
                named = named or _ranks_only(match[kind])
            elif kind in ("task", "process"):
                process = process or f"task {match[kind]}"
            elif kind == "service":
                task = _SWARM_TASK.match(match["service"]) if "@" in match[0] else None
                server = f"{server} {task[1] if task else match['service']}".lstrip()
        if not (server or worker or process or named):
            return at, carried
        if not server and not process:
            server, process = carried.server, carried.process
        return at, rank_in(named, replace(carried, worker=worker or carried.worker, server=server, process=process))


def _is_a_name(words: str) -> bool:
    """Whether what stands before a bracket may be a prefix: it is short, and no exception's last line."""
    return len(words.split()) < 6 and not any(map(is_exception, words.split()))


def _ranks_only(text: str) -> str:
    return " ".join(name + number for name, number in _RANK.findall(text.replace("_", " ")))
