"""`prefill-lab plan`: only JSON with --json, one line for bad input, and never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.catalogue import model_ids
from toolkit.cli import main
from toolkit.cli_output import Progress
from toolkit.cli_plan import _OPTIONS
from toolkit.forecast.plan_settings import PlanSettings
from toolkit.hardware import list_gpu_specs

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "model": {"id", "architecture", "parameters", "layers", "attention", "weights_gib_per_rank"},
    "gpu": {"id", "total_gib"},
    "backend": {"requested", "resolved", "explicit", "reasons"},
    "resolved": {"chunked_prefill_size", "decode_max_bs", "prefill_ceiling"},
    "ledger": {
        *("total_gib", "context_gib", "weights_gib", "kv_cache_gib", "kv_cache_tokens", "static_buffers_gib"),
        "free_before_capture_gib",
    },
    "forecast": {
        *("engine", "total_gib", "low_gib", "high_gib", "peak_gib", "torch_pool_gib", "non_torch_gib", "per_bucket"),
    },
}  # fmt: skip
POLICY_KEYS = {"runner", "outcome", "reason", "captured_buckets", "free_after_gib", "kv_cache_tokens"}


def test_json_has_the_stable_keys_and_nothing_else_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-8b", "--gpu", "h100-80gb", "--json"]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert err == ""
    for part, keys in KEYS.items():
        assert keys <= set(plan[part]), part
    assert {"tp", "buckets", "mem_fraction_static", "policies", "advice"} <= set(plan)
    assert {"gated", "ungated"} <= set(plan["policies"])
    assert all(set(one) >= POLICY_KEYS for one in plan["policies"].values())
    bucket = plan["forecast"]["per_bucket"][0]
    assert set(bucket) >= {"num_tokens", "added_mib", "cumulative_mib", "peak_mib"}
    assert [one["num_tokens"] for one in plan["forecast"]["per_bucket"]] == plan["buckets"][::-1]


def test_a_table_says_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --model kimi-k2 --tp 8 --gpu h100-80gb --mem-fraction 0.97 --sglang-version 0.5.16"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    for words in ("int4", "KimiK25ForConditionalGeneration", "tc_piecewise", "4.00 GiB", "free before capture"):
        assert words in out
    assert main([*command.split(), "--explain"]) == 0
    assert "[counted from the config" in capsys.readouterr().out


def test_solving_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--solve", "mem-fraction", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["solved"]["what"] == "mem-fraction" and found["solved"]["value"] == found["mem_fraction_static"]
    assert found["left_gib"] >= found["reserve_gib"]
    assert main(["plan", "--solve", "max-tokens", "--mem-fraction", "0.97"]) == 0
    assert "largest max-tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--mem-fraction 0", "memory fraction 0 is out of range"),
        ("--mem-fraction 1.2", "memory fraction 1.2 is out of range"),
        ("--tp 3", "tp 3 does not divide"),
        ("--tp 0", "tp 0 is out of range"),
        ("--gpu h100-90gb", "unknown GPU 'h100-90gb' (close: h100-80gb"),
        ("--max-tokens 3", "ceiling 3 leaves no bucket"),
        ("--backend tc_piecewise", "0.5.21"),
        ("--sglang-version 0.4", "versions are"),
        ("--engine crystal", "engines are sglang"),
        ("--policy never", "policies are"),
        ("--weights int2", "weights 'int2' cannot be used"),
        ("--solve speed", "mem-fraction, max-tokens"),
        ("--reserve -1", "reserve (GiB) -1 is out of range"),
        ("--free-memory 3 --mem-fraction 0.9", "exclude each other"),
        ("--model kimi-k2-instruct --tp 8", "leave no KV pool"),
        ("--gpu t4", "raise --tp"),
        ("--free-memory 70", "cannot be left"),
        ("--model no-such-model", "unknown model"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


def test_a_plan_of_a_catalogue_model_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, toolkit; toolkit.plan(); print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_every_setting_has_an_option_or_is_of_the_toolkits_own_runner() -> None:
    assert set(PlanSettings.model_fields) - set(_OPTIONS) == {"request_slots", "max_context"}


_CHOICES = {
    "--model": st.sampled_from([*model_ids(), "x", ""]),
    "--gpu": st.sampled_from([*(spec.id for spec in list_gpu_specs()), "x"]),
    "--tp": st.sampled_from(["1", "2", "3", "8", "64", "0", "-1", "1e9", "x"]),
    "--mem-fraction": st.one_of(st.just("auto"), st.floats(allow_nan=True).map(str), st.floats(0, 1).map(str)),
    "--max-tokens": st.integers(-10, 40000).map(str),
    "--buckets": st.sampled_from(["1", "8,16", "0", "x", "1048576"]),
    "--chunked-prefill-size": st.sampled_from(["-1", "1", "512", "8192", "x"]),
    "--backend": st.sampled_from(["auto", "full", "breakable", "tc_piecewise", "disabled", "x"]),
    "--weights": st.sampled_from(["bf16", "fp8", "int4"]),
    "--kv-dtype": st.sampled_from(["bf16", "fp8", "x"]),
    "--dtype": st.sampled_from(["bf16", "fp16", "fp32"]),
    "--policy": st.sampled_from(["all", "gated", "gated,ungated", "", ","]),
    "--sglang-version": st.sampled_from(["0.5.15", "0.5.16", "0.5.21", "0.5.23", ""]),
    "--reserve": st.floats().map(str),
    "--max-running-requests": st.integers(-1, 10_000).map(str),
    "--context-length": st.sampled_from(["1", "4096", "1000000000", "x"]),
    "--free-memory": st.floats(0, 100).map(str),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.fixed_dictionaries({}, optional=_CHOICES))
def test_never_a_traceback(given_choices: dict[str, str]) -> None:
    arguments = [f"{option}={value}" for option, value in given_choices.items()]
    if not {"--max-tokens", "--buckets"} & set(given_choices):
        arguments.append("--max-tokens=512")  # shorter ladders, more examples
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", *arguments, "--json"])
    assert code in (0, 2), err.getvalue()
    if code:
        assert out.getvalue() == "" and err.getvalue().count("\n") == 1
    else:
        assert json.loads(out.getvalue())["policies"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("arguments", ["plan --json", "plan", "plan --help", "--version"])
def test_output_that_is_lost_is_an_error_on_one_line(arguments: str) -> None:
    command = [sys.executable, "-m", "toolkit.cli", *arguments.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert "standard output cannot be written (No space left on device)" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_reader_that_leaves_and_a_lost_standard_error_stop_nothing() -> None:
    command = [sys.executable, "-m", "toolkit.cli", "plan", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    with Path("/dev/full").open("w") as full:
        with Progress(full) as show:
            show({"event": "log", "line": "x" * 100_000})
        done = subprocess.run([*command, "--gpu", "x"], stdout=subprocess.PIPE, stderr=full, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, b"")
