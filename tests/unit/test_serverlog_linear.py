"""No line, however it is made, costs more than time in proportion to its length.

Four times the text may take four times as long; sixteen times is what a pattern that backtracks would need. A pattern
that does so takes far longer than `TOO_SHORT_S` for `LONG` characters; what is faster needs no comparison.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterable

import pytest

import toolkit.serverlogs as room
from toolkit.serverlogs.fold import read_log

SHORT, LONG = 2_000, 8_000
MOST_TIMES, TOO_SHORT_S, SLACK_S = 10, 0.02, 0.01
# What our patterns repeat, and what they look for: each alone, and each behind a start that a pattern accepts.
ATOMS = (
    *(
        "0",
        "1,",
        "1.",
        "-1 ",
        "9:",
        "a",
        "a.",
        "A_",
        "_",
        "TP0 ",
        "DP1_",
        " ",
        "\t",
        "(",
        ")",
        "[",
        "]",
        "[]",
        "|",
        "| ",
    ),
    *(
        "█",
        "%|",
        "<",
        ">",
        "=",
        "a=1.0, ",
        "'",
        '"',
        "\\",
        "Error",
        "aError.",
        "\x1b[",
        "\x1b]",
        ";",
        "pod-1 ",
        "a 1 GiB ",
    ),
    *(
        "PIECEWISE=1 ",
        "Capturing num tokens (",
        "Capturing batches (bs=1): 1%|",
        "2026-08-27 00:00:00 ",
        "Aug 27 00:00:00 a b[1]: ",
        "INFO: ",
        "(a pid=1) ",
        "a/",
        "a.b ",
        '{"log":',
        "[2026-08-27 ",
    ),
)
STARTS = (
    "",
    "(",
    "[",
    "(Worker",
    "{",
    "Aug 27 00:00:00 ",
    "[2026-08-27 00:00:00",
    "\x1b[",
    "\x1b]",
    "'",
    ": 10%|",
    "Capture target prefill CUDA graph begin. ",
    "Capturing num tokens (num_tokens=",
    "Capturing num tokens (num_tokens=8): 10%|",
    "Prefill batch [",
    "Prefill batch, #new-seq: ",
    "server_args=ServerArgs(model_path='",
    "server_args=ServerArgs(cuda_graph_config=CudaGraphConfig(prefill=PhaseConfig(bs=[",
    "Engine startup timings (s): ",
    "Load weight end. elapsed=",
    "KV Cache is allocated. #tokens: ",
    "torch.OutOfMemoryError: Tried to allocate ",
    "Free memory on device (",
    "CUDA graph pool memory: ",
    "Profiling CUDA graph memory: ",
    "Disable prefill CUDA graph because ",
)


def _patterns() -> dict[str, re.Pattern[str]]:
    found: dict[str, re.Pattern[str]] = {}
    for module in pkgutil.iter_modules(room.__path__):
        members = vars(importlib.import_module(f"{room.__name__}.{module.name}"))
        for name, value in members.items():
            for key, each in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(each, re.Pattern) and isinstance(each.pattern, str):
                    found[f"{module.name}.{name}{key}"] = each
    return found


PATTERNS = _patterns()


def test_the_patterns_were_found() -> None:
    assert {"bars._STATE", "prefixes._PART", "lines._ANSI", "sglang._CAPTURE"} <= set(PATTERNS)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_a_pattern_takes_time_in_proportion(name: str) -> None:
    pattern = PATTERNS[name]

    def use(text: str) -> None:
        pattern.match(text)
        for _ in pattern.finditer(text):
            pass

    words = re.match(r"[A-Za-z ]*", pattern.pattern)
    literal = words[0][:3] if words else ""
    _check(use, name, [start for start in STARTS if len(start) < 4 or (literal and start.startswith(literal))])


def test_reading_takes_time_in_proportion() -> None:
    _check(lambda text: read_log(text.encode()), "read_log", STARTS)


def test_a_pattern_that_backtracks_would_be_found() -> None:
    with pytest.raises(AssertionError, match="many"):
        _check(re.compile(r"[^;]*,;").search, "a bad one", ("",))


def _check(use: Callable[[str], object], name: str, starts: Iterable[str]) -> None:
    for start in starts:
        for atom in ATOMS:
            short, long = (start + atom * (size // len(atom)) for size in (SHORT, LONG))
            if _seconds(use, long, 1) < TOO_SHORT_S:
                continue
            few, many = _seconds(use, short, 5), _seconds(use, long, 5)
            assert many < MOST_TIMES * few + SLACK_S, f"{name} on {start!r} and many {atom!r}: {few:.4f}, {many:.4f} s"


def _seconds(use: Callable[[str], object], text: str, runs: int) -> float:
    best = float("inf")
    for _ in range(runs):
        begin = time.process_time()
        use(text)
        best = min(best, time.process_time() - begin)
    return best
