"""The seam: Device and Graph, on CUDA and on the accounted CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.errors import DeviceUnavailable

if TYPE_CHECKING:
    from toolkit.prefill.devices.base import Device

GIB = 1 << 30


def make_device(name: str, device_memory_gib: float) -> Device:
    """The device called `auto`, `cpu`, `cuda` or `cuda:N`. `device_memory_gib` is the CPU device's capacity.

    Raises DeviceUnavailable when the machine has no such device.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        from toolkit.prefill.devices.cpu import CpuDevice

        return CpuDevice(int(device_memory_gib * GIB))
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        there = ", ".join([f"cuda:{number}" for number in range(count)] + ["cpu"])
        raise DeviceUnavailable(
            f"device {name} is not on this machine", f"devices here are {there}", "try --device auto"
        )
    from toolkit.prefill.devices.cuda import CudaDevice

    return CudaDevice(index)
