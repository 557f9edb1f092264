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
