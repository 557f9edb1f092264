"""Who turned the prefill graph off: whose graph it was, what naming a backend does, and nothing lost or said twice."""

from __future__ import annotations

import pytest

from tests.server_lines import (
    DECODE,
    ECHO,
    GATE,
    POOLS,
    PREFILL_END,
    READY,
    arguments,
    batch,
    limits,
    line,
    prefill_begin,
)
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.findings.guards import GUARD_WORDS

NO_LAYERS = "graph because the {}model does not have a 'layers' attribute"
# What releases print: the toolkit's own rules (tests/data/rules) and SGLang 0.5.15 to 0.5.23, read.
CONFIG_RULES = (
    "Breakable CUDA graph is incompatible with LoRA; disabling prefill CUDA graph.",
    "Breakable CUDA graph is not enabled for this prefill CP configuration; disabling prefill CUDA graph.",
    "Disabling breakable prefill CUDA graph by default for pipeline parallelism. Pass it to opt in.",
    "Disabling prefill CUDA graph (breakable) by default for the DeepSeek-V3 arch on the trtllm_mla attention backend",
)
CHECKS = (
    "Cuda graph is disabled because of using torch native attention backend",
    "CUDA graph is disabled because --enable-mis is set.",
    "Disable prefill CUDA graph for EAGLE target on tc_piecewise to avoid FP4/MoE decode-replay corruption (#28386).",
    *(f"Disable prefill CUDA graph because {guard.words} (x)" for guard in GUARD_WORDS[1:]),
)


def _found(text: str, code: str) -> Finding:
    found = [one for one in diagnose(text).findings if one.code == code]
    assert len(found) == 1, [(one.code, one.message) for one in diagnose(text).findings]
    return found[0]


def test_a_gate_after_the_targets_graphs_is_the_draft_models() -> None:
    """The draft worker is made after the target has captured (0.5.16 and 0.5.17, read), and its gate is the same."""
    diagnosis = diagnose(prefill_begin() + PREFILL_END + DECODE + GATE + batch(100, True) * 5)
    gate = next(one for one in diagnosis.findings if one.code == "GATE_SKIPPED")
    assert "draft model's" in gate.message
    assert "every prefill runs eager" not in gate.message
    assert "prefill graph captured" in diagnosis.summary
    assert [(each.role, each.outcome) for each in diagnosis.captures if each.phase == "prefill"] == [
        ("target", "captured"),
        ("draft", "skipped"),
    ]


def test_a_gate_before_them_is_the_targets_and_one_more_the_draft_models() -> None:
    both = diagnose(GATE + DECODE + GATE).findings
    assert [("draft" in one.message) for one in both if one.code == "GATE_SKIPPED"] == [False, True]
    assert "prefill graph skipped" in diagnose(GATE + DECODE + GATE).summary


def test_a_check_without_a_role_after_the_targets_graphs_is_the_draft_models() -> None:
    """0.5.15 to 0.5.19 name no role there."""
    check = line("Disable prefill CUDA " + NO_LAYERS.format(""))
    captured = prefill_begin() + PREFILL_END + DECODE
    rule = _found(captured + check, "DISABLED_BY_RULE")
    assert (rule.severity, "draft model's" in rule.message) == ("info", True)
    target = _found(check + DECODE, "DISABLED_BY_RULE")
    assert (target.severity, "draft" in target.message) == ("warning", False)


def test_an_old_build_captures_decode_graphs_first() -> None:
    old = line("Capture cuda graph begin. This can take up to several minutes. avail mem=24.14 GB")
    old += line("Capture cuda graph end. Time elapsed: 3.74 s. mem usage=0.60 GB. avail mem=23.54 GB.")
    rule = _found(
        old + line("Disable piecewise CUDA graph because some layers do not apply Standard GQA"), "DISABLED_BY_RULE"
    )
    assert "draft" not in rule.message


@pytest.mark.parametrize("words", [*CONFIG_RULES, *CHECKS])
def test_a_target_turned_off_although_a_backend_was_named_is_said_once(words: str) -> None:
    codes = [one.code for one in diagnose(arguments(cuda_graph_backend_prefill="full") + line(words)).findings]
    assert codes.count("EXPLICIT_BACKEND_IGNORED") == 1
    assert "DISABLED_BY_RULE" not in codes


def test_a_draft_turned_off_is_said_whatever_backend_was_named() -> None:
    draft = line("Disable draft prefill CUDA " + NO_LAYERS.format("draft "))
    for named in ("breakable", None):
        rule = _found(arguments(cuda_graph_backend_prefill=named) + draft, "DISABLED_BY_RULE")
        assert (rule.severity, "draft model's" in rule.message) == ("info", True)


def test_a_flag_is_by_hand_whatever_backend_was_named() -> None:
    flag = line("Disable piecewise CUDA graph because --disable-piecewise-cuda-graph is set")
    rule = _found(arguments(cuda_graph_backend_prefill="breakable") + flag, "DISABLED_BY_RULE")
    assert (rule.severity, "by hand" in rule.message) == ("info", True)


def test_an_echo_although_a_backend_was_named_is_a_backend_ignored() -> None:
    found = diagnose(arguments(cuda_graph_backend_prefill="breakable") + ECHO).findings
    assert [one.code for one in found if one.severity == "warning"] == ["EXPLICIT_BACKEND_IGNORED"]
    resolved = "cuda_graph_config=Config(prefill=PhaseConfig(backend='disabled', max_bs=8192))"
    same = diagnose(arguments(cuda_graph_backend_prefill="breakable", raw=resolved)).findings
    assert [one.code for one in same if one.severity == "warning"] == ["EXPLICIT_BACKEND_IGNORED"]
    assert not any("skips" in one.message + one.advice for one in (*found, *same))


def test_a_backend_named_outranks_a_switch() -> None:
    """Rising precedence: the switches, the backend by name, the config's own value (executed)."""
    both = arguments(cuda_graph_backend_prefill="breakable", disable_cuda_graph=True)
    assert not any(one.code == "DISABLED_BY_RULE" for one in diagnose(both).findings)


@pytest.mark.parametrize("named", [None, "full"])
@pytest.mark.parametrize("words", [*CONFIG_RULES, *CHECKS])
def test_no_finding_says_that_naming_does_not_help_and_to_name(words: str, named: str | None) -> None:
    for one in diagnose(arguments(cuda_graph_backend_prefill=named) + line(words)).findings:
        if "--cuda-graph-backend-prefill=" in one.advice:
            assert "does not skip" not in one.message
            assert "hold for named backends" not in one.advice


def test_the_eagle_check_is_said_to_spare_breakable() -> None:
    """tests/data/rules, guards: eagle_target is eager on tc_piecewise and, up to 0.5.18, full; breakable captures."""
    said = _found(line(CHECKS[2]), "DISABLED_BY_RULE")
    assert "not for breakable" in said.message
    assert "--cuda-graph-backend-prefill=breakable" in said.advice


@pytest.mark.parametrize("text", [GATE + DECODE, POOLS + DECODE, POOLS])
def test_nobody_is_told_to_name_a_backend_who_named_one(text: str) -> None:
    """The gate spares a backend that is named (executed); so do the rules that print nothing."""
    found = diagnose(arguments(cuda_graph_backend_prefill="breakable") + text + limits() + READY).findings
    assert [one.severity for one in found] == ["warning"]
    assert "ame a backend (" not in found[0].advice


OFF_BY_ARGUMENTS = {
    "disable_cuda_graph": (arguments(disable_cuda_graph=True), "--disable-cuda-graph", "info"),
    "named": (arguments(cuda_graph_backend_prefill="disabled"), "--cuda-graph-backend-prefill=disabled", "info"),
    "resolved": (
        arguments(raw="cuda_graph_config=Config(prefill=PhaseConfig(backend='disabled', max_bs=8192))"),
        "prefill.backend='disabled'",
        "warning",
    ),
    "npu": (
        arguments(device="npu", raw="cuda_graph_config=Config(prefill=PhaseConfig(backend='disabled', max_bs=8192))"),
        "the device is NPU",
        "info",
    ),
}


@pytest.mark.parametrize("case", OFF_BY_ARGUMENTS)
def test_arguments_that_turn_it_off_are_the_reason(case: str) -> None:
    args, words, severity = OFF_BY_ARGUMENTS[case]
    for decode in (DECODE, ""):
        text = args + POOLS + decode + limits() + READY + batch(100, False) * 30
        found = {one.code: one for one in diagnose(text).findings}
        assert set(found) == {"DISABLED_BY_RULE", "EAGER_PREFILLS"}
        assert words in found["DISABLED_BY_RULE"].message
        assert found["DISABLED_BY_RULE"].severity == severity
        assert "because there is no prefill graph" in found["EAGER_PREFILLS"].message


def test_a_server_without_any_graph_is_asked_about() -> None:
    silent = _found(POOLS + limits() + READY, "NO_PREFILL_CAPTURE_UNEXPLAINED")
    assert silent.severity == "warning"
    assert "without decode graphs" in silent.message
    cut = DECODE.partition("\n")[0] + "\n"
    for text in ("", POOLS + cut):  # begins late; lost the end of a capture
        found = diagnose(text + limits() + READY).findings
        assert not any(one.code == "NO_PREFILL_CAPTURE_UNEXPLAINED" for one in found)


@pytest.mark.parametrize("word", ["NPU", "XPU"])
def test_off_cuda_no_prefill_graph_is_the_default(word: str) -> None:
    """tc_piecewise up to 0.5.21, which its own rules turn off there; disabled from 0.5.22 (read)."""
    for text in (POOLS + DECODE.replace("CUDA", word), arguments(device=word.lower()) + POOLS):
        one = _found(text + limits() + READY, "NO_PREFILL_CAPTURE_UNEXPLAINED")
        assert (one.severity, word in one.message) == ("info", True)
