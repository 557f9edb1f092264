"""Which devices can be picked on this machine."""

from __future__ import annotations

import os

from toolkit.hardware import GpuInfo, list_gpus
from toolkit.widgets.choice import DeviceOption

CPU = DeviceOption("cpu", "CPU, memory accounted")


def device_options() -> tuple[DeviceOption, ...]:
    """Every GPU that CUDA would show to a capture, in its order, and the CPU device last."""
    shown = visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpus = [
        DeviceOption(f"cuda:{number}", f"GPU {number}: {gpu.name}, {gpu.total_mib:.0f} MiB", gpu.total_mib, gpu.name)
        for number, gpu in enumerate(shown)
    ]
    return (*gpus, CPU)


def visible_gpus(gpus: list[GpuInfo], visible: str | None) -> list[GpuInfo]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order: indices or the beginnings of UUIDs.

    As in CUDA, everything from the first entry on that names no GPU is hidden. None hides nothing.
    """
    if visible is None:
        return gpus
    shown: list[GpuInfo] = []
    for word in (part.strip() for part in visible.split(",")):
        found = [gpu for gpu in gpus if word and (str(gpu.index) == word or gpu.uuid.startswith(word))]
        if len(found) != 1 or found[0] in shown:
            break
        shown += found
    return shown
