"""What goes wrong in a start-up, and the arguments it was given, as servers print them."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.serverlogs import diagnose
from toolkit.serverlogs.events import NO_RANK, CaptureFailed, EngineStart, ErrorLine, Event, OutOfMemory
from toolkit.serverlogs.parse import parse


def events(text: str) -> list[Event]:
    return list(parse(text.encode()))


OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 198.00 MiB. GPU 0 has a total capacity of 79.25 GiB of which 55.00 MiB is "
    "free. Of the allocated memory 77.25 GiB is allocated by PyTorch, with 156.00 MiB allocated in private pools "
    "(e.g., CUDA Graphs), and 1014.25 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize("name", ["torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "RuntimeError"])
def test_an_allocator_that_is_out_of_memory_says_how_much(name: str) -> None:
    (event,) = events(f"{name}: {OUT_OF_MEMORY}")
    assert isinstance(event, OutOfMemory)
    found = (event.source, event.tried_gib, event.free_gib, event.total_gib, event.private_pools_gib)
    assert found == ("allocator", 198 / 1024, 55 / 1024, 79.25, 156 / 1024)


def test_a_driver_that_is_out_of_memory_is_told_apart() -> None:
    for words in ("torch.AcceleratorError: CUDA error: out of memory", "RuntimeError: CUDA error: out of memory"):
        (event,) = events(words)
        assert isinstance(event, OutOfMemory) and event.source == "driver"
    (event,) = events("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert isinstance(event, ErrorLine) and (event.kind, event.fatal) == ("AcceleratorError", False)


def test_a_failed_capture_is_memory_only_when_it_says_so() -> None:
    failed = "Exception: Capture prefill CUDA graph failed: "
    assert [type(event) for event in events(failed + OUT_OF_MEMORY)] == [OutOfMemory, CaptureFailed]
    (event,) = events(failed + "Failed to build JIT module sgl_kernel_jit")
    assert event == CaptureFailed(1, NO_RANK, "prefill", "Failed to build JIT module sgl_kernel_jit")
    (event,) = events("Exception: Capture cuda graph failed: Ninja build failed.")
    assert isinstance(event, CaptureFailed) and event.phase == "decode"


@pytest.mark.parametrize(
    ("words", "kind", "fatal"),
    [
        (
            "NotImplementedError: Breakable CUDA graph is not compatible with memory saver mode",
            "NotImplementedError",
            False,
        ),
        ("torch._dynamo.exc.Unsupported: Attempted to call function marked as skipped", "Unsupported", False),
        ("AssertionError", "AssertionError", False),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "NotEnoughMemory", True),
        (
            "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):",
            "SchedulerException",
            True,
        ),
        (
            "[2026-01-01 00:00:00] Received sigquit from a child process. It usually means the child failed.",
            "ChildDied",
            True,
        ),
        ("[2026-01-01 00:00:00] Piecewise CUDA Graph failed with error: CUDA Error: x", "PiecewiseFailed", True),
    ],
)
def test_other_ends_are_named(words: str, kind: str, fatal: bool) -> None:
    (event,) = events(words)
    assert isinstance(event, ErrorLine) and (event.kind, event.fatal) == (kind, fatal)


# --- arguments ----------------------------------------------------------------------------------------------


def test_arguments_are_read_by_name_and_the_graph_configuration_by_phase() -> None:
    (event,) = events(
        "[2026-08-27 00:00:00] server_args=ServerArgs(model_path='a/b (c), d', draft_model_path='x', "
        "mem_fraction_static=0.872, context_length=None, "
        'enable_lora=False, cuda_graph_bs=[1, 2, 4], attention_backend="fa3", max_running_requests=-5, '
        "cuda_graph_config=CudaGraphConfig(decode=PhaseConfig(backend=<Backend.FULL: 'full'>, max_bs=256), "
        "prefill=PhaseConfig(backend='breakable', max_bs=8192, bs=[4, 8])), forward_hooks=None, tp_size=4"
    )
    assert isinstance(event, EngineStart)
    assert event.values == {
        **dict(model_path="a/b (c), d", mem_fraction_static=0.872, context_length=None, enable_lora=False),
        **dict(cuda_graph_bs=(1, 2, 4), attention_backend="fa3", max_running_requests=-5),
        **{"decode.backend": "full", "decode.max_bs": 256, "prefill.backend": "breakable"},
        **{"prefill.max_bs": 8192, "prefill.bs": (4, 8)},
        # tp_size=4 is cut: it may have been 40
    }


@pytest.mark.parametrize(
    "line",
    [
        "[2026-08-27 00:01:00] Receive: obj=GenerateReqInput(rid='a', text='{}', x=1)",
        "[2026-08-27 00:01:00] Finish: obj=GenerateReqInput(rid='a'), out={{'text': '{}'}}",
        "INFO 10-05 09:11:20 [logger.py:39] Received request cmpl-1: prompt: '{}', params: x",
        "[2026-08-27 00:01:00] odd.module: request(text='{}')",
    ],
)
def test_what_a_user_wrote_is_no_failure_of_the_server(line: str) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB is free"
    clean = (Path(__file__).resolve().parents[1] / "serverlogs" / "sglang_clean.log").read_text()
    assert [one for one in diagnose(f"{clean}{line.format(said)}\n").findings if one.severity == "error"] == []
