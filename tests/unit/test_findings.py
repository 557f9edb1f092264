"""Findings: each log gives exactly what it shows, and nothing is said without a line for it."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import pytest

from toolkit.prefill.guards import GuardFacts, first_blocked
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.diagnosis import Diagnosis
from toolkit.serverlogs.findings import FINDINGS
from toolkit.serverlogs.findings.finding import SEVERITIES
from toolkit.serverlogs.findings.guards import guard_of
from toolkit.settings import Backend

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"
# What each log must give, by the case that it was written from (tests/serverlogs/README.md).
EXPECTED: dict[str, dict[str, str]] = {
    "compose_two_servers": {"OOM_IN_CAPTURE": "error", "CEILING_BELOW_CHUNK": "warning"},
    "finding_allocator_assertion": {"NOT_A_MEMORY_FAILURE": "error"},
    "finding_asr_ceiling": {"CEILING_BELOW_CHUNK": "warning", "EAGER_PREFILLS": "warning"},
    "finding_bucket_beyond_context": {"NOT_A_MEMORY_FAILURE": "error"},
    "finding_ceiling_below_chunk": {"CEILING_BELOW_CHUNK": "warning"},
    "finding_ceiling_mla": {"CEILING_BELOW_CHUNK": "info"},
    "finding_compile_error": {"NOT_A_MEMORY_FAILURE": "error"},
    "finding_disabled_by_hand": {"DISABLED_BY_RULE": "info"},
    "finding_eager_unexplained": {"EAGER_PREFILLS": "warning"},
    "finding_element_count": {"NOT_A_MEMORY_FAILURE": "error"},
    "finding_explicit_ignored": {"EXPLICIT_BACKEND_IGNORED": "warning", "EAGER_PREFILLS": "info"},
    "finding_first_bucket_compiled": {"COMPILING_NOT_HUNG": "info"},
    "finding_gate_draft": {"GATE_SKIPPED": "info"},
    "finding_guard_gqa": {"DISABLED_BY_RULE": "warning"},
    "finding_killed_and_restarted": {"LOG_INCOMPLETE": "info"},
    "finding_kv_unchanged": {"KV_UNCHANGED_BY_TRIMMING": "info"},
    "finding_negative_usage": {"NEGATIVE_USAGE": "warning"},
    "finding_negative_usage_small": {"NEGATIVE_USAGE": "info"},
    "finding_no_capture_no_word": {"NO_PREFILL_CAPTURE_UNEXPLAINED": "warning"},
    "finding_no_capture_pd_decode": {"NO_PREFILL_CAPTURE_UNEXPLAINED": "info"},
    "finding_no_room_for_kv": {"NO_ROOM_FOR_KV": "error"},
    "finding_oom_after_capture": {"OOM_AFTER_CAPTURE": "error"},
    "finding_oom_before_capture": {"OOM_BEFORE_CAPTURE": "error"},
    "finding_oom_first_bucket": {"OOM_IN_CAPTURE": "error"},
    "finding_oom_router": {"OOM_IN_CAPTURE": "error"},
    "finding_other_process": {"OTHER_PROCESS_ON_GPU": "warning"},
    "finding_pipeline_parallel": {"DISABLED_BY_RULE": "warning"},
    "finding_post_capture_off": {"POST_CAPTURE_KV_SIZING_OFF": "warning", "CEILING_BELOW_CHUNK": "info"},
    "finding_rank_skew": {"RANK_SKEW": "warning"},
    "finding_server_failed": {"SERVER_FAILED": "error"},
    "finding_torch_native": {"DISABLED_BY_RULE": "warning"},
    "finding_tts_ladder": {"EAGER_PREFILLS": "warning", "LADDER_UNUSED": "info"},
    "finding_vllm_absurd": {"ESTIMATE_MISS": "warning", "ESTIMATE_PASS_NOT_REAL": "info", "LOG_INCOMPLETE": "info"},
    "finding_vllm_negative": {"NEGATIVE_USAGE": "warning", "ESTIMATE_PASS_NOT_REAL": "info", "ESTIMATE_MISS": "info"},
    "finding_vllm_oom": {"OOM_IN_CAPTURE": "error", "ESTIMATE_PASS_NOT_REAL": "info"},
    "finding_vllm_underestimate": {"ESTIMATE_MISS": "warning", "ESTIMATE_PASS_NOT_REAL": "info"},
    "sglang_clean": {},
    "sglang_gate": {"GATE_SKIPPED": "warning", "RANK_SKEW": "info", "LOG_INCOMPLETE": "info"},
    "sglang_memory_saver": {"NOT_A_MEMORY_FAILURE": "error"},
    "sglang_multimodal_rule": {"DISABLED_BY_RULE": "warning", "LOG_INCOMPLETE": "info"},
    "sglang_new_breakable": {"PEAK_ABOVE_PRINTED_USAGE": "info", "EAGER_PREFILLS": "info"},
    "sglang_npu_disabled": {"DISABLED_BY_RULE": "info", "LOG_INCOMPLETE": "info"},
    "sglang_old_piecewise": {},
    "sglang_old_tp2_compiling": {"LOG_INCOMPLETE": "info", "COMPILING_NOT_HUNG": "info"},
    "sglang_old_tp8_cut": {"LOG_INCOMPLETE": "info", "RANK_SKEW": "info"},
    "sglang_oom_driver": {"OOM_IN_CAPTURE": "error"},
    "sglang_oom_second_bucket": {"OOM_IN_CAPTURE": "error"},
    "sglang_spec_phases": {"LOG_INCOMPLETE": "info"},
    "sglang_zero_of_58": {"LOG_INCOMPLETE": "info", "COMPILING_NOT_HUNG": "info"},
    "unrelated": {"NOTHING_RECOGNISED": "info"},
    "vllm_tp2": {"ESTIMATE_PASS_NOT_REAL": "info", "ESTIMATE_MISS": "info"},
}
# What only one place of a long message says, and must go on saying.
WORDS = {
    "finding_asr_ceiling": ("97.7 %", "longer than the largest bucket", "163 tokens"),
    "finding_bucket_beyond_context": ("(512) is longer than the context (64)",),
    "finding_disabled_by_hand": ("--disable-prefill-cuda-graph",),
    "finding_element_count": ("element counts",),
    "finding_first_bucket_compiled": ("114 s of 213.0 s", "6533 s"),
    "finding_gate_draft": ("the draft model's prefill graph on TP0 with 3.50 GiB free",),
    "finding_guard_gqa": ("Standard GQA", "naming a backend does not skip this check"),
    "finding_kv_unchanged": ("74 to 42 buckets", "4.28 GiB", "151,168 tokens", "from 0.9 to 0.949"),
    "finding_no_room_for_kv": ("0.681 of the 23.50 GiB", "Raise mem_fraction_static"),
    "finding_oom_after_capture": ("2.0 MiB with 2.2 MiB free", "10.50 GiB were free after the captures"),
    "finding_oom_first_bucket": ("number 1 of 58", "--cuda-graph-max-bs-prefill 4096", "0.46 GiB", "may not be enough"),
    "finding_oom_router": ("bucket of 640 tokens", "number 27 of 58", "CUDA driver"),
    "finding_other_process": ("fell by 12.99 GiB", "bucket of 3072"),
    "finding_pipeline_parallel": ("pipeline parallelism", "naming a backend skips it"),
    "finding_post_capture_off": ("the chunk (5000) is larger than the largest bucket (4608)",),
    "finding_rank_skew": ("6.90 to 9.40 GiB", "TP1 has the least"),
    "finding_tts_ladder": ("40.0 %", "25 of 30 buckets", "twice as large"),
    "finding_vllm_absurd": ("118.65 GiB",),
    "finding_vllm_oom": ("after 14 of 35 graphs",),
    "finding_vllm_underestimate": ("3.40 GiB too little",),
    "sglang_gate": ("2.05 to 2.28 GiB free", "only SGLang 0.5.16 and 0.5.17"),
    "sglang_memory_saver": ("the memory saver cannot be combined",),
    "sglang_multimodal_rule": ("multimodal model", "naming a backend skips this rule"),
    "sglang_new_breakable": ("needed 2.71 GiB", "1 of 3 prefills"),
    "sglang_npu_disabled": ("NPU",),
    "sglang_old_tp8_cut": ("11.78 to 12.01 GiB", "TP2 has the least"),
    # 2775 MiB for 5120 to 704, 47,168 tokens; 640 and below are 6,688 tokens: 393 MiB, of which 0.03 GiB was there.
    "sglang_oom_driver": ("About 0.35 GiB more", "60 MiB per 1,024 tokens", "6,688 tokens in 32 were left"),
    "sglang_oom_second_bucket": ("bucket of 3968 tokens", "number 2 of 58", "0.05 GiB free"),
    "vllm_tp2": ("0.31 GiB", "took 0.20 GiB"),
}


def _read(name: str) -> Diagnosis:
    return diagnose(LOGS / f"{name}.log")


def test_every_log_of_the_folder_has_its_expected_findings() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_gives_exactly_its_findings(name: str) -> None:
    found = Counter((one.code, one.severity) for one in _read(name).findings)
    assert found == Counter(EXPECTED[name].items())


@pytest.mark.parametrize("name", WORDS)
def test_a_finding_says_its_figures(name: str) -> None:
    said = " ".join(f"{one.message} {one.advice}" for one in _read(name).findings)
    assert [words for words in WORDS[name] if words not in said] == []


def test_every_code_is_shown_by_some_log() -> None:
    shown = {code for codes in EXPECTED.values() for code in codes}
    assert set(FINDINGS) <= shown
    assert shown - set(FINDINGS) == {"NOTHING_RECOGNISED"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_finding_rests_on_lines_of_the_log(name: str) -> None:
    lines = len((LOGS / f"{name}.log").read_text().splitlines())
    for one in _read(name).findings:
        assert one.severity in SEVERITIES
        assert one.code == "NOTHING_RECOGNISED" or one.lines
        assert all(1 <= line <= lines for line in one.lines)
        assert one.line == min(one.lines, default=None)
        assert "\n" not in one.message + one.advice


def test_the_most_serious_come_first() -> None:
    ranks = [SEVERITIES.index(one.severity) for one in _read("sglang_gate").findings]
    assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_cut_anywhere_never_raises_and_shows_no_error_too_soon(name: str) -> None:
    """An error may only be said once its lines are there: what the cut log says, the whole one says too."""
    text = (LOGS / f"{name}.log").read_text()
    lines = text.splitlines(keepends=True)
    whole = {(one.code, one.startups) for one in diagnose(text).findings if one.severity == "error"}
    step = max(1, len(lines) // 60)
    for cut in range(1, len(lines), step):
        found = diagnose("".join(lines[:cut])).findings
        errors = [one for one in found if one.severity == "error"]
        assert all(max(one.lines) <= cut for one in found if one.lines)
        assert {(one.code, one.startups) for one in errors} <= whole, f"after line {cut}"


@pytest.mark.parametrize(
    "name", ["sglang_gate", "finding_rank_skew", "sglang_npu_disabled", "finding_pipeline_parallel"]
)
def test_the_order_in_which_ranks_write_changes_nothing(name: str) -> None:
    lines = (LOGS / f"{name}.log").read_text().splitlines()
    said = _without_lines(_read(name))
    for seed in range(5):
        mixed = "\n".join(_mixed(lines, random.Random(seed)))
        assert _without_lines(diagnose(mixed)) == said


def _mixed(lines: list[str], dice: random.Random) -> list[str]:
    """Each rank's lines in order, the ranks mixed; lines that no rank wrote stay where they are."""
    queues: dict[str, list[str]] = {}
    for line in lines:
        queues.setdefault(_rank(line), []).append(line)
    own = queues.pop("", [])
    first, last = (own, []) if lines[0] in own else ([], own)
    mixed = []
    while waiting := [queue for queue in queues.values() if queue]:
        mixed.append(dice.choice(waiting).pop(0))
    if first and len(first) > 1:
        first, last = first[:1], first[1:]
    return [*first, *mixed, *last]


def _rank(line: str) -> str:
    head = line.partition("] ")[0].split()
    return " ".join(part for part in head if part[:2] in ("TP", "PP", "DP"))


def _without_lines(diagnosis: Diagnosis) -> list[tuple[object, ...]]:
    return sorted((one.code, one.severity, one.message, one.advice, one.ranks) for one in diagnosis.findings)


def test_a_crash_loop_says_each_thing_once() -> None:
    text = (LOGS / "finding_oom_router.log").read_text()
    found = diagnose(text * 5).findings
    assert [one.code for one in found] == ["OOM_IN_CAPTURE"]
    assert found[0].startups == (0, 1, 2, 3, 4)


def test_a_named_release_that_has_no_such_rule_is_told() -> None:
    gate = diagnose(LOGS / "sglang_gate.log", sglang_version="0.5.20").findings[0]
    assert "so this log is not of 0.5.20" in gate.message
    line = "[2026-08-05 00:00:00] Breakable CUDA graph is incompatible with LoRA; disabling prefill CUDA graph.\n"
    rule = next(one for one in diagnose(line, sglang_version="0.5.18").findings if one.code == "DISABLED_BY_RULE")
    assert "SGLang 0.5.18 does not have this rule" in rule.message


def test_every_check_of_the_toolkit_is_known_by_its_words() -> None:
    """The words are those that the toolkit's own guards print, which were taken from the executed releases."""
    facts = GuardFacts(Backend.FULL, "target", False, False, False, True, (4, 8), 4, 64, 256, True, 4, 4)
    printed = {
        "eagle_target": {"eagle_target": True, "backend": Backend.TC_PIECEWISE},
        "lora_unsupported": {"lora_unsupported": True},
        "not_a_language_model": {"is_language_model": False},
        "no_capture_sizes": {"buckets": ()},
        "no_size_fits": {"capture_tokens": 2},
        "no_layers": {"has_layers": False},
        "non_standard_gqa": {"num_attention_layers": 3},
    }
    for code, change in printed.items():
        blocked = first_blocked(dataclasses.replace(facts, **change))  # type: ignore[arg-type]
        assert blocked is not None
        assert blocked.log_line is not None
        guard = guard_of(blocked.log_line)
        assert guard is not None
        assert guard.code == code == blocked.code
        found = diagnose(f"[2026-09-01 00:00:00 TP0] {blocked.log_line}\n").findings
        rule = next(one for one in found if one.code == "DISABLED_BY_RULE")
        assert rule.advice == guard.advice


def test_vllm_gets_advice_in_its_own_words() -> None:
    worker = "(EngineCore_0 pid=1) ERROR 10-05 09:11:20 [core.py:800] "
    start = "(EngineCore_0 pid=1) INFO 10-05 09:11:00 [core.py:12] Initializing a V1 LLM engine (v0.19.0) with config: "
    bar = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  10%|# | 5/51 [00:03<00:10, 15.20it/s]"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
    found = diagnose(f"{start}model='m', tensor_parallel_size=1\n{bar}\n{worker}{error}\n").findings
    assert [one.code for one in found] == ["OOM_IN_CAPTURE"]
    assert "gpu_memory_utilization" in found[0].advice
    assert "mem_fraction_static" not in found[0].advice
    eager = diagnose(
        f"{start}model='m', enforce_eager=True, dtype=x\nINFO:     Application startup complete.\n"
    ).findings
    assert [(one.code, one.severity) for one in eager] == [("DISABLED_BY_RULE", "info")]


def test_words_of_a_log_cannot_steer_a_terminal_or_a_page() -> None:
    text = (
        (LOGS / "finding_element_count.log").read_text().replace("number of elements", "number of elements \u202e<b>")
    )
    diagnosis = diagnose(text)
    assert all(one.message.isprintable() for one in diagnosis.findings)
    assert "<b>" not in diagnosis._repr_html_()


@pytest.mark.parametrize(
    "change",
    [
        ("mem_fraction_static=0.9, chunked_prefill_size=2048", "mem_fraction_static=0.88, chunked_prefill_size=2048"),
        ("chunked_prefill_size=2048)", "chunked_prefill_size=2048, max_total_tokens=151168)"),
        ("#tokens: 151168", "#tokens: 151170"),
        ("num_tokens=[4, 8, 12,", "num_tokens=[1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 4, 8, 12,"),
    ],
)
def test_trimming_is_only_blamed_where_nothing_else_changed(change: tuple[str, str]) -> None:
    text = (LOGS / "finding_kv_unchanged.log").read_text()
    at = text.rindex("server_args=")
    changed = text[:at] + text[at:].replace(*change)
    assert changed != text
    codes = {one.code for one in diagnose(changed).findings}
    assert ("KV_UNCHANGED_BY_TRIMMING" in codes) is ("num_tokens" in change[0])


def test_a_log_that_stops_in_a_traceback_says_no_cause() -> None:
    text = (LOGS / "finding_oom_router.log").read_text()
    cut = text[: text.index("torch.AcceleratorError")]
    assert [one.code for one in diagnose(cut).findings] == ["LOG_INCOMPLETE"]
