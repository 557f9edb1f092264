"""Whose error a line without a rank is, in logs of many ranks."""

from __future__ import annotations

import sys

import pytest

from tests.server_lines import DECODE, POOLS, PREFILL_END, READY, arguments, limits, prefill_begin
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.fold import read_log

BAR = "Capturing num tokens (num_tokens={} avail_mem=9.00 GB):   {}%|          | {}/58 [00:01<00:12,  3.11it/s]\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {} has a total capacity of 79.25 GiB "
    "of which 100.00 MiB is free.\n"
)


def of_rank(text: str, rank: str) -> str:
    return text.replace("00:00:00] ", f"00:00:00 {rank}] ")


def in_capture(*ranks: str) -> str:
    return "".join(of_rank(POOLS + prefill_begin(), rank) for rank in ranks)


FOUR = in_capture("TP0", "TP1", "TP2", "TP3")


@pytest.mark.parametrize(
    ("given", "card", "rank"),
    [
        ({}, 1, "TP1"),
        ({"base_gpu_id": 1}, 1, "TP0"),
        ({"base_gpu_id": 1}, 4, "TP3"),
        ({"base_gpu_id": 4}, 6, "TP2"),
        ({"gpu_id_step": 2}, 2, "TP1"),
        ({"base_gpu_id": 1, "gpu_id_step": 2}, 5, "TP2"),
    ],
)
def test_a_card_is_of_the_rank_that_the_arguments_put_on_it(given: dict[str, int], card: int, rank: str) -> None:
    """`base_gpu_id` is the card of TP0, and each next rank's is `gpu_id_step` on."""
    (found,) = diagnose(arguments(tp_size=4, **given) + FOUR + OOM.format(card)).findings
    assert (found.code, found.ranks) == ("OOM_IN_CAPTURE", (rank,))


@pytest.mark.parametrize(("given", "card"), [({"base_gpu_id": 4}, 2), ({"gpu_id_step": 2}, 3), ({"base_gpu_id": 1}, 5)])
def test_a_card_that_the_arguments_give_to_no_rank_names_none(given: dict[str, int], card: int) -> None:
    text = arguments(tp_size=4, **given) + FOUR + BAR.format(8192, 0, 0) + OOM.format(card)
    (found,) = diagnose(text).findings
    assert (found.code, found.ranks) == ("OOM_IN_CAPTURE", ("TP0",))  # the one that draws the bars


def test_a_rank_tells_by_its_own_bar_where_it_ran_out() -> None:
    text = arguments(tp_size=4, base_gpu_id=1) + FOUR + BAR.format(8192, 0, 0) + BAR.format(7680, 1, 1) + OOM.format(1)
    (found,) = diagnose(text).findings
    assert "at the bucket of 7680 tokens (number 2 of 58, largest first) with 9.00 GiB free before it" in found.message


LINES = {
    "memory": OOM.format(1),
    "memory of a numbered rank": "[rank7]: " + OOM.format(1),
    "errors": "ValueError: x\n",
    "errors of a numbered rank": "[rank7]: ValueError: x\n",
    "bars": BAR.format(8192, 0, 0),
    "ends and bars": "Received sigquit from a child process.\n" + BAR.format(8192, 0, 0),
    "failures": "Exception: Capture prefill CUDA graph failed: nvcc not found\n",
}
FEW, MANY, TIMES = 20, 200, 300


@pytest.mark.parametrize("kind", LINES)
def test_a_line_without_a_rank_costs_the_same_with_many_ranks(kind: str) -> None:
    """Counted in steps of Python, not in seconds: the machine may be busy."""
    few, many = (_steps_of(in_capture(*(f"TP{one}" for one in range(count))), LINES[kind]) for count in (FEW, MANY))
    assert many < 1.5 * few + MANY * 50, f"{kind}: {few:,} steps with {FEW} ranks, {many:,} with {MANY}"


def _steps_of(ranks: str, line: str) -> int:
    """What the lines alone take, behind those of the ranks."""
    return _steps(ranks + line * TIMES) - _steps(ranks)


def _steps(text: str) -> int:
    steps, before = 0, sys.gettrace()

    def count(*_: object) -> object:
        nonlocal steps
        steps += 1
        return count

    sys.settrace(count)  # type: ignore[arg-type]
    try:
        read_log(text.encode())
    finally:
        sys.settrace(before)
    return steps


def up_beside(words: str) -> str:
    """DP0 is up while DP1 captures its prefill graph, in which something goes wrong."""
    up = of_rank(PREFILL_END + DECODE + limits(), "DP0")
    return arguments(dp_size=2) + in_capture("DP0", "DP1") + up + words


HEAD = "[2026-08-27 00:00:00 DP1] Scheduler hit an exception: Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (OOM.format(0), "OOM_IN_CAPTURE"),
        (HEAD + OOM.format(0), "OOM_IN_CAPTURE"),
        ("RuntimeError: Capture prefill CUDA graph failed: nvcc not found\n", "NOT_A_MEMORY_FAILURE"),
        (HEAD + "AssertionError: numel mismatch\n", "NOT_A_MEMORY_FAILURE"),
    ],
)
def test_an_engine_that_is_up_hides_no_failure_of_the_next_ones_capture(words: str, code: str) -> None:
    found = diagnose(up_beside(words))
    assert [(one.code, one.severity, one.ranks) for one in found.findings if one.severity == "error"] == [
        (code, "error", ("DP1",))
    ]
    (broken,) = (each for each in found.captures if each.rank == "DP1")
    assert broken.outcome == ("oom" if code == "OOM_IN_CAPTURE" else "failed")


CLEAN = arguments() + POOLS + prefill_begin() + PREFILL_END + DECODE + limits() + READY
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "bench.py", line 3, in <module>',
    "requests.exceptions.ConnectionError: refused",
)


def named(text: str, name: str) -> str:
    return "".join(f"{name}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("server", "other"),
    [
        ("sglang-1  | ", "bench-1  | "),
        ("Aug 27 00:00:00 gpu1 sglang[9]: ", "Aug 27 00:00:01 gpu1 cron[3]: "),
        ("[pod/sglang-0/main] ", "[pod/bench-0/main] "),
    ],
)
@pytest.mark.parametrize(
    "words", ["\n".join(TRACEBACK), "RuntimeError: nope", "KeyboardInterrupt", OOM.format(0).strip(), TRACEBACK[0]]
)
@pytest.mark.parametrize("first", [True, False])
def test_another_program_beside_a_server_is_no_start_of_one(server: str, other: str, words: str, first: bool) -> None:
    said, errors = named(CLEAN, server), named(words, other)
    found = diagnose(errors + said if first else said + errors)
    assert found.findings == () and [one.index for one in found.startups] == [0]
    assert found.summary == diagnose(said).summary


def test_a_second_server_that_only_says_how_it_died_is_one() -> None:
    text = named(CLEAN, "a-1  | ") + named("Received sigquit from a child process.", "b-1  | ")
    assert [one.code for one in diagnose(text).findings] == ["SERVER_FAILED"]
