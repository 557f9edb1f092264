"""One `Prefill batch` line of an SGLang server's log, as numbers.

The line in SGLang 0.5.15 to 0.5.23 (public releases, read from their source):

    [2026-08-27 00:00:52 DP0 TP0] Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00,
    #running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: True, input throughput (token/s): 3.50

An iteration number may follow `batch` in brackets. Hybrid models write `full token usage` and `swa token usage` or
`mamba usage`, disaggregated prefill adds `#bootstrap-req` and `#inflight-req`, 0.5.21 and later `#replay-token`;
off CUDA the label is `cpu graph`, `npu graph` or `musa graph`. Older builds write `Prefill batch.` and no graph.
Fields are therefore read by name, in any order, and those that are not known are passed over. Some formatters write
thousands separators (`#new-token: 1,234`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARK = "Prefill batch"
# Both have bounded repetition and nothing nested, so that matching stays linear whatever the line holds.
_HEAD = re.compile(r"Prefill batch(?: ?\[(\d{1,18})\])?[,.] ")
_NUMBER = re.compile(r"(-?(?:\d{1,3}(?:,\d{3}){1,5}|\d{1,18})(?:\.\d{1,18})?)(?![\w.]|,\d)")
_RANK = re.compile(r"(?<!\w)(?:DP|PP|CP|TP|EP)\d{1,6}(?!\w)")
_GRAPH = " graph"


@dataclass(frozen=True)
class PrefillBatch:
    """One prefill as the scheduler reported it. None is a field that the line does not have.

    Attributes:
        new_seq: requests in the batch.
        new_token: tokens to compute, the number that picks the bucket. SGLang 0.5.15 to 0.5.19 sum lengths rounded
            up to a KV page here, 0.5.20 and later exact ones.
        cached_token: tokens found in the prefix cache.
        graph: whether a graph was replayed (True) or the batch ran eager (False).
        graph_kind: whose graph, for example `cuda`, `cpu`, `npu`, `musa`.
        iteration: number of the scheduler's iteration.
        token_usage: share of the KV pool in use, 0 to 1; of the full-attention pool for hybrid models.
        running_req: requests that decode at the same time.
        queue_req: requests that wait.
        pending_token: tokens that wait to be prefilled.
        input_throughput: tokens a second, as printed.
        rank: ranks named in the line's prefix, for example `DP0 TP1`; empty when none is.
    """

    new_seq: int
    new_token: int
    cached_token: int | None = None
    graph: bool | None = None
    graph_kind: str | None = None
    iteration: int | None = None
    token_usage: float | None = None
    running_req: int | None = None
    queue_req: int | None = None
    pending_token: int | None = None
    input_throughput: float | None = None
    rank: str = ""


def parse_prefill_batch(line: str) -> PrefillBatch | None:
    """The prefill batch of one log line, or None when the line is not one, or is cut before its token count.

    Takes time linear in the line's length, whatever the line holds.
    """
    start = line.find(_MARK)
    head = _HEAD.match(line, start) if start >= 0 else None
    if head is None:
        return None
    fields = _fields(line[head.end() :])
    new_seq, new_token = _count(fields, "#new-seq"), _count(fields, "#new-token")
    # A line that is cut inside a number would give a wrong one: it must be followed by another field.
    if new_seq is None or new_token is None or next(reversed(fields)) == "#new-token":
        return None
    kind = next((name[: -len(_GRAPH)] for name in fields if name.endswith(_GRAPH)), None)
    usage = _number(fields, "token usage")
    return PrefillBatch(
        new_seq=new_seq,
        new_token=new_token,
        cached_token=_count(fields, "#cached-token"),
        graph=None if kind is None else {"True": True, "False": False}.get(fields[kind + _GRAPH][:5].rstrip(",. ")),
        graph_kind=kind,
        iteration=int(head[1]) if head[1] else None,
        token_usage=usage if usage is not None else _number(fields, "full token usage"),
        running_req=_count(fields, "#running-req"),
        queue_req=_count(fields, "#queue-req"),
        pending_token=_count(fields, "#pending-token"),
        input_throughput=_number(fields, "input throughput (token/s)"),
        rank=" ".join(_RANK.findall(line[:start][-200:])),
    )


def _fields(text: str) -> dict[str, str]:
    """`name: value` pairs in the order written; of a name written twice, the first."""
    found: dict[str, str] = {}
    for part in text.split(", "):
        name, colon, value = part.partition(": ")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _number(fields: dict[str, str], name: str) -> float | None:
    match = _NUMBER.match(fields.get(name, ""))
    return float(match[1].replace(",", "")) if match else None


def _count(fields: dict[str, str], name: str) -> int | None:
    match = _NUMBER.match(fields.get(name, ""))
    digits = match[1].replace(",", "") if match else ""
    return int(digits) if digits.isascii() and digits.isdigit() else None
