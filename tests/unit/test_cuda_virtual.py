"""Virtual memory of a CUDA device against a stand-in driver: which calls, in which order, and what errors leave."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.errors import DeviceUnavailable
from toolkit.prefill.devices import cuda_virtual
from toolkit.prefill.devices.cuda_virtual import STEP, CudaReservation

BASE = 7 << 40


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver:
    """What the reservation uses of `cuda.bindings.driver`, with every call in `calls`, by name and sizes."""

    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace
    CUdeviceptr = int
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")

    def __init__(self, granularity: int = STEP) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse: dict[str, Result] = {}
        self.granularity = granularity
        self.handles = 0

    def _answer(self, name: str, *arguments: Any, value: Any = None) -> tuple[Any, ...]:
        self.calls.append((name, *arguments))
        error = self.refuse.get(name, Result.CUDA_SUCCESS)
        return (error, value if error is Result.CUDA_SUCCESS else None)

    def cuMemGetAllocationGranularity(self, properties: Any, flag: str) -> tuple[Any, ...]:
        assert (properties.type, properties.location.type, flag) == ("pinned", "device", "minimum")
        return self._answer("granularity", properties.location.id, value=self.granularity)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        return self._answer("reserve", size, value=BASE)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        self.handles += 1
        return self._answer("create", size, value=f"handle {self.handles}")

    def cuMemMap(self, address: int, size: int, offset: int, handle: str, flags: int) -> tuple[Any, ...]:
        return self._answer("map", address - BASE, size, handle)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        assert (count, access[0].flags, access[0].location.type) == (1, "read and write", "device")
        return self._answer("access", address - BASE, size)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        return self._answer("unmap", address - BASE, size)

    def cuMemRelease(self, handle: str) -> tuple[Any, ...]:
        return self._answer("release", handle)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        return self._answer("free", address - BASE, size)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver whose memory is this machine's: torch sees host bytes in place of the range."""
    stand_in = Driver()

    def over(where: Any, index: int) -> torch.Tensor:
        spec = where.__cuda_array_interface__
        assert (spec["data"], spec["typestr"], index) == ((BASE, False), "|u1", 3)
        tensor = torch.full(spec["shape"], 0xFF, dtype=torch.uint8)
        tensor.holder = where  # as torch holds the object that it was given
        return tensor

    monkeypatch.setattr(cuda_virtual, "_driver", lambda: stand_in)
    monkeypatch.setattr(cuda_virtual, "_tensor_over", over)
    yield stand_in


def make(rows: int = 5 << 20, backed: int = 3 << 20) -> CudaReservation:
    return CudaReservation(3, (rows, 2), torch.int8, backed)


def names(driver: Driver) -> list[str]:
    return [call[0] for call in driver.calls]


# --- what is asked of the driver ----------------------------------------------------------------------------


def test_addresses_come_first_then_memory_behind_the_front(driver: Driver) -> None:
    reservation = make()
    assert driver.calls == [
        ("granularity", 3),
        ("reserve", 10 << 20),
        ("create", 4 << 20),
        ("map", 0, 4 << 20, "handle 1"),
        ("access", 0, 4 << 20),
    ]
    assert reservation.backed_bytes == 4 << 20
    assert (tuple(reservation.tensor.shape), reservation.tensor.dtype) == ((5 << 20, 2), torch.int8)


def test_more_memory_is_mapped_behind_what_there_is_and_zeroed(driver: Driver) -> None:
    reservation = make()
    reservation.tensor.view(-1)[: 4 << 20] = 9
    driver.calls.clear()
    reservation.back(5 << 20)
    assert driver.calls == [("create", STEP), ("map", 4 << 20, STEP, "handle 2"), ("access", 4 << 20, STEP)]
    flat = reservation.tensor.view(-1)
    assert bool((flat[: 4 << 20] == 9).all())
    assert not flat[4 << 20 : 6 << 20].any()
    assert bool((flat[6 << 20 :] == -1).all())  # nothing is there, so nothing is written


def test_what_is_backed_already_is_not_asked_for_again(driver: Driver) -> None:
    reservation = make()
    driver.calls.clear()
    for nbytes in (0, 1, 4 << 20):
        reservation.back(nbytes)
    assert driver.calls == []


def test_memory_never_goes_beyond_the_addresses(driver: Driver) -> None:
    reservation = make(backed=0)
    reservation.back(1 << 40)
    assert reservation.backed_bytes == 10 << 20
    assert sum(call[1] for call in driver.calls if call[0] == "create") == 10 << 20


def test_everything_is_given_back_in_order_once_the_last_tensor_is_gone(driver: Driver) -> None:
    reservation = make()
    reservation.back(6 << 20)
    tensor = reservation._bytes
    driver.calls.clear()
    del reservation
    gc.collect()
    assert driver.calls == []  # somebody may still read it
    del tensor
    gc.collect()
    assert driver.calls == [
        ("unmap", 0, 4 << 20),
        ("release", "handle 1"),
        ("unmap", 4 << 20, STEP),
        ("release", "handle 2"),
        ("free", 0, 10 << 20),
    ]


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "undone"),
    [
        ("create", []),
        ("map", [("release", "handle 2")]),
        ("access", [("unmap", 4 << 20, STEP), ("release", "handle 2")]),
    ],
)
@pytest.mark.parametrize("error", [Result.CUDA_ERROR_OUT_OF_MEMORY, Result.CUDA_ERROR_INVALID_VALUE])
def test_a_refusal_leaves_what_there_was(driver: Driver, call: str, undone: list[Any], error: Result) -> None:
    reservation = make()
    driver.calls.clear()
    driver.refuse[call] = error
    memory = error is Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(torch.OutOfMemoryError if memory else DeviceUnavailable, match=r"memory") as raised:
        reservation.back(6 << 20)
    assert memory or error.name in str(raised.value)
    assert reservation.backed_bytes == 4 << 20
    assert driver.calls[-len(undone) :] == undone if undone else names(driver) == ["create"]
    driver.refuse.clear()
    driver.handles = 1
    reservation.back(6 << 20)
    assert reservation.backed_bytes == 6 << 20


def test_a_first_mapping_that_fails_gives_the_addresses_back(driver: Driver) -> None:
    driver.refuse["create"] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(torch.OutOfMemoryError):
        make()
    gc.collect()
    assert names(driver) == ["granularity", "reserve", "create", "free"]


@pytest.mark.parametrize("granularity", [64 << 10, 1 << 20, 2 << 20])
def test_smaller_steps_of_a_device_will_do(driver: Driver, granularity: int) -> None:
    driver.granularity = granularity
    assert make().backed_bytes == 4 << 20


@pytest.mark.parametrize("granularity", [3 << 20, 4 << 20, 32 << 20])
def test_steps_that_do_not_divide_ours_are_refused_before_anything_is_taken(driver: Driver, granularity: int) -> None:
    driver.granularity = granularity
    with pytest.raises(DeviceUnavailable, match=str(granularity)):
        make()
    assert names(driver) == ["granularity"]


def test_a_driver_without_the_function_is_refused_by_its_name(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise RuntimeError('Function "cuMemGetAllocationGranularity" not found')

    monkeypatch.setattr(driver, "cuMemGetAllocationGranularity", missing)
    with pytest.raises(DeviceUnavailable, match="cuMemGetAllocationGranularity"):
        make()


def test_without_the_bindings_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(DeviceUnavailable, match="cuda-bindings"):
        make()
