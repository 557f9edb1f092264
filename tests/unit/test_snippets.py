"""Snippets are run, not read: the command by the real command line, the Python by Python. Both give the settings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic_records import made_up_record

import toolkit
from toolkit import cli, cli_capture
from toolkit.runs.record import RunRecord
from toolkit.settings import Backend, CaptureSettings
from toolkit.views.snippets import as_command, as_python

tokens = st.integers(1, 1 << 20)
# Everything a shell or a parser could take for its own, besides any text.
words = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20),
    st.text("-='\"\\$`!#*~ \n\té", min_size=1, max_size=8),
).filter(lambda text: bool(text.strip()))
OTHERS: dict[str, Any] = {
    "model": words,
    "prompt": words,
    "policy": words,
    "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
    "weights": st.sampled_from(["auto", "real", "random"]),
    "seed": st.integers(0, (1 << 63) - 1),
    "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
    "device_memory_gib": st.floats(2**-10, 4096),
    "backend": st.sampled_from(list(Backend)),
    "compiler": st.sampled_from(["eager", "inductor"]),
    "request_slots": st.integers(1, 1024),
    "max_context": st.integers(16, 1 << 20),
    "chunked_prefill_size": tokens,
    "role": st.sampled_from(["target", "draft"]),
}
LADDER = {"max_tokens": tokens, "buckets": st.lists(tokens, min_size=1, max_size=8)}
RESERVE = {"reserve_gib": st.floats(0, 4096), "post_capture_gib": st.floats(0, 4096)}
GROWS = {"post_capture_mib_per_1k": st.floats(0, 4096), "longest_prompt": st.integers(1, 1 << 30)}
MEMORY = {"mem_fraction": st.floats(1e-9, 1 - 1e-9), "free_memory_gib": st.floats(1e-9, 4096)}


def one_of(choices: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    each = [st.fixed_dictionaries({name: values}) for name, values in choices.items()]
    return st.one_of(st.just({}), *each)


any_settings = st.tuples(
    one_of(LADDER),
    one_of(MEMORY),
    st.one_of(st.just({}), st.fixed_dictionaries(GROWS)),
    st.fixed_dictionaries({}, optional={**OTHERS, **RESERVE}),
).map(lambda parts: CaptureSettings.create(**parts[0], **parts[1], **parts[2], **parts[3]))


def run_command(line: str) -> CaptureSettings:
    """What `prefill-lab` would capture, had it been given this line by a shell."""
    asked: list[CaptureSettings] = []

    def perform(each: Sequence[CaptureSettings], *_: object) -> list[RunRecord]:
        asked.extend(each)
        return [made_up_record()]

    program, *arguments = shlex.split(line)
    assert program == "prefill-lab"
    with mock.patch.object(cli_capture, "perform", perform):
        assert cli.main(arguments) == 0
    (found,) = asked
    return found


def run_python(source: str) -> CaptureSettings:
    """What `toolkit.capture` would capture, had this been typed."""
    asked: list[CaptureSettings] = []

    def capture(**choices: Any) -> RunRecord:
        asked.append(CaptureSettings.create(**choices))
        return made_up_record()

    names: dict[str, Any] = {}
    with mock.patch.object(toolkit, "capture", capture):
        exec(compile(source, "snippet", "exec"), names)
    assert isinstance(names["record"], RunRecord)
    (found,) = asked
    return found


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(any_settings)
def test_both_give_the_same_settings_back(chosen: CaptureSettings) -> None:
    assert run_python(as_python(chosen)) == chosen
    assert run_command(as_command(chosen)) == chosen


def test_the_property_covers_every_setting() -> None:
    assert {*OTHERS, *LADDER, *MEMORY, *RESERVE, *GROWS} == set(CaptureSettings.model_fields)


def test_only_what_was_changed_is_named() -> None:
    plain = CaptureSettings()
    assert as_python(plain) == 'import toolkit\n\nrecord = toolkit.capture(model="smollm2-135m")\n'
    assert as_command(plain) == "prefill-lab capture --model smollm2-135m"


def test_as_a_person_would_write_it() -> None:
    chosen = CaptureSettings.create(
        model="qwen3-8b", backend="full", buckets=[8, 32], free_memory_gib=3.99, prompt="it's"
    )
    assert as_command(chosen) == (
        "prefill-lab capture --model qwen3-8b --prompt 'it'\"'\"'s' --free-memory 3.99 --backend full --buckets 8,32"
    )
    assert as_python(chosen) == (
        "import toolkit\n\nrecord = toolkit.capture(\n"
        '    model="qwen3-8b",\n    prompt="it\'s",\n    free_memory_gib=3.99,\n    backend="full",\n'
        "    buckets=(8, 32),\n)\n"
    )


@pytest.mark.parametrize("length", [10, 200])
def test_a_long_call_is_broken_into_lines(length: int) -> None:
    source = as_python(CaptureSettings.create(prompt="x" * length, seed=7))
    assert ("(\n    model=" in source) == (length == 200)
    assert run_python(source).seed == 7


def test_a_nul_has_no_command_but_a_snippet() -> None:
    chosen = CaptureSettings.create(prompt="a\0b")
    assert as_command(chosen).startswith("# ")
    assert run_python(as_python(chosen)) == chosen
