"""How a start ended: by want of memory, by another failure, by a person, or not at all."""

from __future__ import annotations

import pytest

from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.diagnosis import Diagnosis

LADDER = generate_prefill_buckets(8192)
STAMP = "[2026-08-27 00:00:00] "
BEGIN = f"Capture target prefill CUDA graph begin. backend=breakable, num_tokens={LADDER}, avail mem=12.00 GB"
END = "Capture target prefill CUDA graph end. elapsed=20.00 s, mem usage=1.50 GB, avail mem=10.50 GB."
STARTED = f"{STAMP}{BEGIN}\n"
EXCEPTION = f"{STAMP}Scheduler hit an exception: Traceback (most recent call last):\n"
AT_ZERO = "Capturing num tokens (num_tokens=8192 avail_mem=12.00 GB):   0%|   | 0/58 [00:00<?, ?it/s]\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "capture.py", line 1, in capture\n'
UP = f"{STAMP}The server is fired up and ready to roll!\n"


def _found(diagnosis: Diagnosis) -> dict[str, str]:
    return {one.code: one.severity for one in diagnosis.findings}


# NVIDIA: "Resource allocation failed inside the cuBLAS library. This is usually caused by a cudaMalloc() failure."
@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\n"
        "Cuda failure 2 'out of memory'",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "RuntimeError: CUDA driver error: out of memory",
        "Exception: Capture prefill CUDA graph failed: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x",
    ],
)
def test_a_library_that_gets_no_memory_ran_out_of_it(words: str) -> None:
    diagnosis = diagnose(f"{STARTED}{EXCEPTION}{words}\n")
    assert _found(diagnosis) == {"OOM_IN_CAPTURE": "error"}
    assert "mem_fraction_static" in diagnosis.findings[0].advice


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "Want of memory",
        ),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error", "Want of memory"),
        ("MemoryError", "the host's memory"),
        ("RuntimeError: CUDA error: unspecified launch failure", "unspecified launch failure"),
    ],
)
def test_what_may_be_memory_is_not_said_to_be_something_else(words: str, said: str) -> None:
    diagnosis = diagnose(f"{STARTED}{EXCEPTION}{words}\n")
    assert _found(diagnosis) == {"SERVER_FAILED": "error"}
    assert said in diagnosis.findings[0].message
    assert "A lower fraction does not help" not in diagnosis.findings[0].advice


@pytest.mark.parametrize(("context", "blamed"), [(64, True), (40960, False)])
def test_the_context_is_only_blamed_where_it_is_shorter(context: int, blamed: bool) -> None:
    arguments = f"{STAMP}server_args=ServerArgs(model_path='m', context_length={context}, tp_size=1)\n"
    error = "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"
    (found,) = diagnose(f"{arguments}{STARTED}{EXCEPTION}{error}\n").findings
    assert found.code == "NOT_A_MEMORY_FAILURE"
    assert ("context" in f"{found.message} {found.advice}") is blamed


def test_a_hint_that_speaks_of_compiling_is_no_compile_error() -> None:
    error = "RuntimeError: CUDA error: unspecified launch failure; "
    hint = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    assert _found(diagnose(f"{STARTED}{EXCEPTION}{error}{hint}\n")) == {"SERVER_FAILED": "error"}


@pytest.mark.parametrize("killed", ["", f"{STAMP}Received sigquit from a child process. It usually means it failed.\n"])
def test_a_start_that_somebody_ended_has_not_failed(killed: str) -> None:
    diagnosis = diagnose(f"{STARTED}{AT_ZERO}{TRACEBACK}KeyboardInterrupt\n{killed}")
    assert _found(diagnosis) == {"COMPILING_NOT_HUNG": "info", "LOG_INCOMPLETE": "info"}
    assert any("KeyboardInterrupt" in one.message for one in diagnosis.findings)


def test_a_request_that_was_cancelled_hides_no_crash() -> None:
    served = f"{STARTED}{STAMP}{END}\n{UP}{TRACEBACK}asyncio.exceptions.CancelledError\n"
    assert _found(diagnose(served)) == {}
    batch = "Prefill batch, #new-seq: 1, #new-token: 100, #cached-token: 0, cuda graph: True, x\n"
    crash = f"{EXCEPTION}RuntimeError: CUDA error: an illegal memory access was encountered\n"
    assert _found(diagnose(f"{served}{STAMP}{batch}{crash}")) == {"SERVER_FAILED": "error"}


def test_a_person_may_end_what_an_exception_did_not() -> None:
    alone = "ModuleNotFoundError: No module named 'deep_gemm'\n"
    diagnosis = diagnose(f"{STARTED}{AT_ZERO}{alone}{TRACEBACK}KeyboardInterrupt\n")
    assert _found(diagnosis) == {"COMPILING_NOT_HUNG": "info", "LOG_INCOMPLETE": "info"}


def test_ctrl_c_after_a_crash_does_not_hide_it() -> None:
    crash = f"{STARTED}{EXCEPTION}RuntimeError: Failed to build JIT module x\n"
    assert _found(diagnose(f"{crash}{TRACEBACK}KeyboardInterrupt\n")) == {"NOT_A_MEMORY_FAILURE": "error"}


@pytest.mark.parametrize(
    "after",
    [
        f"{STAMP}Compiling a graph for dynamic shape takes 3.38 s\n",
        AT_ZERO.replace("0/58", "1/58"),
        f"{STAMP}{END}\n{UP}",
    ],
)
@pytest.mark.parametrize("head", ["", TRACEBACK])
def test_an_exception_that_a_start_outlives_is_no_failure(head: str, after: str) -> None:
    diagnosis = diagnose(f"{STARTED}{AT_ZERO}{head}ModuleNotFoundError: No module named 'deep_gemm'\n{after}")
    assert {one.severity for one in diagnosis.findings} <= {"info"}


def test_an_exception_as_the_last_word_is_not_taken_for_the_end() -> None:
    found = _found(diagnose(f"{STARTED}{AT_ZERO}ModuleNotFoundError: No module named 'deep_gemm'\n"))
    assert found == {"SERVER_FAILED": "warning", "COMPILING_NOT_HUNG": "info", "LOG_INCOMPLETE": "info"}


@pytest.mark.parametrize("stage", ["", f"{STARTED}", f"{STARTED}{STAMP}{END}\n"])
@pytest.mark.parametrize("error", ["ValueError: unsupported thing", "huggingface_hub.utils.Gated: no access"])
def test_a_start_that_ended_in_an_exception_is_never_called_sound(stage: str, error: str) -> None:
    text = f"{STAMP}Load weight begin. avail mem=78.48 GB\n{stage}{TRACEBACK}{error}\n"
    diagnosis = diagnose(text)
    assert diagnosis.worst in ("warning", "error")
    assert "nothing wrong" not in diagnosis.summary
    assert text.count("\n") - 2 <= max(line for one in diagnosis.findings for line in one.lines)


def test_a_gate_line_after_a_captured_graph_does_not_make_it_skipped() -> None:
    gate = "Disabling auto-selected prefill CUDA graph: only 2.05 GiB is free after model/KV/eager-buffer allocation; "
    gate += "at least 4.00 GiB is required for capture. Set an explicit prefill CUDA graph backend to override it."
    assert "prefill graph captured" in diagnose(f"{STARTED}{STAMP}{END}\n{STAMP}{gate}\n{UP}").summary
    assert "prefill graph skipped" in diagnose(f"{STAMP}{gate}\n{UP}").summary
