"""A policy map of the CPU device against real captures: the same outcome in every cell that is executed."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import save_model

import toolkit
from toolkit.errors import InvalidInput
from toolkit.forecast.policy_map import PolicyMap
from toolkit.forecast.verdicts import Verdict
from toolkit.policies import POLICIES
from toolkit.runs.execute import execute
from toolkit.runs.foretell import forecast_run
from toolkit.runs.record import RunRecord
from toolkit.settings import CaptureSettings

# Largest bucket, its pool and its warm-up: tens of MiB. From too little for any bucket to plenty for all.
FREE = (0.006, 0.03, 0.05, 0.3)
SMALL = 0.0021
"""A fraction of 1 GiB that the weights almost fill."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = save_model(tmp_path_factory.mktemp("wide") / "llama", intermediate_size=2048, max_position_embeddings=4096)
    return {"model": str(model), "device": "cpu", "device_memory_gib": 1.0, "buckets": (64, 256, 1024, 2048)}


@pytest.fixture(scope="module")
def records(here: dict[str, Any]) -> list[RunRecord]:
    found = []
    for number, (free, policy) in enumerate((free, policy) for free in FREE for policy in POLICIES):
        settings = CaptureSettings.create(free_memory_gib=free, policy=policy, **here)
        run = execute(settings, lambda event: None, lambda: False, run_id=f"20260101-000000-{number:06x}", created="")
        found.append(run)
    return found


@pytest.fixture(scope="module")
def found(here: dict[str, Any], records: list[RunRecord]) -> PolicyMap:
    return toolkit.policy_map(free_memory=FREE, records=records, **here)


def test_every_cell_is_found_by_the_record_of_it(found: PolicyMap) -> None:
    assert (found.frame["provenance"] == "measured").all()
    assert (found.counts["measured"] == len(FREE)).all()
    assert "16 of 16 cells measured on cpu (accounted)" in found.provenance


@pytest.mark.parametrize("policy", POLICIES)
def test_a_real_capture_ends_as_the_map_says(found: PolicyMap, policy: str) -> None:
    for free in FREE:
        one = found.cell(policy, free)
        measured, foretold = one.outcome, one.forecast_outcome
        assert measured is not None and foretold is not None
        assert (measured.outcome, measured.code) == (foretold.outcome, foretold.code), free
        assert measured.kv_cache_tokens == foretold.kv_cache_tokens, free
        if measured.outcome == "captured":
            assert measured.captured_buckets == foretold.captured_buckets, free
            assert measured.trimmed == foretold.trimmed, free
        if measured.outcome == "captured":
            assert measured.margin_gib == pytest.approx(foretold.margin_gib, abs=1e-8), free
            assert measured.free_after_gib == pytest.approx(foretold.free_after_gib, abs=1e-8), free


def test_map_and_record_name_the_same_room_of_a_pool_that_comes_last(found: PolicyMap) -> None:
    for free in FREE:
        one = found.cell("capture_first", free)
        assert one.outcome is not None and one.forecast_outcome is not None
        first = [each.reason.partition(";")[0] for each in (one.outcome, one.forecast_outcome)]
        assert first[0] == first[1] and "of a KV pool sized first" in first[0]


def test_a_pool_of_less_than_one_bucket_is_refused_by_map_and_engine(here: dict[str, Any]) -> None:
    """Weights leave 1,231 tokens of 128 bytes; a pool that comes last gets one full bucket before its capture."""
    small = {**here, "mem_fraction": SMALL}
    records = [
        execute(CaptureSettings.create(policy=policy, **small), lambda event: None, lambda: False,
                run_id=f"20260101-000000-{number:06x}", created="")
        for number, policy in enumerate(POLICIES)
    ]  # fmt: skip
    foretold = toolkit.policy_map(columns={"mem_fraction": [SMALL]}, **here)
    for record, policy in zip(records, POLICIES, strict=True):
        outcome = foretold.cell(policy, SMALL).outcome
        assert outcome is not None
        assert (record.outcome, record.reason_code) == (outcome.outcome, outcome.code), policy
    assert [record.reason_code for record in records] == ["no_memory_for_kv"] * 3 + ["capture_first"]
    last = foretold.cell("capture_first", SMALL).outcome
    assert last is not None
    assert records[-1].free_after_gib == pytest.approx(last.free_after_gib, abs=1e-8)
    assert records[-1].kv_cache_tokens == last.kv_cache_tokens
    assert last.kv_cache_tokens is not None and last.kv_cache_tokens >= max(here["buckets"])
    assert "less than one bucket of 2,048" in records[0].reason


def test_a_trimmed_ladder_is_foretold_beside_the_buffers_of_the_whole() -> None:
    """The gaps that warm-up passes use lie beside static buffers made for the ladder that was asked for."""
    settings = CaptureSettings.create(buckets=(16, 64, 128, 256, 512), device="cpu", device_memory_gib=1.0)
    device = {"kind": "cpu"}
    apart = [forecast_run(settings, (16, 64, 128), device, 26515, rows).peak.mid for rows in (None, 512)]
    assert apart == [4.0, 2.0]  # MiB; executed: a capture of these three with 7.68 MiB free had a peak of 2 MiB


def test_the_verdicts_need_no_forecast_where_the_ladder_was_tried(here: dict[str, Any], found: PolicyMap) -> None:
    plain = toolkit.policy_map(free_memory=FREE, **here)
    assert not plain.counts["measured"].any()
    for policy in POLICIES:
        assert list(plain.grid(policy, "verdict").loc["verdict"]) == list(found.grid(policy, "verdict").loc["verdict"])
    seen = set(found.frame["verdict"])
    assert {Verdict.WRONG_SKIP, Verdict.WRONG_CAPTURE, Verdict.RIGHT_CAPTURE, Verdict.RIGHT_SKIP} <= seen


def test_a_cell_of_the_cpu_device_that_cannot_be_has_its_reason(here: dict[str, Any]) -> None:
    one = toolkit.policy_map(free_memory=[0.3, 0.999], **here).cell("ungated", 0.999)
    assert one.verdict is Verdict.NO_START and "cannot be left free" in str(one.cell.problem)
    with pytest.raises(InvalidInput, match="no cell"):
        toolkit.policy_map(free_memory=[0.998, 0.999], **here)


def test_a_run_on_a_card_marks_the_cell_of_that_card() -> None:
    """Made up, so that it needs no card: only the toolkit's own runner is like its records, no server is."""
    choices = {"model": "smollm2-135m", "buckets": (16, 64), "free_memory_gib": 1.0}
    card = {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "label": "synthetic H100", "total_gib": 79.2}
    settings = CaptureSettings.create(policy="gated", device="cuda", **choices)
    run = RunRecord(
        id="20260101-000000-000001", created="", settings=settings.model_dump(mode="json"), device=card, software={},
        outcome="skipped", runner="EagerRunner", reason="made up", reason_code="gate_low_memory",
    )  # fmt: skip
    axes = {"free_memory": [1.0, 5.0], "gpu": "h100-80gb", "model": "smollm2-135m", "buckets": (16, 64)}
    own = toolkit.policy_map(engine="transformers", records=[run], **axes)
    assert own.cell("gated", 1.0).measured is not None and own.counts["measured"].sum() == 1
    assert not toolkit.policy_map(engine="sglang", records=[run], **axes).counts["measured"].any()
