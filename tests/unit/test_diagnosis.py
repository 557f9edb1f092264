"""The diagnosis of a log: its figures against the public cases, its tables, its JSON, a forecast beside it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from startup_logs import logs

import toolkit
from toolkit.errors import InvalidInput
from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs import compare_diagnoses, compare_logs, diagnose
from toolkit.serverlogs.diagnosis import Diagnosis
from toolkit.serverlogs.measured import Measured

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"
CAPTURE_KEYS = {
    *("rank", "phase", "role", "backend", "n_buckets", "buckets", "free_before_gib", "mem_usage_gib", "min_free_gib"),
    *("elapsed_s", "free_after_gib", "outcome"),
}


def _read(name: str) -> Diagnosis:
    return diagnose(LOGS / f"{name}.log")


def _capture(name: str, phase: str = "prefill", role: str = "target") -> dict[str, object]:
    captures = _read(name).to_dict()["captures"]
    found = [one for one in captures if (one["phase"], one["role"]) == (phase, role) and one["outcome"] != "estimate"]
    return found[0]  # type: ignore[no-any-return]


# --- figures of public cases ----------------------------------------------------------------------------------


def test_a_whole_capture_gives_its_peak_and_the_cost_of_its_buckets() -> None:
    """Qwen3-30B-A3B FP8 on an H100: 2.29 GB for the first bucket, then about 7.5 MB for each of 57 more."""
    one = _capture("sglang_new_breakable")
    assert one["free_before_gib"] == 12.59
    assert one["mem_usage_gib"] == 1.71
    assert one["elapsed_s"] == 22.96
    assert one["min_free_gib"] == 9.88
    assert one["free_after_gib"] == 10.88
    assert one["peak_need_gib"] == 2.71
    assert one["first_bucket_gib"] == 2.29
    assert one["later_bucket_gib"] == pytest.approx((10.30 - 9.88) / 56, abs=1e-4)
    assert one["n_buckets"] == 58
    assert one["buckets"] == generate_prefill_buckets(8192)
    decode = _capture("sglang_new_breakable", "decode")
    assert (decode["n_buckets"], decode["mem_usage_gib"], decode["elapsed_s"]) == (36, 0.34, 12.26)


def test_the_old_wording_gives_the_same_keys() -> None:
    one = _capture("sglang_old_piecewise")
    assert (one["free_before_gib"], one["mem_usage_gib"], one["free_after_gib"]) == (23.54, 2.32, 21.22)
    assert (one["n_buckets"], one["elapsed_s"], one["backend"]) == (74, 17.62, None)
    assert one["buckets"] == generate_prefill_buckets(16384)
    assert one["compile_s"] == 9.0
    decode = _capture("sglang_old_piecewise", "decode")
    assert (decode["mem_usage_gib"], decode["elapsed_s"], decode["n_buckets"]) == (0.60, 3.74, 52)


def test_buckets_are_only_those_that_the_log_shows() -> None:
    """The same capture with a shortened list: the bar still counts them, their sizes are not made up."""
    text = (LOGS / "sglang_old_piecewise.log").read_text()
    start = text.index("num tokens [4, 8, 12") + len("num tokens [4, 8, 12")
    one = diagnose(text[:start] + ", ...]" + text[text.index("]", start) + 1 :]).captures
    prefill = next(each for each in one if each.phase == "prefill")
    assert (prefill.n_buckets, prefill.buckets) == (74, None)


def test_five_captures_of_one_server_are_told_apart() -> None:
    found = {(one.role, one.phase): (one.mem_usage_gib, one.elapsed_s) for one in _read("sglang_spec_phases").captures}
    assert found == {
        ("target", "prefill"): (1.56, 18.60),
        ("target", "verify"): (0.14, 2.27),
        ("draft", "prefill"): (0.10, 2.42),
        ("draft", "decode"): (0.18, 0.98),
        ("draft", "extend"): (0.11, 0.84),
    }


def test_of_vllms_two_passes_the_second_is_the_capture() -> None:
    diagnosis = _read("vllm_tp2")
    assert diagnosis.engine == "vllm"
    assert diagnosis.version == "0.19.0"
    of_rank = [(one.outcome, one.mem_usage_gib) for one in diagnosis.captures if one.rank == "TP0"]
    assert of_rank == [("estimate", 0.31), ("captured", 0.20)]
    assert diagnosis.ledger[0].kv_cache_gib == 7.94
    assert diagnosis.ledger[0].kv_cache_tokens == 1_196_643


def test_a_gap_is_what_no_line_accounts_for() -> None:
    diagnosis = _read("sglang_new_breakable")
    ledger = diagnosis.tightest
    assert ledger is not None
    assert (ledger.baseline_gib, ledger.weights_gib, ledger.kv_cache_gib) == (78.48, 29.15, 35.98)
    assert ledger.kv_cache_tokens == 392_920
    assert ledger.pools_to_capture_gib == 0.11
    pools = next(stage for stage in ledger.stages if stage.stage == "pools end")
    assert (pools.taken_gib, pools.said_gib, pools.gap_gib) == (36.63, 35.98, 0.65)
    assert all(stage.gap_gib is None or stage.taken_gib is not None for stage in ledger.stages)


def test_the_tightest_rank_decides() -> None:
    ledger = _read("sglang_old_tp8_cut").tightest
    assert ledger is not None
    assert ledger.rank == "TP2"
    assert ledger.free_before_capture_gib == 11.78


def test_an_unfinished_start_says_nothing_of_its_end() -> None:
    ledger = _read("finding_oom_router").tightest
    assert ledger is not None
    assert ledger.free_at_end_gib is None
    one = _capture("finding_oom_router")
    assert (one["outcome"], one["stopped_at"], one["done"], one["n_buckets"]) == ("oom", 640, 26, 58)
    assert one["mem_usage_gib"] is None


def test_replays_are_counted_with_their_padding() -> None:
    stats = _read("finding_tts_ladder").replay[0]
    assert (stats.replayed, stats.eager, stats.hit_rate) == (150, 100, 0.6)
    assert stats.eager_by_reason == {"too_short": 100}
    ladder = generate_prefill_buckets(512)
    lengths = [30 + number % 60 for number in range(250) if number % 5 not in (0, 2)]
    padded = [min(bucket for bucket in ladder if bucket >= length) for length in lengths]
    assert stats.padded_share == pytest.approx(1 - sum(lengths) / sum(padded))
    assert stats.unused_buckets == tuple(sorted(set(ladder) - set(padded)))


def test_wording_narrows_the_release_down() -> None:
    assert _read("sglang_gate").versions == ("0.5.16", "0.5.17")
    assert _read("sglang_new_breakable").versions[0] == "0.5.17"  # start-up timings came with it
    assert _read("sglang_old_piecewise").versions == ()  # older than any release known here


# --- tables, JSON, HTML -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_every_log_becomes_tables_and_json(path: Path) -> None:
    diagnosis = diagnose(path)
    values = json.loads(json.dumps(diagnosis.to_dict()))
    assert {"engine", "ranks", "captures", "ledger", "findings"} <= set(values)
    assert all(set(one) >= CAPTURE_KEYS for one in values["captures"])
    assert all({"code", "severity", "message", "line"} <= set(one) for one in values["findings"])
    assert isinstance(values["ledger"], dict)
    assert len(diagnosis.captures_frame) == len(diagnosis.captures)
    assert len(diagnosis.findings_frame) == len(diagnosis.findings)
    assert len(diagnosis.ranks_frame) == len(diagnosis.ledger)
    assert len(diagnosis.ledger_frame) == sum(len(each.stages) for each in diagnosis.ledger)
    assert len(diagnosis.buckets_frame) == sum(len(each.series) for each in diagnosis.captures)
    assert isinstance(diagnosis.prefill_frame, pd.DataFrame)
    page = diagnosis._repr_html_()
    assert page.count("<table") == page.count("</table>")
    assert "nan" not in page
    assert path.name in repr(diagnosis)


def test_a_diagnosis_cannot_be_changed() -> None:
    diagnosis = _read("sglang_clean")
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.engine = "vllm"  # type: ignore[misc]


def test_the_timeline_follows_free_memory_in_the_order_of_lines() -> None:
    diagnosis = _read("sglang_new_breakable")
    frame = diagnosis.timeline()
    assert list(frame["line"]) == sorted(frame["line"])
    inside = frame[frame["capture"] == "target prefill"]
    assert len(inside) == 58
    assert inside["free_gib"].min() == 9.88
    outside = frame[frame["capture"].isna()]
    assert outside["free_gib"].iloc[0] == 78.48
    assert outside["time"].notna().all()
    assert (outside["time"].str.len() == len("2026-08-27 00:00:00")).all()


def test_an_unrelated_log_is_a_diagnosis_all_the_same() -> None:
    for text in ("", "GET /index.html 200\n", "\x00\x01\n\xff\n", b"\xff\xfe\x00\x00"):
        diagnosis = diagnose(text)
        assert diagnosis.engine is None
        assert [one.code for one in diagnosis.findings] == ["NOTHING_RECOGNISED"]
        assert diagnosis.to_dict()["ledger"] == {"ranks": []}
        assert len(diagnosis.timeline()) == 0
        assert diagnosis._repr_html_()


def test_a_path_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    for source in (tmp_path / "nothing.log", tmp_path, str(tmp_path / "nothing.log")):
        with pytest.raises(InvalidInput):
            diagnose(source)
    two = [LOGS / "sglang_clean.log", LOGS / "sglang_gate.log"]
    for several in (two, [str(path) for path in two]):
        with pytest.raises(InvalidInput, match="compare several"):
            diagnose(several)  # type: ignore[arg-type]
    assert diagnose(two[:1]).captures == diagnose(two[0]).captures  # type: ignore[arg-type]


def test_the_package_offers_it() -> None:
    assert toolkit.diagnose is diagnose
    assert toolkit.Diagnosis is Diagnosis
    assert toolkit.compare_logs is compare_logs


def test_the_same_text_by_any_way_gives_the_same_findings() -> None:
    path = LOGS / "finding_oom_router.log"
    text = path.read_text()
    by_path = diagnose(path).findings
    assert diagnose(text).findings == by_path
    assert diagnose(text.splitlines()).findings == by_path
    assert diagnose(path.read_bytes()).findings == by_path
    assert diagnose(text.replace("\n", "\r\n")).findings == by_path


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(made=logs())
def test_any_made_up_log_is_diagnosed(made: tuple[str, list[dict[str, object]]]) -> None:
    text, expected = made
    diagnosis = diagnose(text)
    json.dumps(diagnosis.to_dict())
    assert diagnosis._repr_html_()
    failed = {number for one in diagnosis.findings if one.severity == "error" for number in one.startups}
    assert failed == {number for number, start in enumerate(expected) if start["ooms"]}


@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=400))
def test_any_text_is_diagnosed(text: str) -> None:
    json.dumps(diagnose(f"{text}\n").to_dict())


# --- several logs ---------------------------------------------------------------------------------------------


def test_trimming_between_two_files_is_seen_as_in_one() -> None:
    text = (LOGS / "finding_kv_unchanged.log").read_text()
    cut = text.index("server_args=", 100)
    at = text.rindex("\n", 0, cut) + 1
    comparison = compare_diagnoses([diagnose(text[:at], name="a.log"), diagnose(text[at:], name="b.log")])
    assert [one.code for one in comparison.findings] == ["KV_UNCHANGED_BY_TRIMMING"]
    assert "a.log and b.log" in comparison.findings[0].message
    assert [row["n_buckets"] for row in comparison.rows] == [74, 42]
    assert list(comparison.frame["prefill_gib"]) == [5.49, 1.21]
    assert json.loads(json.dumps(comparison.to_dict()))["comparison"][0]["kv_cache_tokens"] == 151_168


def test_two_engines_are_compared_by_the_real_pass() -> None:
    rows = compare_logs(LOGS / "vllm_tp2.log", LOGS / "sglang_clean.log").rows
    assert [row["engine"] for row in rows] == ["vllm", "sglang"]
    # vLLM prints one figure for all its graphs; the SGLang log says 1.74 for prefill and 0.26 for decode.
    assert [row["all_graphs_gib"] for row in rows] == [0.20, 2.00]
    assert [row["prefill_gib"] for row in rows] == [None, 1.74]
    assert [(row["n_buckets"], row["prefill_s"], row["captures_s"]) for row in rows] == [
        (None, None, 4.0),
        (58, 26.3, 30.3),
    ]


def test_one_log_is_no_comparison() -> None:
    with pytest.raises(InvalidInput):
        compare_logs(LOGS / "vllm_tp2.log")


# --- a forecast beside it ---------------------------------------------------------------------------------------


def test_the_forecast_stands_beside_the_measurement() -> None:
    diagnosis = diagnose(LOGS / "sglang_new_breakable.log", model="qwen3-30b-a3b", gpu="h100-80gb")
    measured = diagnosis.measured
    assert isinstance(measured, Measured)
    rows = {row.what: row for row in measured.rows}
    assert rows["prefill graph"].measured == 1.71
    assert rows["prefill graph"].low <= 1.71 <= rows["prefill graph"].high
    assert rows["peak inside the capture"].low <= 2.71 <= rows["peak inside the capture"].high
    assert rows["KV tokens"].measured == 392_920
    assert {one.policy for one in measured.verdicts} >= {"gated", "ungated"}
    assert not any(one.code == "ESTIMATE_MISS" for one in diagnosis.findings)
    assert json.dumps(diagnosis.to_dict())


def test_a_measurement_outside_the_forecast_is_a_finding() -> None:
    text = (LOGS / "sglang_clean.log").read_text().replace("mem usage=1.74 GB", "mem usage=9.99 GB")
    found = diagnose(text, model="qwen3-8b", gpu="h100-80gb").findings
    miss = next(one for one in found if one.code == "ESTIMATE_MISS")
    assert "measured 9.99 GiB, above the forecast" in miss.message
    assert miss.severity == "info"


def test_a_log_of_another_model_is_told_and_no_policy_is_judged() -> None:
    text = (LOGS / "sglang_new_breakable.log").read_text()
    for path, words in {
        "Qwen/Qwen3-30B-A3B-FP8": ("name Qwen/Qwen3-30B-A3B-FP8", "29.15 GiB of weights where 8.79 GiB are planned"),
        "/models/mine": ("29.15 GiB of weights where 8.79 GiB are planned",),
    }.items():
        made = text.replace("Qwen/Qwen3-30B-A3B-FP8", path)
        diagnosis = diagnose(made, model="qwen3-8b", gpu="h100-80gb")
        found = [one for one in diagnosis.findings if one.code == "MODEL_MISMATCH"]
        assert [one.severity for one in found] == ["warning"]
        assert all(word in found[0].message for word in words)
        assert ("name" in found[0].message) is (len(words) > 1)
        assert not any(one.code == "ESTIMATE_MISS" for one in diagnosis.findings)
        assert diagnosis.measured is not None
        assert diagnosis.measured.verdicts == ()
        assert "this server is another" in diagnosis.measured.about
        assert json.dumps(diagnosis.to_dict())


def test_a_log_that_names_another_model_of_the_same_size_is_told() -> None:
    text = (LOGS / "sglang_clean.log").read_text().replace("some/model", "meta-llama/Llama-3.1-8B-Instruct")
    codes = [one.code for one in diagnose(text, model="qwen3-8b", gpu="h100-80gb").findings]
    assert "MODEL_MISMATCH" in codes


@pytest.mark.parametrize("path", ["some/model", "Qwen/Qwen3-8B", "/data/Qwen3-8B-Base/", "Qwen/Qwen3-8B-FP8"])
def test_a_log_of_the_model_that_is_given_is_none_of_another(path: str) -> None:
    text = (LOGS / "sglang_clean.log").read_text().replace("some/model", path)
    diagnosis = diagnose(text, model="qwen3-8b", gpu="h100-80gb")
    assert diagnosis.measured is not None
    assert diagnosis.measured.mismatch is None
    assert diagnosis.measured.verdicts


def test_a_log_from_the_middle_of_serving_says_that_it_has_no_start_up() -> None:
    lines = (LOGS / "sglang_new_breakable.log").read_text().splitlines()
    served = diagnose("\n".join(line for line in lines if "Prefill batch" in line) + "\n")
    assert served.summary == "sglang, no start-up in this log; nothing wrong"
    assert "begins after the start-up" in served.findings[-1].message + served.findings[0].message


def test_a_skipped_capture_has_the_free_memory_that_the_gate_saw() -> None:
    skipped = [each for each in _read("sglang_gate").captures if each.outcome == "skipped"]
    assert [each.free_before_gib for each in skipped] == [2.05, 2.28]


def test_without_a_card_or_a_known_model_there_is_a_note() -> None:
    assert diagnose(LOGS / "sglang_clean.log").notes == ()
    assert "give gpu" in diagnose(LOGS / "sglang_clean.log", model="qwen3-8b").notes[0]
    assert "give model" in diagnose(LOGS / "sglang_clean.log", gpu="h100-80gb").notes[0]
    assert "no memory figures" in diagnose(LOGS / "unrelated.log", gpu="h100-80gb").notes[0]
    assert diagnose(LOGS / "vllm_tp2.log", gpu="h100-80gb").measured is None


def test_a_model_that_the_log_names_is_looked_up_in_the_catalogue_only() -> None:
    text = (LOGS / "sglang_clean.log").read_text()
    known = diagnose(text.replace("some/model", "Qwen/Qwen3-8B"), gpu="h100-80gb")
    assert known.measured is not None
    assert known.measured.model == "qwen3-8b"
    for path in ("/etc/passwd", "https://example.org/model", "nobody/nothing"):
        assert diagnose(text.replace("some/model", path), gpu="h100-80gb").measured is None


def test_a_wrong_name_is_bad_input() -> None:
    with pytest.raises(InvalidInput, match="h900"):
        diagnose(LOGS / "sglang_clean.log", gpu="h900")
    with pytest.raises(InvalidInput):
        diagnose(LOGS / "sglang_clean.log", gpu="h100-80gb", model="no-such-model")
    with pytest.raises(InvalidInput, match="no-such-model"):
        diagnose(LOGS / "sglang_clean.log", model="no-such-model")
    with pytest.raises(InvalidInput, match=r"9\.9"):
        diagnose(LOGS / "sglang_clean.log", sglang_version="9.9")
    with pytest.raises(InvalidInput, match="newest"):
        diagnose(LOGS / "sglang_clean.log", sglang_version="newest")


def test_a_long_log_is_read_in_time_with_its_lines() -> None:
    """For the report of a failure; how fast this machine is proves nothing."""
    batch = (
        "[2026-08-27 00:00:52 TP0] Prefill batch, #new-seq: 1, #new-token: {}, #cached-token: 0, token usage: 0.00, "
        "#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: True, input throughput (token/s): 3.50\n"
    )
    text = (LOGS / "sglang_clean.log").read_text() + "".join(batch.format(number % 4000) for number in range(20_000))
    began = time.perf_counter()
    diagnosis = diagnose(text)
    print(f"20,000 prefill batches: {time.perf_counter() - began:.2f} s")
    assert diagnosis.replay[0].batches == 20_002
    assert len(diagnosis.prefill_frame) == 4_000


def test_the_estimate_pass_of_vllm_has_the_buckets_of_its_own_bars() -> None:
    trial = next(each for each in diagnose(LOGS / "finding_vllm_oom.log").captures if each.outcome == "estimate")
    real = [each for each in diagnose(LOGS / "vllm_tp2.log").captures if each.rank == "TP0"]
    assert trial.n_buckets == 2
    assert [(each.outcome, each.n_buckets) for each in real] == [("estimate", None), ("captured", 86)]
