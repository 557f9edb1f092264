"""What somebody typed is no event, wherever a server or a front end writes it down."""

from __future__ import annotations

import pytest
from server_lines import DECODE, POOLS, PREFILL_END, READY, arguments, batch, limits, line, prefill_begin

from toolkit.serverlogs import diagnose
from toolkit.serverlogs.events import OutOfMemory
from toolkit.serverlogs.parse import parse

CLEAN = arguments() + POOLS + prefill_begin() + PREFILL_END + DECODE + limits() + READY + batch(5000, graph=True)
QUIT = "Received sigquit from a child process. It usually means the child failed."
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
BEGIN = "[2026-08-27 00:00:00] Load weight begin. avail mem=10.00 GB"

TYPED = (
    line("user prompt: CUDA out of memory. Tried to allocate 20.00 MiB, what is that?"),
    line(f"tool call result: {QUIT}"),
    line(f"INFO: user said {OOM}"),
    line("lora: Load weight begin. avail mem=3.00 GB"),
    line(f"say | {QUIT}"),
    line(f"3: {QUIT}"),
    line(f'{{"text":"{OOM}"}}'),
    line(f'Request rejected: prompt "[2026-08-27 00:00:00] {QUIT}" is too long'),
    line(f"Prompt text is {BEGIN}"),
    f"prompt> Traceback (most recent call last):\nprompt>   File\nprompt> {OOM}\n",
    f"user said: {QUIT}\n",
    f'{{"role":"user","content":"{BEGIN}"}}\n',
    f'body: {{"role":"user","content":"{BEGIN}"}}\n',
    f'{{"text":"{OOM}"}}\n',
)


@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("before", ["", "sglang-1  | ", "Aug 27 00:00:00 gpu1 sglang[99]: ", "nobody knows this: "])
def test_what_somebody_typed_is_no_event(typed: str, before: str) -> None:
    text = CLEAN + typed + batch(5000, graph=True) * 3
    diagnosis = diagnose("".join(f"{before}{each}\n" for each in text.splitlines()))
    assert len(diagnosis.startups) == 1
    assert [finding.code for finding in diagnosis.findings if finding.severity != "info"] == []


@pytest.mark.parametrize("before", ["E   ", "prompt> ", "Process Process-1: "])
def test_a_traceback_behind_an_odd_prefix_counts_if_nothing_goes_on(before: str) -> None:
    trace = f"{before}Traceback (most recent call last):\n{before}  File x\n{before}{OOM}\n"
    step = line("Decode batch, #running-req: 1, #token: 84, cuda graph: True")
    for after, found in (("", 2), (line(QUIT), 3), (step, 0), (batch(5000, graph=True), 1)):
        known = list(parse(CLEAN.encode()))
        assert len(list(parse((CLEAN + trace + after).encode()))) - len(known) == found


@pytest.mark.parametrize("before", ["", "  | ", "    | ", "[rank0]: ", "sglang-1 | ", "ERROR:    "])
def test_an_exception_that_stands_alone_is_one(before: str) -> None:
    found = list(parse((CLEAN + before + OOM + "\n").encode()))
    assert type(found[-1]) is OutOfMemory
