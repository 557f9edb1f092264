"""What this machine has: its GPUs as NVML reports them, and its main memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU as NVML sees it. `total_mib` is what nvidia-smi prints and what servers pick their tier from."""

    index: int
    uuid: str
    name: str
    total_mib: float


def list_gpus() -> list[GpuInfo]:
    """Every GPU NVML reports on this machine; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_describe(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def other_gpu_processes(uuid: str) -> int | None:
    """How many processes other than this one hold memory on the GPU; None when NVML does not tell.

    This process must have a context there. Inside a container NVML may hide the others, so a 0 is no proof.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        pids = [int(process.pid) for process in running]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    # A container numbers processes differently: one of a non-empty list is this one all the same.
    return len(pids) - 1 if pids else 0


def available_ram_bytes() -> int:
    """Bytes of main memory that can still be used without swapping (psutil's `available`)."""
    import psutil

    return int(psutil.virtual_memory().available)


def _describe(pynvml: object, index: int) -> GpuInfo:
    from typing import Any, cast

    nvml = cast(Any, pynvml)
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total = nvml.nvmlDeviceGetMemoryInfo(handle).total / (1 << 20)
    return GpuInfo(index, str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle)), total)
