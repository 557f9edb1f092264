"""Lines that a log collector wrapped in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.serverlogs.events import BucketBar, OutOfMemory
from toolkit.serverlogs.fold import read_log
from toolkit.serverlogs.lines import MAX_LINE, read_lines
from toolkit.serverlogs.parse import parse

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"
TEXT = "[2026-08-27 00:00:00 TP1] Memory pool end. avail mem=12.70 GB"


@pytest.mark.parametrize(
    "wrapped",
    [
        json.dumps({"log": TEXT + "\n", "stream": "stdout", "time": "2026-08-27T00:00:00.1Z"}),
        json.dumps({"log": TEXT + "\n", "stream": "stdout"}, separators=(",", ":")),
        json.dumps({"time": "2026-08-27T00:00:00Z", "level": "INFO", "msg": TEXT}),
        json.dumps({"level": "info", "message": f"\x1b[32m{TEXT}\x1b[0m"}),
        json.dumps({"severity": "INFO", "textPayload": TEXT}),
        json.dumps({"severity": "INFO", "jsonPayload": {"message": TEXT}}),
        json.dumps({"MESSAGE": TEXT}),
        json.dumps({"MESSAGE": list(TEXT.encode())}),
    ],
)
def test_the_text_of_an_object_is_the_line(wrapped: str) -> None:
    assert list(read_lines(f"before\n{wrapped}\nafter\n")) == [(1, "before"), (2, TEXT), (3, "after")]


@pytest.mark.parametrize(
    ("names", "server"),
    [
        ({"kubernetes": {"pod_name": "sg-0"}}, "sg-0"),
        ({"resource": {"type": "k8s", "labels": {"pod_name": "sg-1"}}}, "sg-1"),
        ({"container_name": "/ecs-task-3"}, "ecs-task-3"),
        ({"_HOSTNAME": "gpu1"}, "gpu1"),
        ({"_HOSTNAME": "gpu1", "_SYSTEMD_UNIT": "sgl-a.service", "_PID": "7"}, "gpu1 sgl-a.service"),
        ({"_HOSTNAME": "gpu1", "_SYSTEMD_UNIT": "sgl@a.service"}, "gpu1 sgl.a.service"),
        ({"_HOSTNAME": "gpu1", "_SYSTEMD_UNIT": "session-3.scope", "SYSLOG_IDENTIFIER": "sgl"}, "gpu1 sgl"),
        ({"_SYSTEMD_UNIT": "user@1000.service", "_SYSTEMD_USER_UNIT": "sgl.service"}, "sgl.service"),
        ({"kubernetes": "no object", "container_name": 5}, ""),
    ],
)
def test_a_container_or_pod_is_the_server(names: dict[str, object], server: str) -> None:
    text = json.dumps({"log": "Capturing num tokens (bs=1): 1%|| 1/9\rCapturing batches (bs=1): 1%|| 1/9\n", **names})
    assert [event.rank.server for event in parse(text.encode())] == [server, server]


def test_states_of_a_bar_and_a_whole_traceback_in_one_object_have_one_number() -> None:
    bars = "Capturing batches (bs=2 avail_mem=2.00 GB): 0%|| 0/2\rCapturing batches (bs=1 avail_mem=1.50 GB): 50%|| 1/2"
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\ntorch.OutOfMemoryError: CUDA out of memory.'
    found = list(parse("\n".join(json.dumps({"log": each}) for each in (bars, trace)).encode()))
    assert [(event.line, event.free_gib) for event in found if isinstance(event, BucketBar)] == [(1, 2.0), (1, 1.5)]
    assert [event.line for event in found if isinstance(event, OutOfMemory)] == [2]


@pytest.mark.parametrize("name", ["sglang_oom_driver", "sglang_new_breakable", "finding_oom_router", "vllm_tp2"])
def test_a_wrapped_log_says_what_the_log_says(name: str) -> None:
    text = (LOGS / f"{name}.log").read_bytes().decode()
    wrapped = "\n".join(json.dumps({"log": line + "\n", "stream": "stderr"}) for line in text.split("\n") if line)
    plain = "\n".join(line for line in text.split("\n") if line)
    assert repr(read_log(wrapped.encode()).startups) == repr(read_log(plain.encode()).startups)


@pytest.mark.parametrize(
    "line",
    [
        '{"log": "cut in the mid',
        '{"log": 5}',
        '{"other": "text"}',
        '{"a":' * 20_000,
        '{"log": "' + "x" * MAX_LINE + '"}',
        "{not json}",
        '{"log": "\\ud83d"}',
    ],
)
def test_what_is_no_such_object_is_no_error(line: str) -> None:
    ((number, text),) = read_lines(line + "\n")
    assert number == 1
    assert text.encode()


# systemd.journal-fields: _SYSTEMD_UNIT and _PID say which service and which process wrote a line.
@pytest.mark.parametrize("key", ["_SYSTEMD_UNIT", "SYSLOG_IDENTIFIER", "_PID"])
@pytest.mark.parametrize("values", [("1.service", "2.service"), ("1", "2")])
def test_two_services_of_a_host_are_two_servers(key: str, values: tuple[str, str]) -> None:
    values = values if key != "_PID" else ("1", "2")
    lines = (LOGS / "sglang_clean.log").read_text().splitlines()
    journal = [json.dumps({"MESSAGE": line, "_HOSTNAME": "gpu1", key: value}) for line in lines for value in values]
    found = read_log("\n".join(journal).encode()).startups
    assert len({startup.server for startup in found}) == len(found) == 2
    assert all(startup.ready for startup in found)


PLAIN = "".join(f"[2026-08-27 00:00:0{second}] Memory pool end. avail mem=12.70 GB\n" for second in range(5))
QUIT = "Received sigquit from a child process."


@pytest.mark.parametrize("typed", [{"user": "bob", "message": QUIT}, {"role": "user", "line": QUIT}, {"log": QUIT}])
def test_an_object_between_plain_lines_is_what_somebody_sent(typed: dict[str, str]) -> None:
    assert [type(event).__name__ for event in parse((PLAIN + json.dumps(typed)).encode())] == ["MemoryPoolEnd"] * 5


def test_objects_after_a_few_plain_lines_are_of_the_server() -> None:
    first = "".join(PLAIN.splitlines(keepends=True)[:2])
    objects = [json.dumps({"level": "info", "message": "Memory pool end. avail mem=12.70 GB"})] * 9
    mixed = [*objects, *PLAIN.splitlines(), *objects]
    assert len(list(parse((first + "\n".join(mixed)).encode()))) == 2 + 9 + 5 + 9


@pytest.mark.parametrize("sure", [{"log": QUIT, "stream": "stderr"}, {"MESSAGE": QUIT, "_PID": "7"}])
def test_an_object_that_only_a_collector_writes_is_one_anywhere(sure: dict[str, str]) -> None:
    assert len(list(parse((PLAIN + json.dumps(sure)).encode()))) == 6
