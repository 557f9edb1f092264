"""A failure that a server outlives is no end of it; one that nothing follows is."""

from __future__ import annotations

import pytest

from tests.server_lines import DECODE, POOLS, PREFILL_END, READY, arguments, batch, limits, line, prefill_begin
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.diagnosis import Diagnosis

BAR = "Capturing num tokens (num_tokens={} avail_mem=9.00 GB):   {}%|          | {}/58 [00:01<00:12,  3.11it/s]\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB "
    "of which 100.00 MiB is free.\n"
)
HEAD = line("Scheduler hit an exception: Traceback (most recent call last):")
DIED = line("Received sigquit from a child process. It usually means the child failed.")
FAILED = "Exception: Capture prefill CUDA graph failed: nvcc not found\n"
B = batch(5000, True)
BEFORE = arguments() + POOLS
UP = PREFILL_END + DECODE + limits() + READY


def of_rank(text: str, rank: str) -> str:
    return text.replace("00:00:00] ", f"00:00:00 {rank}] ")


def said(found: Diagnosis) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in found.findings]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (BEFORE + OOM + prefill_begin() + UP + B, "OOM_BEFORE_CAPTURE"),
        (BEFORE + prefill_begin() + OOM + UP + B, "OOM_IN_CAPTURE"),
        (BEFORE + prefill_begin() + OOM + UP, "OOM_IN_CAPTURE"),
        (BEFORE + prefill_begin() + BAR.format(8192, 0, 0) + OOM + BAR.format(7680, 1, 1) + UP, "OOM_IN_CAPTURE"),
        (BEFORE + prefill_begin() + PREFILL_END + OOM + DECODE + limits() + READY, "OOM_AFTER_CAPTURE"),
        (BEFORE + prefill_begin() + FAILED + UP, "NOT_A_MEMORY_FAILURE"),
    ],
)
def test_what_a_start_up_caught_is_only_told(text: str, code: str) -> None:
    found = diagnose(text)
    assert said(found) == [(code, "info")] and len(found.startups) == 1
    assert found.summary.endswith("; nothing wrong")
    assert [each.outcome for each in found.captures] == ["captured", "captured"]
    assert "It was caught" in found.findings[0].message


@pytest.mark.parametrize(("failure", "code"), [(OOM, "OOM_IN_CAPTURE"), (FAILED, "NOT_A_MEMORY_FAILURE")])
def test_a_server_that_goes_on_without_a_graph_is_warned_of(failure: str, code: str) -> None:
    found = diagnose(BEFORE + prefill_begin() + failure + DECODE + limits() + READY)
    assert said(found) == [(code, "warning")]
    assert found.captures[0].outcome in ("oom", "failed")
    assert "The server went on without that graph" in found.findings[0].message


def test_a_request_that_ran_out_while_serving_is_no_failed_start() -> None:
    found = diagnose(BEFORE + prefill_begin() + UP + B + OOM + B)
    assert said(found) == [("OOM_AFTER_CAPTURE", "warning")]
    assert found.summary.endswith("; 1 warning")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (BEFORE + OOM, "OOM_BEFORE_CAPTURE"),
        (BEFORE + prefill_begin() + OOM, "OOM_IN_CAPTURE"),
        (BEFORE + prefill_begin() + HEAD + OOM + DIED, "OOM_IN_CAPTURE"),
        (BEFORE + prefill_begin() + BAR.format(8192, 0, 0) + OOM + BAR.format(8192, 0, 0), "OOM_IN_CAPTURE"),
        (BEFORE + prefill_begin() + PREFILL_END + OOM, "OOM_AFTER_CAPTURE"),
        (BEFORE + prefill_begin() + UP + B + OOM, "OOM_AFTER_CAPTURE"),
        (BEFORE + prefill_begin() + UP + B + HEAD + OOM + DIED, "OOM_AFTER_CAPTURE"),
        (BEFORE + OOM + arguments() + POOLS + prefill_begin() + UP, "OOM_BEFORE_CAPTURE"),
    ],
)
def test_what_nothing_follows_is_an_end(text: str, code: str) -> None:
    found = diagnose(text)
    assert (code, "error") in said(found)
    assert found.summary.endswith("1 error")


def test_memory_that_ran_out_before_the_captures_is_not_said_to_have_after_them() -> None:
    """Whatever came later: the line of the error is before any capture's, and the scheduler said that it had failed."""
    found = diagnose(BEFORE + HEAD + OOM + prefill_begin() + PREFILL_END + DECODE + limits())
    codes = [one.code for one in found.findings]
    assert "OOM_BEFORE_CAPTURE" in codes and "OOM_AFTER_CAPTURE" not in codes


def test_memory_that_ran_out_is_told_wherever_the_log_begins() -> None:
    """No start-up is in these logs: of the first not even who wrote it, the second serves."""
    assert said(diagnose(OOM)) == [("SERVER_FAILED", "warning")]
    assert said(diagnose(HEAD + OOM + DIED)) == [("SERVER_FAILED", "error")]
    assert ("OOM_AFTER_CAPTURE", "error") in said(diagnose(B + OOM))


def two(text: str) -> str:
    return of_rank(text, "TP0") + of_rank(text, "TP1")


def test_what_one_rank_caught_another_ones_lines_do_not_show() -> None:
    """TP1 ran out by its own line; TP0 going on proves nothing about it."""
    text = (
        arguments(tp_size=2) + two(POOLS + prefill_begin()) + "[rank1]: " + OOM + of_rank(PREFILL_END + DECODE, "TP0")
    )
    found = diagnose(text)
    assert [(one.code, one.severity, one.ranks) for one in found.findings if one.severity != "info"] == [
        ("OOM_IN_CAPTURE", "error", ("TP1",))
    ]
    assert said(diagnose(text + of_rank(PREFILL_END + DECODE, "TP1") + limits() + READY)) == [
        ("OOM_IN_CAPTURE", "info")
    ]


def test_of_two_ranks_the_one_that_ended_its_capture_did_not_run_out() -> None:
    text = arguments(tp_size=2) + two(POOLS + prefill_begin()) + BAR.format(8192, 0, 0) + OOM
    found = diagnose(text + of_rank(PREFILL_END, "TP0"))
    assert [(one.code, one.severity, one.ranks) for one in found.findings if one.severity == "error"] == [
        ("OOM_IN_CAPTURE", "error", ("TP1",))
    ]
    caught = diagnose(text + two(PREFILL_END) + two(DECODE) + of_rank(limits(), "TP0") + READY)
    assert {one.severity for one in caught.findings} == {"info"} and caught.summary.endswith("nothing wrong")


def test_what_one_node_of_a_server_caught_is_told_of_the_server() -> None:
    def node(number: int, words: str) -> str:
        said = arguments(tp_size=2, nnodes=2) + of_rank(POOLS + prefill_begin() + words + PREFILL_END, f"TP{number}")
        return "".join(f"[pod/sglang-{number}/main] {each}\n" for each in said.splitlines())

    found = diagnose(node(0, "") + node(1, OOM))
    assert len(found.startups) == 1
    assert ("OOM_IN_CAPTURE", "info") in said(found) and not any(severity == "error" for _, severity in said(found))
