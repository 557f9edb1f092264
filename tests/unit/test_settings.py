"""Settings: whatever is given is either usable or refused in one line that names it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InvalidInput
from toolkit.settings import Backend, CaptureSettings

NAMES = list(CaptureSettings.model_fields)
tokens = st.integers(1, 1 << 20)
names = st.text(min_size=1, max_size=20).filter(lambda text: bool(text.strip()))
ladders = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"max_tokens": tokens}),
    st.fixed_dictionaries({"buckets": st.lists(tokens, min_size=1, max_size=8)}),
)
memory = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"mem_fraction": st.floats(0.01, 0.99)}),
    st.fixed_dictionaries({"free_memory_gib": st.floats(0.01, 500)}),
)
others = st.fixed_dictionaries(
    {},
    optional={
        "model": names,
        "prompt": names,
        "dtype": st.sampled_from(["bf16", "fp32", "float16"]),
        "weights": st.sampled_from(["auto", "real", "random"]),
        "seed": st.integers(0, 2**31),
        "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
        "device_memory_gib": st.floats(0.1, 4096),
        "backend": st.sampled_from(list(Backend)),
        "request_slots": st.integers(1, 1024),
        "max_context": st.integers(16, 1 << 20),
        "chunked_prefill_size": tokens,
        "role": st.sampled_from(["target", "draft"]),
    },
)
junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=10),
    st.lists(st.integers(), max_size=3),
)


@given(ladders, memory, others)
def test_settings_survive_json(ladder: dict[str, Any], room: dict[str, Any], other: dict[str, Any]) -> None:
    settings = CaptureSettings.create(**ladder, **room, **other)
    assert CaptureSettings.create(**settings.model_dump(mode="json")) == settings
    assert settings.with_changes() == settings


@given(st.dictionaries(st.sampled_from([*NAMES, "colour"]), junk, max_size=4))
def test_anything_is_used_or_refused_in_one_line(choices: dict[str, Any]) -> None:
    try:
        settings = CaptureSettings.create(**choices)
    except InvalidInput as error:
        assert len(str(error).splitlines()) == 1
        return
    assert "colour" not in choices
    assert settings.mem_fraction == "auto" or 0 < settings.mem_fraction < 1


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"max_tokens": "abc"}, "'abc'"),
        ({"max_tokens": -5}, "-5"),
        ({"mem_fraction": "nan"}, "nan"),
        ({"mem_fraction": float("inf")}, "inf"),
        ({"mem_fraction": 1.5}, "1.5"),
        ({"free_memory_gib": "-1"}, "-1"),
        ({"device_memory_gib": 5000}, "5000"),
        ({"backend": "foo"}, "'foo'"),
        ({"dtype": "fp8"}, "'fp8'"),
        ({"device": "tpu"}, "'tpu'"),
        ({"prompt": " "}, "prompt"),
        ({"model": ""}, "model"),
        ({"request_slots": 0}, "0"),
        ({"max_context": 15}, "15"),
        ({"buckets": [0]}, "0"),
        ({"colour": 1}, "'colour'"),
    ],
)
def test_a_refusal_names_the_value(choices: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        CaptureSettings.create(**choices)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "choices",
    [{"mem_fraction": 0.8, "free_memory_gib": 3.0}, {"buckets": [8], "max_tokens": 8}],
)
def test_two_ways_to_say_the_same_exclude_each_other(choices: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="exclude each other"):
        CaptureSettings.create(**choices)


def test_only_a_named_backend_is_locked() -> None:
    assert CaptureSettings.create(max_tokens=64, buckets=None).locked_keys == frozenset()
    assert CaptureSettings.create(backend="breakable").locked_keys == {("prefill", "backend")}
    assert CaptureSettings.create().resolved_backend is Backend.BREAKABLE


def test_settings_cannot_be_changed_in_place() -> None:
    settings = CaptureSettings.create()
    with pytest.raises(ValueError):
        settings.policy = "gated"  # type: ignore[misc]


@pytest.mark.parametrize(
    "choices",
    [
        {"prompt": "caf\udce9"},
        {"model": "\udce9"},
        {"free_memory_gib": 1e308},
        {"device_memory_gib": 1e-320},
        {"buckets": (10**5000,)},
    ],
)
def test_extreme_choices_are_refused_in_one_short_line(choices: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        CaptureSettings.create(**choices)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
