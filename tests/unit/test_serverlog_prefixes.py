"""What may stand before a server's words, and lines that are none of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.serverlogs import failures, sglang, vllm
from toolkit.serverlogs.events import NO_RANK, Event, OutOfMemory, Rank
from toolkit.serverlogs.failures import Parser
from toolkit.serverlogs.lines import Counters
from toolkit.serverlogs.parse import parse


def events(text: str) -> list[Event]:
    return list(parse(text.encode()))


WORDS = "Memory pool end. avail mem=1.50 GB"


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("", NO_RANK),
        ("    ", NO_RANK),
        ("[2026-08-27 00:00:52] ", NO_RANK),
        ("[2026-08-27 00:00:52 TP3] ", Rank(tp=3)),
        ("[2026-08-27 00:00:52 DP1 PP2 TP3 EP4] ", Rank(1, 2, 3, 4)),
        ("[2026-08-27 00:00:52 TP3 PP2] ", Rank(pp=2, tp=3)),
        ("sglang-1  | [2026-08-27 00:00:52 TP3] ", Rank(tp=3, server="sglang-1")),
        ("[pod/server-0/main] [2026-08-27 00:00:52 TP3] ", Rank(tp=3, server="pod/server-0/main")),
        ("2026-08-27T00:00:52.123456789Z stderr F [2026-08-27 00:00:52 TP3] ", Rank(tp=3)),
        ("2026-08-27T00:00:52+02:00 [2026-08-27 00:00:52 TP3] ", Rank(tp=3)),
        ("(SGLangEngine pid=7, ip=10.0.0.1) [2026-08-27 00:00:52 DP0 TP3] ", Rank(dp=0, tp=3)),
        ("(SGLangEngine pid=7, ip=10.0.0.1) [2026-08-27 00:00:52] ", Rank(worker="pid 7")),
        ("(pid=776, ip=7.2.9.8) ", Rank(worker="pid 776")),
        ("[rank5]: ", Rank(worker="rank 5")),
        ("[2026-08-27 00:00:52 TP1] INFO: ", Rank(tp=1)),
        ("[2026-08-27 00:00:52 TP1] WARNING model_runner.py:123: ", Rank(tp=1)),
        ("2026-09-27T00:15:25.500Z 5ylyr21v-rhkt6 INFO TP2] ", Rank(tp=2)),
        ("Aug  7 00:00:52 gpu1 sglang[99]: [2026-08-27 00:00:52 TP3] ", Rank(tp=3, server="gpu1 sglang")),
        ("<30>Aug 27 00:00:52 gpu1 sglang: [2026-08-27 00:00:52 TP3] ", Rank(tp=3, server="gpu1 sglang")),
        ("2026-08-27T00:00:52+0000 gpu1 docker[991]: [2026-08-27 00:00:52] ", Rank(server="gpu1 docker")),
        ("Thu 2026-08-27 00:00:52 UTC gpu1 sglang.service[9]: ", Rank(server="gpu1 sglang.service")),
        ("<34>1 2026-08-27T00:00:52.003Z gpu1 app 123 ID47 - ", Rank(server="gpu1 app")),
        ("srv.1.k3j2@node1    | [2026-08-27 00:00:52 TP3] ", Rank(tp=3, server="srv.1")),
        ("[pod/server-0/main] web-1 | ", Rank(server="pod/server-0/main web-1")),
        ("sg-0 server [2026-08-27 00:00:52 TP3] ", Rank(tp=3, server="sg-0 server")),
        ("ecs/server/3f5c [2026-08-27 00:00:52 TP3] ", Rank(tp=3, server="ecs/server/3f5c")),
        ("0: [2026-08-27 00:00:52 TP3] ", Rank(tp=3)),
        ("12: ", NO_RANK),
        ("[1,0]<stdout>:[2026-08-27 00:00:52 TP3] ", Rank(tp=3)),
        ("[default0]:", NO_RANK),
        ("(ServeReplica:default:LLM pid=11) ", NO_RANK),
        ("(TpWorker(model=x) pid=3) ", Rank(worker="pid 3")),
        ("[2026-08-27 00:00:52] TP1 ", Rank(tp=1)),
        ("[2026-08-27 00:00:52] [TP1] ", Rank(tp=1)),
        ("[2026-08-27 00:00:52 EP1] ", Rank(ep=1)),
        ("[2026-08-27T00:00:52Z] [2026-08-27 00:00:52 TP1] ", Rank(tp=1)),
        ("2026-08-27 00:00:52,123 - INFO - ", NO_RANK),
        ("2026-08-27 00:00:52,123 INFO sglang.srt.model_runner: ", NO_RANK),
        ("INFO:sglang.srt:", NO_RANK),
        ('{"log":"', NO_RANK),
    ],
)
def test_what_stands_before_the_words_names_the_rank(prefix: str, rank: Rank) -> None:
    (event,) = events(prefix + WORDS)
    assert event.rank == rank


@pytest.mark.parametrize(
    ("rank", "label"),
    [
        (NO_RANK, "rank 0"),
        (Rank(tp=1, ep=3), "TP1"),
        (Rank(dp=0, pp=1, tp=2), "DP0 PP1 TP2"),
        (Rank(ep=1), "EP1"),
        (Rank(worker="pid 7"), "pid 7"),
    ],
)
def test_ranks_that_differ_are_called_differently(rank: Rank, label: str) -> None:
    assert rank.label == label


def test_parts_after_a_carriage_return_are_from_the_same_container() -> None:
    text = (
        "pod-a  | Compiling num tokens (num_tokens=4): 1%|| 1/9\rCapturing batches (bs=1): 1%|| 1/9\r"
        "[2026-01-01 00:00:00] " + WORDS
    )
    assert [event.rank.server for event in events(text)] == ["pod-a"] * 3


# --- lines without a bracket of the server ---------------------------------------------------------------------

SHAPES = (
    *("Aug 27 00:00:00 gpu1 sglang[99]: ", "2026-08-27T00:00:00.5+00:00 gpu1 sglang[99]: ", "srv.1.k3j2@node1    | "),
    *("0: ", "12: ", "sg-0 server ", "sg-0 › server ", "ecs/server/3f5c ", "(ServeReplica:default:LLM pid=11) "),
    *("[1,0]<stdout>:", "   12\t", "> ", "nobody knows this: ", "sglang    ", "08:00:01 | "),
)
LOGS = Path(__file__).resolve().parents[1] / "serverlogs"


@pytest.mark.parametrize("prefix", SHAPES)
@pytest.mark.parametrize(
    "name", ["sglang_oom_driver", "sglang_oom_second_bucket", "finding_server_failed", "sglang_clean"]
)
def test_a_prefix_before_every_line_loses_nothing(prefix: str, name: str) -> None:
    lines = (LOGS / f"{name}.log").read_text().splitlines()
    bare, behind = events("\n".join(lines)), events("\n".join(prefix + line for line in lines))
    assert [replace(event, rank=NO_RANK) for event in behind] == [replace(event, rank=NO_RANK) for event in bare]


def test_an_exception_behind_words_is_one_only_where_a_traceback_could_be() -> None:
    (found,) = events("who knows: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert isinstance(found, OutOfMemory)
    assert [type(event) for event in events("sg-0 server torch.OutOfMemoryError:")] == [OutOfMemory]
    words = "Ignore import error when loading sglang.srt.models.x: ModuleNotFoundError: No module named 'y'"
    assert events(words) == events("[2026-08-27 00:00:00 TP0] plug-in: " + words[-30:]) == []


def test_every_beginning_is_found_behind_a_prefix_that_is_not_known() -> None:
    for beginning, parser in _rules():
        for words in (beginning, f"{beginning} 1.00 GB, x"):
            if parser(words, 1, NO_RANK):
                assert events(f"who knows: {words}") == list(parser(words, 1, NO_RANK)), words


def _rules() -> Iterator[tuple[str, Parser]]:
    yield from (*sglang.RULES, *vllm.RULES, *failures.RULES)


def test_two_lines_that_were_written_into_one_are_two() -> None:
    first, second = (f"[2026-08-27 00:00:00 TP{rank}] {WORDS}" for rank in (0, 1))
    for text in (first + second, f"srv-1 | {first}{second}", f"[2026-08-27 00:00:00] Decode batch, x{first}{second}"):
        assert [event.rank.tp for event in events(text)] == [0, 1]
    quoted = f"[2026-08-27 00:00:00] Receive: obj=GenerateReqInput(text='{first}', x={second})"
    assert events(quoted) == events(f"[2026-08-27 00:00:00] said text='{second}'") == []


# --- what is not understood ---------------------------------------------------------------------------------


def test_lines_that_are_not_known_are_counted_and_not_guessed_at() -> None:
    counters = Counters()
    text = "\n".join(
        (
            "[2026-08-27 00:00:00 TP0] Capture the flag begin. avail mem=3.00 GB",
            "[2026-08-27 00:00:00 TP0] Receive: obj=GenerateReqInput(text='is Memory pool end. avail mem=1.00 GB bad')",
            "[2026-08-27 00:00:00 TP0] KV-cache is allocated somewhere",
            "[2026-08-27 00:00:00 TP0] Decode batch, #running-req: 1, #token: 84, cuda graph: True",
            '[2026-08-27 00:00:00] INFO:     127.0.0.1:54444 - "GET /model_info HTTP/1.1" 200 OK',
            "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:05<00:05,  5.41s/it]",
        )
    )
    assert list(parse(text, counters)) == []
    assert (counters.lines, counters.unknown, counters.ignored) == (6, 2, 4)


# --- words that were printed before a line ------------------------------------------------------------------------

AT = "[2026-08-27 00:00:00] "


@pytest.mark.parametrize("words", ["compiling kernels ", "pre-tune done ", "autotune 3 ", "done: "])
def test_words_before_one_line_name_no_server(words: str) -> None:
    found = events(f"{AT}Load weight begin. avail mem=9.00 GB\n{words}{AT}{WORDS}\n{AT}{WORDS}")
    assert [event.rank for event in found] == [NO_RANK] * 3


def test_a_pod_that_comes_later_is_a_server() -> None:
    found = events(f"{AT}{WORDS}\n" + f"sg-5d9f server {AT}{WORDS}\n" * 3)
    assert [event.rank.server for event in found][2:] == ["sg-5d9f server"] * 2
    assert [event.rank.server for event in events("".join(f"{pod} x {AT}{WORDS}\n" for pod in "ab"))] == ["a x", "b x"]


@pytest.mark.parametrize("first", ["", f"{AT}{WORDS}\n"])
def test_a_servers_own_words_are_never_a_prefix(first: str) -> None:
    memory = "CUDA out of memory. Tried to allocate 2.00 GiB."
    found = events(f"{first}{f'CUDA out of memory. {AT}foo' + chr(10)}" * 2 + memory)
    assert isinstance(found[-1], OutOfMemory)
    assert found[-1].message == memory
    bar = "Capturing num tokens (num_tokens=8 avail_mem=2.00 GB):   0%|   | 0/2 [00:00<?, ?it/s]"
    assert events(f"{first}Capturing num tokens {AT}foo\n{bar}")[-1:] == events(f"\n\n{bar}" if first else f"\n{bar}")


def test_actors_of_ray_that_are_called_like_workers_are_no_workers_of_vllm() -> None:
    for actor, process in (("WorkerDict", "WorkerDict pid 5"), ("Worker_TP0", ""), ("RayWorkerWrapper", "")):
        (event,) = events(f"({actor} pid=5) {AT}{WORDS}")
        assert event.rank.process == process
