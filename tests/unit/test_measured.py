"""A forecast beside a log: made by the log's own release, flags, ladder and limits, and judged by what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server_lines import PREFILL_END, READY, arguments, limits, line, prefill_begin
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.measured import Measured

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"
GATE = (
    "Disabling auto-selected prefill CUDA graph: only {free:.2f} GiB is free after model/KV/eager-buffer allocation; "
    "at least 4.00 GiB is required for capture. Set an explicit prefill CUDA graph backend to override this safety "
    "gate."
)
LOADED = (
    "Load weight begin. avail mem=78.48 GB",
    "Load weight end. elapsed=12.02 s, type=Qwen3ForCausalLM, avail mem=63.20 GB, mem usage={weights:.2f} GB.",
    "KV Cache is allocated. dtype: {dtype}, #tokens: {tokens}, K size: {half:.2f} GB, V size: {half:.2f} GB",
)
BEGIN = "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 64, 512], avail mem={free:.2f} GB"


def _log(*lines: str, arguments: str = "tp_size=1", **figures: object) -> str:
    values = {"weights": 15.28, "dtype": "torch.bfloat16", "tokens": 363520, "half": 24.96, "free": 12.0} | figures
    start = f"server_args=ServerArgs(model_path='Qwen/Qwen3-8B', mem_fraction_static=0.83, {arguments})"
    body = [line.format(**values) for line in (*LOADED, *lines)]
    return "".join(f"[2026-08-27 00:00:00] {line}\n" for line in (start, *body))


def _measured(text: str, gpu: str = "h100-80gb", model: str = "qwen3-8b") -> Measured:
    found = diagnose(text, model=model, gpu=gpu)
    assert json.dumps(found.to_dict())
    assert found.measured is not None, found.notes
    return found.measured


def _rows(measured: Measured) -> dict[str, float]:
    return {row.what: row.forecast for row in measured.rows}


# --- whose rules, which flags ---------------------------------------------------------------------------------------


def test_the_rules_are_those_of_the_newest_release_that_the_wording_allows() -> None:
    """The gate's line exists in 0.5.16 and 0.5.17 only (public PRs #31204 and #33352)."""
    measured = _measured(_log(GATE))
    assert measured.sglang_version == "0.5.17"
    assert "rules of SGLang 0.5.17" in measured.about
    assert any("0.5.16 to 0.5.17" in one for one in measured.assumptions)


def test_mla_at_the_gate_is_ruled_out_as_its_release_does() -> None:
    """MLA without DSA is a rule of the breakable backend up to 0.5.17."""
    head, *rest = _log(GATE, weights=81.0, free=2.05).replace("78.48", "139.00").splitlines()
    head = head.replace("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3").replace("tp_size=1", "tp_size=8")
    text = "\n".join((head, *rest)) + "\n"
    measured = diagnose(text, gpu="h200-141gb").measured
    given = diagnose(text, gpu="h200-141gb", sglang_version="0.5.17").measured
    assert measured is not None and given is not None
    assert {one.outcome for one in measured.verdicts} == {"skipped"}
    assert measured.verdicts == given.verdicts


@pytest.mark.parametrize(
    ("arguments", "lines", "buckets"),
    [
        ("cuda_graph_bs_prefill=[4, 64, 512]", (GATE,), 3),
        ("cuda_graph_max_bs_prefill=512", (BEGIN.partition(", 512]")[0],), 30),
        ("tp_size=1", (BEGIN,), 3),
    ],
)
def test_the_ladder_is_that_of_the_log(arguments: str, lines: tuple[str, ...], buckets: int) -> None:
    """The default ladder up to 512 has 30 buckets (4 to 32 by 4, to 256 by 16, to 512 by 32)."""
    measured = _measured(_log(*lines, arguments=arguments, free=2.05))
    assert _timed(measured) == buckets


def _timed(measured: Measured) -> int:
    """How many buckets the least capture time is of: 1.0 s for the first, 0.385 s for each later one (data/field)."""
    least = next(row.low for row in measured.rows if row.what == "capture time")
    assert least is not None
    return 1 + round((least - 1.0) / 0.385)


def test_a_stage_of_a_pipeline_is_neither_planned_nor_called_another_model() -> None:
    for text in (
        _log(BEGIN, arguments="tp_size=1, pp_size=2", weights=7.90),
        _log(BEGIN, weights=7.90).replace("00:00:00]", "00:00:00 PP1]"),
    ):
        found = diagnose(text, model="qwen3-8b", gpu="h100-80gb")
        assert found.measured is None and "pipeline parallel, 2 stages" in found.notes[0]
        assert not any(one.code == "MODEL_MISMATCH" for one in found.findings)


@pytest.mark.parametrize("arguments", ["cpu_offload_gb=7", "enable_dp_attention=True, dp_size=2"])
def test_weights_that_no_plan_counts_are_no_other_model(arguments: str) -> None:
    measured = _measured(_log(BEGIN, arguments=f"tp_size=1, {arguments}", weights=7.90))
    assert measured.mismatch is None
    assert any("not planned" in one for one in measured.assumptions)


def test_a_limit_of_the_pool_is_kept_by_every_figure() -> None:
    """100,000 tokens of Qwen3-8B in bf16 are 13.73 GiB: 36 layers x 8 heads x 128 x 2 x 2 bytes a token."""
    text = _log(BEGIN, arguments="max_total_tokens=100000", tokens=100000, half=6.87, free=48.9)
    measured = _measured(text)
    figures = _rows(measured)
    assert figures["KV tokens"] == 100_000
    assert figures["KV pool"] == pytest.approx(100_000 * 36 * 8 * 128 * 2 * 2 / 2**30)
    assert figures["free before capture"] == pytest.approx(48.9, abs=1.0)
    first = next(one for one in measured.verdicts if one.policy == "capture_first")
    assert "gets 100,000 tokens" in first.reason
    assert any("max_total_tokens" in one for one in measured.assumptions)


@pytest.mark.parametrize("dtype", ["torch.float8_e4m3fn", "torch.float8_e5m2", "torch.float8_e4m3fnuz", "fp8_e5m2"])
def test_every_eight_bit_pool_is_planned_as_one(dtype: str) -> None:
    """Half the bytes of bf16, twice the tokens."""
    plain, small = (_rows(_measured(_log(BEGIN, dtype=name)))["KV tokens"] for name in ("torch.bfloat16", dtype))
    assert small == pytest.approx(2 * plain, rel=0.001)


def test_a_pool_of_unknown_dtype_is_told() -> None:
    measured = _measured(_log(BEGIN, dtype="torch.float4_e2m1fn_x2"))
    assert any("float4_e2m1fn_x2: a plan does not know its size" in one for one in measured.assumptions)


@pytest.mark.parametrize("arguments", ["tp_size=1", "cuda_graph_backend_prefill='tc_piecewise'"])
def test_a_backend_that_later_releases_refuse_is_planned_by_one_that_takes_it(arguments: str) -> None:
    """SGLang 0.5.22 and later refuse tc_piecewise (data/sglang_rules.json, executed)."""
    measured = _measured(_log(BEGIN.replace("breakable", "tc_piecewise"), arguments=arguments))
    assert measured.sglang_version == "0.5.21"
    assert "prefill backend tc_piecewise: as the log shows" in measured.assumptions


def test_an_old_piecewise_server_is_planned_as_one() -> None:
    measured = _measured((LOGS / "sglang_old_piecewise.log").read_text(), gpu="b200-180gb")
    assert measured.sglang_version == "0.5.15"
    assert "prefill backend tc_piecewise: as the log shows" in measured.assumptions
    assert not any("by hand" in one.reason for one in measured.verdicts)
    assert measured.mismatch is None


def test_a_graph_that_was_switched_off_is_not_promised() -> None:
    echo = "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' (e.g. x)"
    decode = "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1], avail mem=10.00 GB"
    measured = _measured(_log(echo, decode, arguments="disable_prefill_cuda_graph=True"))
    assert {one.outcome for one in measured.verdicts} == {"skipped"}


# --- whose card -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["h100-80gb", "b300-288gb"])
def test_a_log_of_another_card_is_told_and_no_policy_is_judged(gpu: str) -> None:
    """177.57 GB were free before the weights: more than twice an H100, under two thirds of a B300."""
    found = diagnose(LOGS / "sglang_old_piecewise.log", model="qwen3-8b", gpu=gpu)
    assert [one.severity for one in found.findings if one.code == "CARD_MISMATCH"] == ["warning"]
    assert found.measured is not None and found.measured.verdicts == ()
    assert "this server is another (CARD_MISMATCH)" in found.measured.about
    assert not any(one.code == "ESTIMATE_MISS" for one in found.findings)


def test_pools_alone_show_a_card_that_is_too_small() -> None:
    text = "\n".join(line for line in _log(BEGIN, half=68.18).splitlines() if "Load weight begin" not in line)
    assert "CARD_MISMATCH" in [one.code for one in diagnose(text, gpu="h100-80gb").findings]
    assert "CARD_MISMATCH" not in [one.code for one in diagnose(text, gpu="b200-180gb").findings]


def test_a_pool_backed_after_the_captures_is_not_in_use_before_them() -> None:
    """15.27 GB of weights and the 60.00 GB free after them are 75.27; 54.90 GB of those become the pool later."""
    text = (
        arguments(mem_fraction_static=0.98)
        + line("Load weight begin. avail mem=78.48 GB")
        + line("Load weight end. elapsed=12.02 s, type=Qwen3ForCausalLM, avail mem=63.21 GB, mem usage=15.27 GB.")
        + line(
            "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 444000, K size: 30.50 GB, V size: 30.50 GB "
            "(VA upper bound)"
        )
        + line("Memory pool end. avail mem=60.00 GB")
        + prefill_begin().replace("avail mem=12.00", "avail mem=60.00")
        + PREFILL_END.replace("avail mem=10.50", "avail mem=58.50")
        + line("Post-capture KV sizing: full_layer_tokens=400000, swa_layer_tokens=0")
        + line("KV cache allocated. dtype: torch.bfloat16, #tokens: 400000, KV size: 54.90 GB, avail mem=3.00 GB")
        + limits(tokens=400000)
        + READY
    )
    found = diagnose(text, gpu="h100-80gb")
    assert {one.severity for one in found.findings} <= {"info"} and found.measured is not None
    assert not any("MISMATCH" in one.code for one in found.findings)
    assert {one.policy for one in found.measured.verdicts} == {"gated", "ungated", "budgeted"}
    assert any("capture_first is not judged" in words for words in found.measured.assumptions)


def test_the_size_that_an_error_prints_is_that_of_the_card() -> None:
    oom = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        "{} GiB of which 0.10 GiB is free."
    )
    for total, gpu, mismatched in (("79.10", "h100-80gb", False), ("44.39", "h100-80gb", True)):
        lines = [line for line in _log(BEGIN).splitlines() if "avail mem=78.48" not in line]
        found = diagnose("\n".join((*lines, oom.format(total))), gpu=gpu)
        assert any(one.code == "CARD_MISMATCH" for one in found.findings) is mismatched


# --- judged by what was measured ------------------------------------------------------------------------------------


def test_a_verdict_that_the_forecast_does_not_settle_is_uncertain() -> None:
    """2.05 GiB are free; the need of the whole default ladder on Qwen3-8B tp 2 has them inside its range."""
    measured = _measured((LOGS / "sglang_gate.log").read_text())
    peak = next(row for row in measured.rows if row.what == "peak inside the capture")
    assert peak.low is not None and peak.high is not None and peak.low <= 2.05 < peak.high
    ungated = next(one for one in measured.verdicts if one.policy == "ungated")
    assert ungated.tight and ungated.words.endswith(", uncertain")
    assert f"lower end of the forecast ({peak.low:.2f} GiB)" in ungated.reason


@pytest.mark.parametrize(("free", "words"), [(1.0, "oom"), (4.0, "captured")])
def test_a_verdict_that_is_settled_is_not_uncertain(free: float, words: str) -> None:
    text = (LOGS / "sglang_gate.log").read_text().replace("2.05", f"{free:.2f}").replace("2.28", f"{free:.2f}")
    assert next(one for one in _measured(text).verdicts if one.policy == "ungated").words == words


def test_no_pool_is_made_up_for_a_policy_that_sizes_it_last() -> None:
    measured = _measured((LOGS / "sglang_gate.log").read_text())
    assert "capture_first" not in {one.policy for one in measured.verdicts}
    assert any("capture_first is not judged" in one for one in measured.assumptions)
    first = next(one for one in _measured(_log(GATE, free=2.05)).verdicts if one.policy == "capture_first")
    # 49.92 GiB for 363,520 tokens, of which one bucket of 8192 is there before the capture.
    assert f"2.05 GiB and the {49.92 * (1 - 8192 / 363520):.2f} GiB of a KV pool" in first.reason


def test_decode_graphs_that_were_captured_before_are_not_needed_again() -> None:
    """Old builds capture decode first (lines 5 to 8 of the log), newer ones afterwards."""
    old = _measured((LOGS / "sglang_old_piecewise.log").read_text(), gpu="b200-180gb")
    new = _measured((LOGS / "sglang_clean.log").read_text())
    for measured, later in ((old, False), (new, True)):
        budgeted = next(one for one in measured.verdicts if one.policy == "budgeted")
        assert ("needed later" in budgeted.reason) is later


def test_capture_time_has_the_range_of_the_captures_it_is_from() -> None:
    """Public captures of 58 buckets took 22.96 s and 26.3 s."""
    row = next(row for row in _measured((LOGS / "sglang_clean.log").read_text()).rows if row.what == "capture time")
    assert row.measured == 26.3
    assert row.low is not None and row.high is not None
    assert row.low <= 22.96 + 0.01 and row.forecast < row.high
