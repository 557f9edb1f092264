"""How fast a log is read: a million lines of a serving day behind one start-up. Asserts counts, prints speed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from toolkit.serverlogs.fold import read_log

LINES = 1_000_000
START = """[2026-08-27 00:00:02] Load weight begin. avail mem=78.48 GB
[2026-08-27 00:00:14] Load weight end. elapsed=12.02 s, type=LlamaForCausalLM, avail mem=49.33 GB, mem usage=29.15 GB.
[2026-08-27 00:00:15] Memory pool end. avail mem=12.70 GB
[2026-08-27 00:00:16] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], avail mem=12.59 GB
[2026-08-27 00:00:39] Capture target prefill CUDA graph end. elapsed=2.96 s, mem usage=1.71 GB, avail mem=10.88 GB.
[2026-08-27 00:00:53] The server is fired up and ready to roll!
"""


def serving_lines(count: int) -> Iterator[tuple[str, str]]:
    """(kind, line): what a busy server writes, in the shares of a chat workload."""
    dice = random.Random(0)
    for index in range(count):
        stamp = f"[2026-08-27 {index // 3600 % 24:02}:{index // 60 % 60:02}:{index % 60:02} TP0]"
        kind = dice.choices(("decode", "prefill", "request", "other"), (45, 25, 28, 2))[0]
        if kind == "decode":
            running, tokens = dice.randrange(1, 256), dice.randrange(10, 400_000)
            yield (
                kind,
                f"{stamp} Decode batch, #running-req: {running}, #token: {tokens}, token usage: 0.37, "
                f"cuda graph: True, gen throughput (token/s): {dice.random() * 9000:.2f}, #queue-req: 0",
            )
        elif kind == "prefill":
            new = dice.randrange(1, 8192)
            yield (
                kind,
                f"{stamp} Prefill batch, #new-seq: 2, #new-token: {new}, #cached-token: {dice.randrange(9000)}, "
                f"token usage: 0.37, #running-req: 40, #queue-req: 0, #pending-token: 0, "
                f"cuda graph: {new > 1}, input throughput (token/s): {dice.random() * 90000:.2f}",
            )
        elif kind == "request":
            yield (
                kind,
                f'{stamp[:20]}] INFO:     10.0.0.7:{40000 + index % 9999} - "POST /v1/completions HTTP/1.1" 200 OK',
            )
        else:
            yield kind, f"{stamp} A line of some plug-in that nobody here has heard of, number {index}"


@pytest.fixture(scope="module")
def day() -> tuple[bytes, dict[str, int]]:
    kinds: dict[str, int] = {}
    written = [START]
    for kind, line in serving_lines(LINES):
        kinds[kind] = kinds.get(kind, 0) + 1
        written.append(line + "\n")
    return "".join(written).encode(), kinds


def test_a_million_lines(day: tuple[bytes, dict[str, int]], capsys: pytest.CaptureFixture[str]) -> None:
    data, kinds = day
    begin = time.process_time()
    log = read_log(data)
    seconds = time.process_time() - begin
    with capsys.disabled():
        print(
            f"\n{log.counters.lines:,} lines, {len(data) / 2**20:.0f} MiB in {seconds:.2f} s of one core: "
            f"{log.counters.lines / seconds:,.0f} lines a second"
        )
    (startup,) = log.startups
    assert log.counters.lines == LINES + START.count("\n")
    assert startup.prefills.batches == kinds["prefill"]
    assert log.counters.unknown == kinds["other"]
    assert log.counters.ignored == kinds["decode"] + kinds["request"]
    assert [capture.outcome for capture in startup.captures] == ["captured"]
