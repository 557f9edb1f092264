"""What to do after memory ran out: values that follow from bars or from a forecast, and none that cannot be."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import toolkit
from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.diagnosis import Diagnosis
from toolkit.serverlogs.findings.finding import Finding

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"


def _oom(advice_of: Diagnosis) -> Finding:
    return next(one for one in advice_of.findings if one.code == "OOM_IN_CAPTURE")


def test_what_is_missing_follows_from_the_bars() -> None:
    """2.0 GiB for the first of 30 buckets, 0.1 for each later one; 20 are left to do and 0.6 GiB is free."""
    buckets = list(range(8, 8 * 31, 8))
    free = [3.5, *(round(1.5 - 0.1 * later, 2) for later in range(10))]
    bars = "".join(
        f"Capturing num tokens (num_tokens={bucket} avail_mem={gib:.2f} GB): 10%|# | {done}/30 [00:01<?]\n"
        for done, (bucket, gib) in enumerate(zip(reversed(buckets), free, strict=False))
    )
    advice = _oom(
        diagnose(
            "[2026-09-01 00:00:00] server_args=ServerArgs(model_path='m', mem_fraction_static=0.9, tp_size=1)\n"
            "[2026-09-01 00:00:00] Load weight begin. avail mem=76.00 GB\n"
            f"[2026-09-01 00:00:01] Capture target prefill CUDA graph begin. backend=full, num_tokens={buckets}, "
            f"avail mem=3.50 GB\n{bars}torch.OutOfMemoryError: CUDA out of memory.\n"
        )
    ).advice
    assert "About 1.40 GiB more" in advice  # 20 x 0.1 - 0.6
    # Of 3.5 GiB 0.35 stay free: 2.0 c/240 + 0.1 (c/8 - 1) <= 3.15 holds up to c = 152.
    assert "--cuda-graph-max-bs-prefill 152" in advice
    assert "from 0.9 to 0.875" in advice  # (1.4 + 0.5) / 76 less


def _failed(free: float, ladder: list[int]) -> str:
    """A made-up start of Qwen3-8B whose first bucket finds no room."""
    return (
        "[2026-09-16 00:00:01] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', mem_fraction_static=0.97)\n"
        "[2026-09-16 00:00:02] Load weight begin. avail mem=78.60 GB\n"
        "[2026-09-16 00:00:14] Load weight end. elapsed=12.02 s, type=Qwen3ForCausalLM, avail mem=63.33 GB, "
        "mem usage=15.27 GB.\n"
        "[2026-09-16 00:00:16] Capture target prefill CUDA graph begin. backend=breakable, "
        f"num_tokens={ladder}, avail mem={free:.2f} GB\n"
        f"Capturing num tokens (num_tokens={ladder[-1]} avail_mem={free:.2f} GB):   0%| | 0/{len(ladder)} [00:00<?]\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.19 GiB. "
        "GPU 0 has a total capacity of 79.18 GiB of which 0.68 GiB is free.\n"
    )


def test_one_allocation_is_not_sold_as_the_whole() -> None:
    advice = _oom(diagnose(_failed(1.2, [4, 64, 512, 8192]))).advice
    assert "At least 0.51 GiB more" in advice
    assert "from 0.97 to 0.957 at least" in advice
    assert "may not be enough" in advice
    assert "stay free" not in advice


@pytest.mark.parametrize("ladder", [[4, 64, 512, 8192], list(generate_prefill_buckets(8192))], ids=["own", "default"])
@pytest.mark.parametrize("free", [1.2, 2.0, 2.5, 2.7])
def test_advice_and_the_forecast_beside_it_agree(free: float, ladder: list[int]) -> None:
    diagnosis = diagnose(_failed(free, ladder), model="qwen3-8b", gpu="h100-80gb")
    advice = _oom(diagnosis).advice
    assert diagnosis.measured is not None
    peak = next(row for row in diagnosis.measured.rows if row.what == "peak inside the capture")
    assert f"needs {peak.forecast:.2f} GiB ({peak.low:.2f} to {peak.high:.2f} GiB)" in advice
    lowered = float(advice.partition("from 0.97 to ")[2].partition(" ")[0])
    assert free + (0.97 - lowered) * 78.6 >= peak.forecast + 0.5 - 1e-6
    budgeted = next(one for one in diagnosis.measured.verdicts if one.policy == "budgeted")
    if budgeted.outcome == "skipped":
        assert "No shorter ladder fits" in advice
        return
    ceiling = int(advice.partition("ceiling to ")[2].partition(" ")[0])
    kept = [bucket for bucket in ladder if bucket <= ceiling]
    smaller = toolkit.plan(model="qwen3-8b", gpu="h100-80gb", buckets=kept, free_memory_gib=free).forecast
    assert smaller is not None
    assert smaller.peak.mid / 1024 + 0.1 * free <= free
    flag = "--cuda-graph-bs-prefill 4 64" if len(ladder) == 4 else f"--cuda-graph-max-bs-prefill {ceiling}"
    assert flag in advice


@pytest.mark.parametrize("fraction", [0.1, 0.2, 1.5, -0.3])
def test_no_fraction_is_advised_that_cannot_be(fraction: float) -> None:
    """Weights alone are 0.194 of what was free."""
    advice = _oom(diagnose(_failed(1.2, [4, 64, 512, 8192]).replace("=0.97", f"={fraction}"))).advice
    assert f"from {fraction} to" not in advice


def test_no_ceiling_is_advised_that_cannot_be() -> None:
    advice = _oom(diagnose(_failed(1.2, [0, 1, 2]))).advice
    assert "--cuda-graph-max-bs-prefill 0" not in advice
    assert "--cuda-graph-max-bs-prefill 1" not in advice
    small = _failed(1.2, [4, 64, 512, 2048, 8192]).replace("0.97)", "0.97, chunked_prefill_size=1024)")
    assert "--cuda-graph-max-bs-prefill 512)" in _oom(diagnose(small)).advice


def test_memory_that_ran_out_on_a_rank_without_bars_is_that_ranks() -> None:
    begin = "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 64, 512], avail mem=3.00 GB"
    found = diagnose(
        f"[2026-09-01 00:00:00 TP0] {begin}\n[2026-09-01 00:00:00 TP1] {begin}\n"
        "Capturing num tokens (num_tokens=512 avail_mem=2.90 GB):   0%| | 0/3 [00:00<?]\n"
        "[2026-09-01 00:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "graphs.py", line 128, in capture\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB. GPU 1 has a total capacity of "
        "79.18 GiB of which 420.00 MiB is free.\n"
    ).findings
    oom = next(one for one in found if one.code == "OOM_IN_CAPTURE")
    assert oom.ranks == ("TP1",)
    assert "on TP1 at the bucket of 512 tokens (number 1 of 3, largest first) by the bar of TP0" in oom.message
    assert "2.90" not in oom.message  # that was free on TP0


def test_no_room_for_kv_is_said_once() -> None:
    begin = "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 64, 512], avail mem=3.00 GB"
    error = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    found = diagnose(f"[2026-09-01 00:00:00] {begin}\n{error}\n").findings
    assert [one.code for one in found if one.severity == "error"] == ["NO_ROOM_FOR_KV"]


def test_a_negative_usage_is_no_ground_for_a_plan() -> None:
    text = (LOGS / "sglang_new_breakable.log").read_text().replace("mem usage=1.71 GB", "mem usage=-0.50 GB")
    codes = [one.code for one in diagnose(text).findings]
    assert "NEGATIVE_USAGE" in codes
    assert "PEAK_ABOVE_PRINTED_USAGE" not in codes


def test_memory_that_was_free_enough_gives_no_value() -> None:
    text = (LOGS / "finding_oom_after_capture.log").read_text()
    made = re.sub(r"of which [\d.]+ [MG]iB is free", "of which 200.00 GiB is free", text)
    assert made != text
    advice = next(one for one in diagnose(made).findings if one.code == "OOM_AFTER_CAPTURE").advice
    assert " to " not in advice.partition("mem_fraction_static")[2].partition(".")[0]


def test_a_bar_with_an_absurd_bucket_is_read_at_once() -> None:
    text = "".join(
        f"Capturing num tokens (num_tokens={bucket} avail_mem={free:.2f} GB):   0%| | {done}/58 [00:01<?]\n"
        for bucket, free, done in ((99_999_999, 11.08, 0), (7680, 5.55, 1), (5120, 0.74, 6))
    )
    began = time.perf_counter()
    found = diagnose(f"[2026-03-05 09:00:00] Memory pool end. avail mem=12.70 GB\n{text}torch.OutOfMemoryError: x\n")
    assert [one.code for one in found.findings] == ["OOM_IN_CAPTURE"]
    assert time.perf_counter() - began < 20  # it took minutes


def test_a_forecast_that_the_log_disproves_is_no_ground_for_advice() -> None:
    advice = _oom(diagnose(_failed(9.0, [4, 64, 512, 8192]), model="qwen3-8b", gpu="h100-80gb")).advice
    assert "which this log disproves" in advice
    assert "may not be enough" in advice


def test_a_ceiling_counts_what_the_bars_showed_of_each_bucket() -> None:
    """4000 alone took 0.47 of 0.5 GiB: below a ceiling of 6000 it would again, which the cheap last bucket hides."""
    free = [(8000, 0.5), (6000, 0.49), (4000, 0.48), (2000, 0.01), (1000, 0.0)]
    bars = "".join(
        f"Capturing num tokens (num_tokens={bucket} avail_mem={gib:.2f} GB): 10%|# | {done}/5 [00:01<?]\n"
        for done, (bucket, gib) in enumerate(free)
    )
    begin = "Capture target prefill CUDA graph begin. backend=full, num_tokens=[1000, 2000, 4000, 6000, 8000], "
    text = f"[2026-09-01 00:00:00] {begin}avail mem=0.50 GB\n{bars}torch.OutOfMemoryError: x\n"
    assert "--cuda-graph-max-bs-prefill 4000" in _oom(diagnose(text)).advice


def test_costs_in_proportion_to_tokens_are_taken_as_such() -> None:
    """Each later bucket takes 0.02 GiB per 8 tokens; those from 80 down to 8 are left and need 1.1 of 0.5 GiB."""
    buckets = list(range(8, 8 * 31, 8))
    free = [16.1, 8.1]
    for bucket in reversed(buckets[10:-1]):
        free.append(free[-1] - 0.02 * bucket / 8)
    assert round(free[-1], 6) == 0.5
    bars = "".join(
        f"Capturing num tokens (num_tokens={bucket} avail_mem={gib:.2f} GB): 10%|# | {done}/30 [00:01<?]\n"
        for done, (bucket, gib) in enumerate(zip(reversed(buckets), free, strict=False))
    )
    begin = f"Capture target prefill CUDA graph begin. backend=full, num_tokens={buckets}, avail mem=16.10 GB"
    advice = _oom(diagnose(f"[2026-09-01 00:00:00] {begin}\n{bars}torch.OutOfMemoryError: x\n")).advice
    missing = float(advice.partition("About ")[2].partition(" GiB")[0])
    assert missing == pytest.approx(0.6, abs=0.1)  # ten times the mean of the last buckets would be 2 or more
