"""Made-up start-ups, written down and read back; and what no log may do to the reader.

`SERVERLOG_EXAMPLES=2000` reads that many, instead of the number that keeps the suite quick.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from startup_logs import Look, logs, looks, make, shapes, summary, write
from startup_logs_vllm import summary as vllm_summary
from startup_logs_vllm import vllm_logs
from startup_stages import Shape

from toolkit.serverlogs.events import ErrorLine, OutOfMemory
from toolkit.serverlogs.fold import read_log
from toolkit.serverlogs.lines import Counters
from toolkit.serverlogs.parse import parse

EXAMPLES = int(os.environ.get("SERVERLOG_EXAMPLES", "150"))
quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
few = settings(max_examples=max(EXAMPLES // 5, 20), deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(logs())
def test_what_was_written_is_read(made: tuple[str, list[dict[str, object]]]) -> None:
    text, expected = made
    found = [summary(startup) for startup in read_log(text.encode()).startups]
    assert found == expected


@few
@given(
    st.tuples(shapes(), shapes()),
    st.sampled_from(("syslog", "swarm", "stern", "srun", "serve")),
    looks(),
    st.integers(0, 2**32 - 1),
)
def test_two_servers_that_write_into_one_file_are_read_apart(
    two: tuple[Shape, Shape], prefix: str, look: Look, seed: int
) -> None:
    look, dice = replace(look, prefix=prefix, noise=False), random.Random(seed)
    made = [make(replace(shape, arguments=True), look) for shape in two]
    queues = [write([each], look).splitlines(keepends=True) for each in made]
    first, second = ANOTHER[prefix]
    queues[1] = [line.replace(first, second) for line in queues[1]]
    text = ""
    while queues := [queue for queue in queues if queue]:
        text += _line_of(dice.choice(queues))
    found = [summary(startup) for startup in read_log(text.encode()).startups]
    expected = [each.expected for each in made]
    assert found in (expected, expected[::-1])


ANOTHER = {
    "syslog": ("gpu1", "gpu2"),
    "swarm": ("srv.1.k3j2x0@node-1", "srv.2.x8fd@node-2"),
    "stern": ("7d9f-x2x9z", "7d9f-a5b7c"),
    "srun": ("0: ", "1: "),
    "serve": ("pid=812", "pid=813"),
}


def _line_of(queue: list[str]) -> str:
    """The next line of a file: what a carriage return parts belongs together."""
    line = queue.pop(0)
    while queue and not line.endswith("\n"):
        line += queue.pop(0)
    return line


@quick
@given(vllm_logs())
def test_what_vllm_wrote_is_read(made: tuple[str, list[dict[str, object]]]) -> None:
    text, expected = made
    assert [vllm_summary(startup) for startup in read_log(text.encode()).startups] == expected


@few
@given(logs(), st.integers(0, 10**6))
def test_a_log_cut_between_lines_says_the_same_about_what_is_left(made: tuple[str, object], at: int) -> None:
    lines = made[0].splitlines(keepends=True)
    kept = at % (len(lines) + 1)
    whole = list(parse(made[0].encode()))
    number = "".join(lines[:kept]).count("\n")
    if number and kept and "\r" not in lines[kept - 1].rstrip("\r\n"):
        cut = list(parse("".join(lines[:kept]).encode()))
        assert cut == whole[: len(cut)]


@few
@given(logs(), st.integers(0, 10**6))
def test_a_log_cut_inside_a_line_gives_no_wrong_number(made: tuple[str, object], at: int) -> None:
    text = made[0].replace("\r\n", "\n")
    at %= len(text) + 1
    whole, cut = list(parse(text.encode())), list(parse(text[:at].encode()))
    last = text[:at].count("\n") + 1
    before = [event for event in cut if event.line < last]
    assert before == whole[: len(before)]
    of_line = [event for event in whole if event.line == last]
    for event in cut[len(before) :]:
        assert any(_says_no_more(event, known) for known in of_line), event


def _says_no_more(cut: object, whole: object) -> bool:
    """Same kind, and every field the same, shorter or missing."""
    if isinstance(cut, ErrorLine) and isinstance(whole, OutOfMemory):
        return whole.message.startswith(cut.message)  # cut before it says that it is about memory
    if type(cut) is not type(whole):
        return False
    for name in cut.__dataclass_fields__:  # type: ignore[attr-defined]
        mine, theirs = getattr(cut, name), getattr(whole, name)
        shorter = (
            (isinstance(mine, str) and isinstance(theirs, str) and theirs.startswith(mine))
            or (isinstance(mine, dict) and mine.items() <= theirs.items())
            or (isinstance(mine, tuple) and isinstance(theirs, tuple) and theirs[: len(mine)] == mine)
            or (isinstance(mine, bool) and not mine)
            or (name == "total" and str(theirs).startswith(str(mine)))  # see bars.py
        )
        if not (mine == theirs or mine is None or shorter):
            return False
    return True


@few
@given(logs(), st.integers(0, 2**32 - 1))
def test_lines_in_any_order_are_no_error(made: tuple[str, object], seed: int) -> None:
    lines = made[0].splitlines(keepends=True)
    random.Random(seed).shuffle(lines)
    log = read_log("".join(lines).encode())
    for startup in log.startups:
        summary(startup)
        assert startup.first_line <= startup.last_line <= log.counters.lines


@quick
@given(st.binary(max_size=4000))
def test_bytes_that_are_no_log_are_no_error(data: bytes) -> None:
    counters = Counters()
    list(parse(data, counters))
    assert counters.damaged or counters.lines == data.count(b"\n") + (not data.endswith(b"\n") and bool(data))


PIECES = (
    *("[2026-08-27 00:00:00 TP0] ", "Capture target prefill CUDA graph ", "begin. ", "end. ", "avail mem=", "1.25 GB"),
    *("num_tokens=[", "4, ", "]", "Capturing num tokens (", "num_tokens=8 avail_mem=1.00 GB): ", " 10%|█ | 1/58 ["),
    *("00:01<", "\r", "\n", "\x1b[31m", "server_args=ServerArgs(", "bs=", "Load weight end. ", "elapsed=", "-", "("),
    *("torch.OutOfMemoryError: ", "Tried to allocate ", "12 MiB", "Prefill batch, ", "#new-seq: 1, ", "#new-token: 9"),
    *("Engine startup timings (s): ", "cuda_graph={", "}", "Graph capturing finished in ", "GPU KV cache size: ", "𝔘"),
    *(
        "\ud800",
        "\x00",
        "9" * 30,
        "(Worker_TP1 pid=7) ",
        "pod-1  | ",
        "[",
        "Aug 27 00:00:00 gpu1 sglang[9]: ",
        "(ServeReplica:a:b pid=3) ",
        "srv.1.k3@n1 | ",
        "sg-0 server ",
        "0: ",
        "INFO: ",
        '{"log":"',
        '"}',
        "KV Cache is allocated. ",
        "Disable prefill ",
    ),
)


@quick
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_pieces_of_lines_in_any_order_are_no_error(text: str) -> None:
    log = read_log(text.encode("utf-8", "surrogatepass"))
    for startup in log.startups:
        summary(startup)
