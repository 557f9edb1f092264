"""What the Lab's controls stand for: settings, and words about them, before anything is captured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InvalidInput
from toolkit.hardware import GpuInfo
from toolkit.policies import POLICIES
from toolkit.settings import Backend, CaptureSettings
from toolkit.widgets.choice import Choice, controls_for, preview
from toolkit.widgets.devices import visible_gpus

CHOICE = Choice(
    model="smollm2-135m", device="cpu", device_memory_gib=8.0, auto_fraction=True, mem_fraction=0.85, backend="auto",
    policy="ungated", ladder="default", max_tokens=512, buckets="8,32", leave_exactly=False, free_memory_gib=3.99,
)  # fmt: skip


def shown(**changes: Any) -> Any:
    choice = replace(CHOICE, **changes)
    return preview(choice, choice.device_memory_gib * 1024)


def test_auto_shows_the_value_of_the_heuristic_and_why() -> None:
    # Worked by hand: R = 512 + 1.5 * 2048 + 128 + 2 * 8 + 8 * 42 = 4064 MiB of 8192.
    words = shown().fraction
    assert "0.504" in words and "4064" in words and "42 buckets" in words


def test_the_default_cpu_device_is_gated_and_says_why() -> None:
    # (1 - 0.504) * 8 = 3.97 GiB, under 4.00.
    gated = shown(policy="gated")
    assert gated.skips is True
    assert "3.97 GiB" in gated.verdict and "4.00 GiB" in gated.verdict and "forecast" in gated.verdict
    assert shown().skips is False


@pytest.mark.parametrize(
    ("free", "backend", "policy", "skips"),
    [(3.99, "auto", "gated", True), (4.0, "auto", "gated", False), (3.99, "breakable", "gated", False),
     (3.99, "auto", "ungated", False), (12.0, "disabled", "ungated", True)],
)  # fmt: skip
def test_the_truth_table_with_exactly_so_much_left_free(free: float, backend: str, policy: str, skips: bool) -> None:
    assert shown(leave_exactly=True, free_memory_gib=free, backend=backend, policy=policy).skips is skips


def test_a_forecast_a_hair_above_the_gate_does_not_claim_to_know() -> None:
    # (1 - 0.5) * 8 = 4.00 GiB, from which static buffers still go.
    edge = shown(policy="gated", auto_fraction=False, mem_fraction=0.5)
    assert edge.skips is None and "the capture will tell" in edge.verdict


def test_explicit_and_auto_are_told_apart() -> None:
    assert "the old gate applies" in shown().backend
    assert "bypasses the old gate" in shown(backend="full").backend


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"model": "nonsense"}, "nonsense"), ({"ladder": "own", "buckets": "8,x"}, "'x'"), ({"model": " "}, "model"),
     ({"auto_fraction": False, "mem_fraction": 1.0}, "1"), ({"device_memory_gib": 1.0}, "0.2"),
     ({"leave_exactly": True, "free_memory_gib": -1.0}, "-1")],
)  # fmt: skip
def test_what_cannot_be_captured_is_one_line_that_names_it(changes: dict[str, Any], names: str) -> None:
    bad = shown(**changes)
    assert bad.settings is None and names in bad.problem and "\n" not in bad.problem


def test_weights_that_do_not_fit_are_forecast() -> None:
    # 8.19 billion parameters in bf16 are over 15 GiB.
    words = shown(model="qwen3-8b", auto_fraction=False, mem_fraction=0.9).free
    assert "15.26 GiB" in words and "7.20 GiB" in words


def test_mla_is_read_from_a_local_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "deepseek_v3", "kv_lora_rank": 512}))
    assert "1536 for the graphs of an MLA model" in shown(model=str(config)).fraction
    config.write_text("not json")
    assert "known once" in shown(model=str(config)).fraction
    assert "known once" in shown(model="somebody/something").fraction


def test_an_unknown_device_memory_is_not_made_up() -> None:
    words = preview(CHOICE, None)
    assert words.skips is None and words.mem_fraction is None
    assert all("n/a" in text for text in (words.fraction, words.ladder, words.free, words.verdict))


@pytest.mark.parametrize(("text", "names"), [("half", "'half'"), ("-1", "-1"), ("nan", "nan")])
@pytest.mark.parametrize("control", ["reserve", "later"])
def test_an_amount_that_is_none_is_one_line(control: str, text: str, names: str) -> None:
    bad = shown(**{control: text})
    assert bad.settings is None and names in bad.problem and "\n" not in bad.problem


def test_the_reserve_is_told_with_where_it_comes_from() -> None:
    # A tenth of 3.99 GiB; of 6 GiB it would be more than the half GiB that is the most.
    assert shown(leave_exactly=True).reserve.startswith("0.40 GiB by default")
    assert shown(leave_exactly=True, free_memory_gib=6.0).reserve.startswith("0.50 GiB by default")
    assert "(forecast)" in shown().reserve
    asked = shown(reserve="0.25", later="0.31").reserve
    assert asked.startswith("0.25 GiB, as you ask") and "0.31 GiB declared to be needed later" in asked


@given(
    fraction=st.one_of(st.just("auto"), st.floats(0.3, 0.98)),
    backend=st.sampled_from([kind.value for kind in Backend]),
    policy=st.sampled_from(sorted(POLICIES)),
    ladder=st.one_of(
        st.none(), st.integers(1, 1 << 20), st.sets(st.integers(1, 8192), min_size=1, max_size=9).map(sorted).map(tuple)
    ),
)  # fmt: skip
def test_settings_become_controls_and_the_controls_the_same_settings(
    fraction: Any, backend: str, policy: str, ladder: Any
) -> None:
    wanted = {"mem_fraction": fraction, "backend": backend, "policy": policy, "device": "cpu"}
    if ladder is not None:
        wanted["max_tokens" if isinstance(ladder, int) else "buckets"] = ladder
    choice = replace(CHOICE, **controls_for(wanted))
    assert choice.settings() == CaptureSettings.create(**wanted)


def test_settings_that_exclude_each_other_change_no_control() -> None:
    with pytest.raises(InvalidInput, match="exclude each other"):
        controls_for({"mem_fraction": 0.8, "free_memory_gib": 2.0})
    with pytest.raises(InvalidInput, match="nonsense"):
        controls_for({"nonsense": 1})


GPUS = [GpuInfo(number, f"GPU-{number}a{number}", f"card {number}", 1000.0 * number) for number in range(3)]


@pytest.mark.parametrize(
    ("visible", "numbers"),
    # CUDA's documentation: order counts, and an entry that names no GPU hides itself and all after it.
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("1,7,0", [1]), ("GPU-2a", [2]), ("-1", []), ("0,0", [0])],
)
def test_gpus_are_numbered_as_cuda_numbers_them(visible: str | None, numbers: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(GPUS, visible)] == numbers
