"""What both devices must keep, as plain functions: the seam's contract, run by tests and by `selfcheck`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from toolkit.errors import CaptureError, one_line

if TYPE_CHECKING:
    from toolkit.prefill.devices.base import Device, Graph, Pool

MIB = 1 << 20
_STEP = 2 * MIB


class ContractViolation(AssertionError):
    """A device does not keep the contract of the seam."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """One contract check on one device. `detail` says what was wrong; empty when it passed."""

    name: str
    passed: bool
    detail: str = ""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ContractViolation(message)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        return
    raise ContractViolation(f"{what} was not refused")


def _capture(device: Device, pool: Pool, work: Callable[[], object]) -> Graph:
    graph = device.new_graph()
    graph.begin(pool)
    try:
        work()
    except BaseException:
        graph.abandon()
        raise
    graph.end()
    return graph


def _filled(device: Device, value: float, rows: int = 64) -> torch.Tensor:
    tensor = device.empty((rows, 64), torch.float32)
    tensor.fill_(value)
    return tensor


def replay_reads_static_inputs(device: Device) -> None:
    """A replay computes from what the static input holds then, not at capture."""
    source, out = _filled(device, 1.0), _filled(device, 0.0)
    with torch.no_grad(), device.capturing():
        (source * 2 + 1).sum()  # warm-up
        graph = _capture(device, device.new_pool(), lambda: out.copy_(torch.relu(source * 2 + 1)))
    source.fill_(5.0)
    out.zero_()
    graph.replay()
    device.synchronize()
    _require(bool((out == 11.0).all()), f"replay gave {out.flatten()[0].item()} instead of 11")
    source.fill_(-3.0)
    graph.replay()
    device.synchronize()
    _require(bool((out == 0.0).all()), "a second replay did not read the changed input")


def intermediates_go_back_to_the_pool(device: Device) -> None:
    """Two captures of the same work need no more pool than one: intermediates are reused."""
    source, out = _filled(device, 1.0, 4096), _filled(device, 0.0, 4096)
    pool = device.new_pool()

    def work() -> None:
        out.copy_(((source + 1) * 2 + 3) * 4)

    with torch.no_grad(), device.capturing():
        work()
        first = _capture(device, pool, work)
        once = device.pool_reserved_bytes(pool)
        second = _capture(device, pool, work)
        twice = device.pool_reserved_bytes(pool)
    _require(once is not None and once > 0, "the pool holds nothing after a capture that allocated")
    _require(once == twice, f"the same work again took the pool from {once} to {twice} bytes")
    for graph in (first, second):
        graph.replay()
    device.synchronize()
    _require(bool((out == 28.0).all()), "replays that share a pool gave a wrong result")


def segments_hand_tensors_over(device: Device) -> None:
    """A tensor made in one graph and used in a later one carries its new value at replay, across eager work."""
    source, middle, out = _filled(device, 1.0), _filled(device, 0.0), _filled(device, 0.0)
    pool = device.new_pool()
    with torch.no_grad(), device.capturing():
        (source + 1).mul(2)
        first = device.new_graph()
        first.begin(pool)
        carried = source + 1
        first.end()
        middle.copy_(source * 100)
        second = device.new_graph()
        second.begin(pool)
        out.copy_(carried * 2 + middle)
        second.end()
        del carried  # the graphs must not need the tensor to be alive
    source.fill_(3.0)
    first.replay()
    middle.copy_(source * 100)
    second.replay()
    device.synchronize()
    _require(bool((out == 308.0).all()), f"segments gave {out.flatten()[0].item()} instead of 308")


def eager_work_stays_out_of_the_pool(device: Device) -> None:
    """What runs between two segments allocates outside the private pool."""
    source, out = _filled(device, 1.0), _filled(device, 0.0)
    pool = device.new_pool()
    with torch.no_grad(), device.capturing():
        graphs = [_capture(device, pool, lambda: out.copy_(source + 1))]
        before = device.pool_reserved_bytes(pool)
        with device.accounted():
            big = torch.zeros((32 * MIB,), dtype=torch.uint8, device=device.torch_device)
        graphs.append(_capture(device, pool, lambda: out.copy_(source + 1)))
        after = device.pool_reserved_bytes(pool)
        del big
    _require(before == after, f"eager work took the pool from {before} to {after} bytes")


def host_reads_are_refused(device: Device) -> None:
    """Reading a result on the host inside a capture fails, and the device can capture afterwards."""
    source, out = _filled(device, 1.0), _filled(device, 0.0)
    pool = device.new_pool()
    refused = False
    with torch.no_grad(), device.capturing():
        try:
            _capture(device, pool, lambda: source.sum().item())
        except (CaptureError, RuntimeError):
            refused = True
    _require(refused, "a host read inside a capture was not refused")
    with torch.no_grad(), device.capturing():
        graph = _capture(device, device.new_pool(), lambda: out.copy_(source + 1))
    graph.replay()
    device.synchronize()
    _require(bool((out == 2.0).all()), "the device could not capture after a refused capture")


def misuse_is_refused(device: Device) -> None:
    """Nested begins, an end without a begin and a replay without a capture raise CaptureError."""
    source, pool = _filled(device, 1.0), device.new_pool()
    graph = device.new_graph()
    with _refused("a replay without a capture"):
        graph.replay()
    with _refused("an end without a begin"):
        graph.end()
    with torch.no_grad(), device.capturing():
        (source + 1).sum()
        graph.begin(pool)
        source.add_(1)
        with _refused("a second capture inside a capture"):
            device.new_graph().begin(pool)
        graph.end()
        with _refused("a second capture into the same graph"):
            graph.begin(pool)


def allocations_lower_free_memory(device: Device) -> None:
    """A long-lived tensor is charged in full, and given back when it dies."""
    device.empty_cache()
    before = device.free_bytes()
    tensor = device.empty((64 * MIB,), torch.uint8)
    taken = before - device.free_bytes()
    _require(64 * MIB <= taken <= 64 * MIB + 10 * _STEP, f"64 MiB lowered free memory by {taken} bytes")
    _require(int(tensor[:1024].sum()) == 0, "memory that was never written is not zero")
    del tensor
    device.empty_cache()
    back = before - device.free_bytes()
    _require(back <= _STEP, f"{back} bytes were not given back")


def ballast_leaves_exactly_this_much(device: Device) -> None:
    """leave_free gets within one allocation step above the target, and drop_ballast undoes it."""
    device.empty_cache()
    before = device.free_bytes()
    target = before - 100 * MIB
    device.leave_free(target)
    left = device.free_bytes()
    device.drop_ballast()
    _require(target <= left < target + _STEP, f"{left - target} bytes off the target")
    _require(device.free_bytes() >= before - _STEP, "the ballast was not given back")


def too_much_memory_is_out_of_memory(device: Device) -> None:
    """Asking for more than is free raises an error the device recognises, and leaves the device usable."""
    wanted = device.free_bytes() + 64 * MIB
    try:
        device.empty((wanted,), torch.uint8)
    except Exception as error:
        _require(device.is_out_of_memory(error), f"{type(error).__name__} is not recognised as out of memory")
    else:
        raise ContractViolation("more than the free memory was handed out")
    allocations_lower_free_memory(device)


def out_of_memory_inside_a_capture(device: Device) -> None:
    """Running out inside a capture is recognised, and a smaller capture works afterwards."""
    source, out = _filled(device, 1.0), _filled(device, 0.0)
    device.empty_cache()
    device.leave_free(64 * MIB)
    pool = device.new_pool()
    try:
        with torch.no_grad(), device.capturing():
            try:
                _capture(device, pool, lambda: _allocate(device, 256))
            except Exception as error:
                _require(device.is_out_of_memory(error), f"{type(error).__name__} is not recognised: {error}")
            else:
                raise ContractViolation("256 MiB were handed out of 64 MiB inside a capture")
        device.release_pool(pool)
        with torch.no_grad(), device.capturing():
            graph = _capture(device, device.new_pool(), lambda: out.copy_(source + 1))
        graph.replay()
        device.synchronize()
    finally:
        device.drop_ballast()
    _require(bool((out == 2.0).all()), "the capture after running out of memory gave a wrong result")


def _allocate(device: Device, mib: int) -> None:
    blocks = [torch.empty((32 * MIB,), dtype=torch.uint8, device=device.torch_device) for _ in range(mib // 32)]
    blocks[0].zero_()


def a_released_pool_gives_its_memory_back(device: Device) -> None:
    """Once its graphs are gone, a pool's memory is free again."""
    source, out = _filled(device, 1.0, 65536), _filled(device, 0.0, 65536)
    device.empty_cache()
    before = device.free_bytes()
    pool = device.new_pool()
    with torch.no_grad(), device.capturing():
        graph = _capture(device, pool, lambda: out.copy_((source + 1) * 2))
    _require(device.free_bytes() <= before - 16 * MIB, "the capture took no memory")
    del graph
    device.release_pool(pool)
    missing = before - device.free_bytes()
    _require(missing <= 16 * MIB, f"{missing / MIB:.0f} MiB of a released pool are still held")


def a_reservation_grows_in_place(device: Device) -> None:
    """Memory behind a reservation is charged as it comes, and a graph captured before still finds it."""
    device.empty_cache()
    before, rows = device.free_bytes(), 64 * MIB // 256
    reservation = device.reserve((rows, 64), torch.float32, _STEP)
    first = before - device.free_bytes()
    _require(first < 64 * MIB, f"addresses of 64 MiB took {first} bytes of memory at once")
    address, out = reservation.tensor.data_ptr(), _filled(device, 0.0)
    with torch.no_grad(), device.capturing():
        (reservation.tensor[:64] + 1).sum()
        graph = _capture(device, device.new_pool(), lambda: out.copy_(reservation.tensor[:64] + 1))
    device.empty_cache()
    unbacked = device.free_bytes()
    reservation.back(32 * MIB)
    taken = unbacked - device.free_bytes()
    _require(abs(taken - (32 * MIB - _STEP)) <= _STEP, f"30 MiB more lowered free memory by {taken} bytes")
    _require(reservation.tensor.data_ptr() == address, "the tensor moved when memory came behind it")
    _require(float(reservation.tensor[: 32 * MIB // 256].abs().sum()) == 0.0, "new memory is not zero")
    reservation.tensor[:64].fill_(4.0)
    graph.replay()
    device.synchronize()
    _require(bool((out == 5.0).all()), "a graph captured before the memory came reads something else")
    try:
        device.reserve((device.free_bytes() + 64 * MIB,), torch.uint8, device.free_bytes() + 64 * MIB)
    except Exception as error:
        _require(device.is_out_of_memory(error), f"{type(error).__name__} is not recognised as out of memory")
    else:
        raise ContractViolation("more than the free memory was mapped")


def the_peak_is_seen(device: Device) -> None:
    """What was used and given back in between still shows in the peak."""
    device.empty_cache()
    device.reset_peak()
    used = device.total_bytes - device.free_bytes()
    tensor = device.empty((64 * MIB,), torch.uint8)
    del tensor
    device.empty_cache()
    peak = device.peak_used_bytes() - used
    _require(peak >= 64 * MIB, f"a use of 64 MiB shows as a peak of {peak / MIB:.0f} MiB")


def time_is_positive(device: Device) -> None:
    """Timing covers the work: more of it takes longer than none."""
    source = _filled(device, 1.0, 4096)
    with torch.no_grad():
        device.time(lambda: source @ source.t())
        spent = device.time(lambda: [source @ source.t() for _ in range(8)])
    _require(spent > 0, f"eight matrix products took {spent} s")


CHECKS: dict[str, Callable[[Device], None]] = {
    check.__name__: check
    for check in (
        replay_reads_static_inputs,
        intermediates_go_back_to_the_pool,
        segments_hand_tensors_over,
        eager_work_stays_out_of_the_pool,
        host_reads_are_refused,
        misuse_is_refused,
        allocations_lower_free_memory,
        ballast_leaves_exactly_this_much,
        too_much_memory_is_out_of_memory,
        out_of_memory_inside_a_capture,
        a_released_pool_gives_its_memory_back,
        a_reservation_grows_in_place,
        the_peak_is_seen,
        time_is_positive,
    )
}
"""Every check by its name."""


def run_check(name: str, device: Device) -> CheckOutcome:
    """Run one check on a device; a failure is an outcome, never an exception."""
    try:
        CHECKS[name](device)
    except Exception as error:
        return CheckOutcome(name, False, one_line(f"{type(error).__name__}: {error}"))
    return CheckOutcome(name, True)
