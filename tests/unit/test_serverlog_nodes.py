"""One server on several machines, whose nodes write into one file. Each prints its arguments (SGLang's launcher)."""

from __future__ import annotations

import re

import pytest
from server_lines import DECODE, POOLS, PREFILL_END, READY, arguments, limits, prefill_begin

from toolkit.serverlogs import diagnose
from toolkit.serverlogs.fold import read_log
from toolkit.serverlogs.startup import Startup

BODY = POOLS + prefill_begin() + PREFILL_END + DECODE
TWO = arguments(tp_size=4, nnodes=2, dist_init_addr="10.0.0.1:5000")
PREFIXES = (
    ("0: ", "1: "),
    ("[1,0]<stdout>:", "[1,1]<stdout>:"),
    ("(SGLangEngine pid=11, ip=10.0.0.1) ", "(SGLangEngine pid=12, ip=10.0.0.2) "),
    ("Aug 27 00:00:00 gpu1 sglang[1]: ", "Aug 27 00:00:00 gpu2 sglang[1]: "),
    ("leader-0  | ", "worker-0  | "),
    ("node0: ", "node1: "),
)


def of_rank(text: str, rank: int) -> str:
    return re.sub(r"(?m)^(\[[^\]]*)\]", rf"\1 TP{rank}]", text)


def beside(*texts: str) -> str:
    queues = [text.splitlines(keepends=True) for text in texts]
    longest = max(map(len, queues))
    return "".join(queue[at] for at in range(longest) for queue in queues if at < len(queue))


def node(ranks: tuple[int, int], prefix: str, start: str = TWO, body: str = BODY) -> str:
    last = of_rank(limits(), 0) + READY if 0 in ranks and body.endswith(DECODE) else ""
    text = start + beside(*(of_rank(body, rank) for rank in ranks)) + last
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def starts(text: str) -> list[Startup]:
    return read_log(text.encode()).startups


def labels(startup: Startup) -> list[str]:
    return [log.rank.label for log in startup.sorted_ranks]


@pytest.mark.parametrize(("first", "second"), PREFIXES)
def test_the_nodes_of_a_server_are_one_server(first: str, second: str) -> None:
    text = beside(node((0, 1), first), node((2, 3), second))
    (startup,) = starts(text)
    assert (labels(startup), startup.index) == (["TP0", "TP1", "TP2", "TP3"], 0)
    assert diagnose(text).findings == ()


def test_files_of_nodes_one_behind_another_are_one_server() -> None:
    (startup,) = starts(node((0, 1), "0: ") + node((2, 3), "1: "))
    assert (len(startup.ranks), startup.ready is not None) == (4, True)


def test_the_ranks_of_all_nodes_are_compared() -> None:
    less = BODY.replace("12.00", "3.00")
    text = beside(node((0, 1), "0: "), node((2, 3), "1: ", body=less))
    (found,) = diagnose(text).findings
    assert found.code == "RANK_SKEW"
    assert "3.00 to 12.00" in found.message


def test_each_start_of_a_server_has_its_own_nodes() -> None:
    text = beside(node((0, 1), "0: "), node((2, 3), "1: "))
    assert [(labels(each), each.index) for each in starts(text * 2)] == [
        (["TP0", "TP1", "TP2", "TP3"], 0),
        (["TP0", "TP1", "TP2", "TP3"], 1),
    ]


def test_two_servers_of_two_nodes_are_two() -> None:
    other = TWO.replace("10.0.0.1:5000", "10.0.0.3:5000")
    nodes = (((0, 1), TWO), ((0, 1), other), ((2, 3), other), ((2, 3), TWO))
    found = starts(beside(*(node(ranks, f"{task}: ", start) for task, (ranks, start) in enumerate(nodes))))
    assert [(each.server, labels(each)) for each in found] == [
        ("task 0", ["TP0", "TP1", "TP2", "TP3"]),
        ("task 1", ["TP0", "TP1", "TP2", "TP3"]),
    ]


@pytest.mark.parametrize("start", [TWO, arguments(tp_size=2, nnodes=1), arguments(tp_size=2)])
def test_replicas_whose_ranks_overlap_are_two_servers(start: str) -> None:
    found = starts(beside(node((0, 1), "0: ", start), node((0, 1), "1: ", start)))
    assert [labels(each) for each in found] == [["TP0", "TP1"]] * 2


def test_ranks_that_one_server_has_no_room_for_are_of_another() -> None:
    start = arguments(tp_size=2, nnodes=1)
    assert len(starts(beside(node((0, 1), "0: ", start), node((2, 3), "1: ", start)))) == 2


def test_memory_that_ran_out_on_the_second_node_is_its_own() -> None:
    begun = POOLS + prefill_begin()
    oom = "1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    text = beside(node((0, 1), "0: ", body=begun), node((2, 3), "1: ", body=begun)) + oom
    (startup,) = starts(text)
    (short,) = [each.rank.label for each in startup.captures if each.oom is not None]
    assert short in ("TP2", "TP3")
