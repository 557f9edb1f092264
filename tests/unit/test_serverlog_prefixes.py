"""What may stand before a server's words, and lines that are none of ours."""

from __future__ import annotations

import pytest

from toolkit.serverlogs.events import NO_RANK, Event, Rank
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
        ('{"log":"', NO_RANK),
    ],
)
def test_what_stands_before_the_words_names_the_rank(prefix: str, rank: Rank) -> None:
    (event,) = events(prefix + WORDS)
    assert event.rank == rank


def test_parts_after_a_carriage_return_are_from_the_same_container() -> None:
    text = (
        "pod-a  | Compiling num tokens (num_tokens=4): 1%|| 1/9\rCapturing batches (bs=1): 1%|| 1/9\r"
        "[2026-01-01 00:00:00] " + WORDS
    )
    assert [event.rank.server for event in events(text)] == ["pod-a"] * 3


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
