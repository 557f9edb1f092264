"""The GPU catalogue: facts against each other, and what a person may write for a card."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_facts import every_fact

from toolkit import hardware, resources
from toolkit.errors import InvalidInput, PrefillLabError
from toolkit.hardware import GpuSpec, list_gpu_specs, resolve_gpu

SPECS = list_gpu_specs()
PROMISED = (
    *("h100-80gb", "h200-141gb", "b200-180gb", "a100-80gb", "a100-40gb", "l4", "l40s", "a10g", "t4", "rtx-4090"),
    *("rtx-5090", "rtx-3090", "rtx-5070", "rtx-pro-6000", "gb10", "h20-96gb"),
)
# Dedicated memory in GB as the makers print it on the box. A card's own figure is near it, in MiB or in GB.
ON_THE_BOX = {"a40": 48, "a10": 24, "a10g": 24, "l4": 24, "l40s": 48, "t4": 16, "rtx-4090": 24, "rtx-5090": 32} | {
    **{"rtx-3090": 24, "rtx-5080": 16, "rtx-5070": 12, "rtx-pro-6000": 96, "rtx-a6000": 48, "rtx-6000-ada": 48}
}


def test_every_promised_card_is_there() -> None:
    assert len(SPECS) >= 20
    assert {spec.id for spec in SPECS} >= set(PROMISED)
    assert len({spec.name for spec in SPECS}) == len(SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_figures_have_sources_and_hang_together(spec: GpuSpec) -> None:
    assert spec.nvidia_smi_mib is not None or spec.cuda_visible_gib is not None
    assert spec.nvidia_smi_source
    assert (spec.cuda_visible_source is None) == (spec.cuda_visible_gib is None)
    assert 7.0 <= spec.compute_capability <= 12.1
    if spec.nvidia_smi_mib is not None:
        # CUDA gives programs a little less than the driver counts: 0.2 to 1 GiB on every card there is a log of.
        assert 0.2 < spec.nvidia_smi_mib / 1024 - spec.visible_gib < 1.0
        in_id = (int(part[:-2]) for part in spec.id.split("-") if part.endswith("gb"))
        box = ON_THE_BOX.get(spec.id) or next(in_id, None)
        assert box is not None, "which size is printed on the box?"
        assert box * 1e9 / 2**20 * 0.98 <= spec.nvidia_smi_mib <= box * 1024


def test_architecture_follows_from_compute_capability() -> None:
    names = {7.0: "volta", 7.5: "turing", 8.0: "ampere", 8.6: "ampere", 8.9: "ada", 9.0: "hopper"}
    for spec in SPECS:
        assert spec.architecture == names.get(spec.compute_capability, "blackwell")


def test_cards_of_the_resolution_table_are_in_the_catalogue() -> None:
    # Sizes the releases were executed with: the table's makers took them from nvidia-smi as well.
    sizes = {float(row["gpu_mem_mib"]) for row in every_fact("resolution")}
    ours = {spec.nvidia_smi_mib for spec in SPECS}
    assert sizes - ours <= {16384.0}


def test_unified_memory_is_sized_by_what_cuda_sees() -> None:
    gb10 = resolve_gpu("gb10")
    assert gb10.nvidia_smi_mib is None
    assert gb10.tier_mib == gb10.visible_gib * 1024


def test_what_no_log_shows_is_estimated_and_known_to_be() -> None:
    gb200 = resolve_gpu("gb200-186gb")
    assert gb200.cuda_visible_gib is None
    assert gb200.nvidia_smi_mib is not None
    assert 184 < gb200.visible_gib < gb200.nvidia_smi_mib / 1024


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
@pytest.mark.parametrize("change", [str, str.upper, lambda name: f"  {name.replace('-', ' ')} "])
def test_a_card_is_found_by_id_and_by_name_in_any_case(spec: GpuSpec, change: object) -> None:
    assert callable(change)
    assert resolve_gpu(change(spec.id)) is spec
    assert resolve_gpu(change(spec.name)) is spec


@pytest.mark.parametrize(
    ("name", "near"),
    [("h100", ["h100-80gb", "h100-nvl-94gb"]), ("rtx-409", ["rtx-4090"]), ("a100", ["a100-40gb", "a100-80gb"])],
)
def test_an_unknown_card_is_refused_with_near_matches(name: str, near: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        resolve_gpu(name)
    message = str(error.value)
    assert f"unknown GPU {name!r}" in message
    assert all(match in message.partition(")")[0] for match in near)
    assert "--gpu" in message


@given(st.text(max_size=60))
def test_any_text_is_a_card_or_refused_in_one_line(name: str) -> None:
    try:
        assert resolve_gpu(name) in SPECS
    except InvalidInput as error:
        assert len(str(error).splitlines()) == 1


# --- the file -----------------------------------------------------------------------------------------------


def test_the_file_holds_nothing_else() -> None:
    entries = json.loads((resources.data_dir() / "gpus.json").read_text())["gpus"]
    assert all(set(entry) == {field.name for field in fields(GpuSpec)} for entry in entries)


def test_a_damaged_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpus.json").write_text('{"gpus": [{"id": "x"}]}')
    monkeypatch.setattr(hardware, "data_dir", lambda: tmp_path)
    hardware._specs.cache_clear()
    try:
        with pytest.raises(PrefillLabError, match=r"data/gpus.json is damaged"):
            list_gpu_specs()
    finally:
        monkeypatch.undo()
        hardware._specs.cache_clear()
