"""Virtual memory of a CUDA device: addresses now, memory behind them later, through the driver's own calls.

Captured graphs keep the addresses they saw. So a KV pool whose size is decided after the capture needs its whole range
of addresses before, and `cuMemMap` puts memory behind it step by step without moving anything.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from toolkit.errors import DeviceUnavailable, one_line

STEP = 2 << 20
"""Bytes: smallest mapping of current cards (`cuMemGetAllocationGranularity`); a larger one is refused."""
_ALLOWED = "a CUDA driver with virtual memory management, and the package cuda-bindings"


class CudaReservation:
    """A tensor over reserved addresses of device `index`; memory is mapped behind its front."""

    def __init__(self, index: int, shape: Sequence[int], dtype: torch.dtype, backed_bytes: int) -> None:
        self._index, self._driver = index, _driver()
        nbytes = math.prod(shape) * dtype.itemsize
        self._size = _round_up(max(nbytes, 1))
        self._properties = self._of_device()
        self._base = int(_checked(self._driver.cuMemAddressReserve(self._size, 0, self._driver.CUdeviceptr(0), 0)))
        self._handles: list[tuple[int, int, Any]] = []
        self.backed_bytes = 0
        # The tensor holds the range and may outlive this object: memory goes when the range does.
        self._where = where = _Range(self._base, nbytes)
        weakref.finalize(where, _unmap, self._driver, index, self._base, self._size, self._handles).atexit = False
        # Torch asks the driver whose pointer this is, which it only knows once something is mapped there.
        self.back(max(backed_bytes, 1))
        self._bytes = _tensor_over(where, index)
        self.tensor = self._bytes.view(dtype).view(tuple(shape))
        self._zero(0)

    def back(self, nbytes: int) -> None:
        """Map memory behind the first `nbytes`, in whole steps, zeroed. Raises torch.OutOfMemoryError."""
        wanted, before = min(_round_up(nbytes), self._size), self.backed_bytes
        if wanted <= before:
            return
        extra = wanted - before
        address, handle = self._base + before, _checked(self._driver.cuMemCreate(extra, self._properties, 0))
        try:
            _checked(self._driver.cuMemMap(address, extra, 0, handle, 0))
            try:
                _checked(self._driver.cuMemSetAccess(address, extra, [self._access()], 1))
            except Exception:
                self._driver.cuMemUnmap(address, extra)
                raise
        except Exception:
            self._driver.cuMemRelease(handle)
            raise
        self._handles.append((before, extra, handle))
        self.backed_bytes = wanted
        if before:
            self._zero(before)

    def _zero(self, start: int) -> None:
        """Slots that were never written must hold no garbage NaN."""
        self._bytes[start : self.backed_bytes].zero_()

    def _location(self) -> Any:
        location = self._driver.CUmemLocation()
        location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._index
        return location

    def _of_device(self) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location()
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        try:
            step = int(_checked(driver.cuMemGetAllocationGranularity(properties, smallest)))
        except RuntimeError as error:
            # The bindings load a driver's functions one by one and name the one that it does not have.
            raise DeviceUnavailable(f"addresses cannot be reserved here ({one_line(str(error))})", _ALLOWED) from None
        if STEP % step:
            raise DeviceUnavailable(f"this device maps memory in steps of {step} bytes", f"steps that divide {STEP}")
        return properties

    def _access(self) -> Any:
        access = self._driver.CUmemAccessDesc()
        access.location = self._location()
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access


class _Range:
    """Device bytes in the words that torch understands."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2
        }  # fmt: skip


def _tensor_over(where: _Range, index: int) -> torch.Tensor:
    """The range as bytes, without a copy; the tensor keeps `where` alive."""
    return torch.as_tensor(where, device=torch.device("cuda", index))


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DeviceUnavailable(
            "addresses cannot be reserved without memory: cuda-bindings is not installed",
            _ALLOWED,
            "pip install cuda-bindings, or take a policy that sizes the KV pool first",
        ) from None
    return driver


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises torch.OutOfMemoryError or DeviceUnavailable, naming the driver's error."""
    error, *values = answer
    if int(error) == 0:
        return values[0] if values else None
    name = getattr(error, "name", str(error))
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise torch.OutOfMemoryError("CUDA out of memory while memory was mapped behind reserved addresses")
    raise DeviceUnavailable(f"the driver refused to reserve or map memory ({name})", _ALLOWED)


def _unmap(driver: Any, index: int, base: int, size: int, handles: list[tuple[int, int, Any]]) -> None:
    """Give memory and addresses back. Nobody can act on an error at this point."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize(index)  # the driver does not wait for work that still uses the range
    for offset, extra, handle in handles:
        driver.cuMemUnmap(base + offset, extra)
        driver.cuMemRelease(handle)
    driver.cuMemAddressFree(base, size)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // STEP) * STEP
