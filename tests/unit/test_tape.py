"""The tape: what was recorded runs again on the same addresses, and what cannot be recorded is refused."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import CaptureError
from toolkit.prefill.devices.cpu import CpuDevice, CpuGraph, CpuPool

MIB, GIB = 1 << 20, 1 << 30
INF = float("inf")


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(GIB)


@contextmanager
def recording(device: CpuDevice, pool: CpuPool) -> Iterator[CpuGraph]:
    """Record the block; a failure in it leaves nothing open."""
    graph = device.new_graph()
    graph.begin(pool)
    try:
        yield graph
    except BaseException:
        graph.abandon()
        raise
    graph.end()


def record(device: CpuDevice, work: Callable[[], object], pool: CpuPool | None = None) -> CpuGraph:
    with torch.no_grad(), recording(device, pool or device.new_pool()) as graph:
        work()
    return graph


def tape_of(graph: CpuGraph) -> Any:
    assert graph._tape is not None
    return graph._tape


# --- replay -------------------------------------------------------------------------------------------------


def test_a_replay_reads_and_writes_the_same_addresses_with_whatever_is_there_now(device: CpuDevice) -> None:
    source, out = torch.arange(4.0), torch.zeros(4)
    graph = record(device, lambda: out.copy_(source * 2 + 1))
    assert out.tolist() == [1, 3, 5, 7]
    address = out.data_ptr()
    source.copy_(torch.tensor([10.0, 0, -1, INF]))
    out.zero_()
    for _ in range(2):
        graph.replay()
        assert out.tolist() == [21, 1, -1, INF]
    assert out.data_ptr() == address
    assert graph.node_count == 3


def test_the_program_is_straight_line_code_of_its_own(device: CpuDevice) -> None:
    source, out = torch.ones(3), torch.zeros(3)
    graph = record(device, lambda: out.copy_(torch.relu(source).neg().exp()))
    program = tape_of(graph).program
    assert program.__code__.co_filename.startswith("<tape ")
    code = list(dis.get_instructions(program))
    assert not [one for one in code if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs]
    assert sum(one.opname.startswith("CALL") and "INTRINSIC" not in one.opname for one in code) == 4


def test_intermediates_live_only_as_long_as_they_are_needed(device: CpuDevice) -> None:
    source, out = torch.ones(6 * MIB), torch.zeros(1)

    def chain() -> None:
        value = source
        for _ in range(8):
            value = value + 1
        out.copy_(value.sum())

    graph = record(device, chain)
    reserved = device.allocator.reserved_bytes()
    device.reset_peak()
    with device.accounted():  # a replay on its own charges nothing; here it shows what it holds
        graph.replay()
    assert out.item() == 9 * 6 * MIB
    # Two of 24 MiB at a time and a small segment for the sum, where eight would take 192 MiB.
    assert device.peak_used_bytes() - reserved <= 50 * MIB


def test_nothing_that_was_made_inside_survives_a_replay(device: CpuDevice) -> None:
    source, out = torch.ones(4), torch.zeros(4)
    pool = device.new_pool()
    kept: list[torch.Tensor] = []
    first = record(device, lambda: kept.append(source * 2), pool)
    second = record(device, lambda: out.copy_(kept.pop() + 1), pool)
    before = device.allocator.allocated_bytes(pool.key)
    for value in (5.0, 6.0):
        source.fill_(value)
        first.replay()
        assert len(pool.session.slots) == 1
        second.replay()
        assert out.tolist() == [2 * value + 1] * 4
        assert pool.session.slots == {}
    assert device.allocator.allocated_bytes(pool.key) == before


# --- what tapes hand over -----------------------------------------------------------------------------------


def test_a_tensor_may_be_read_by_several_later_tapes(device: CpuDevice) -> None:
    source, sums = torch.ones(2), [torch.zeros(2) for _ in range(3)]
    pool, made = device.new_pool(), {}
    graphs = [record(device, lambda: made.update(x=source * 3), pool)]
    for number in range(3):
        graphs.append(record(device, lambda number=number: sums[number].copy_(made["x"] + number), pool))
    made.clear()
    source.fill_(2)
    for graph in graphs:
        graph.replay()
    assert [x.tolist() for x in sums] == [[6, 6], [7, 7], [8, 8]]
    assert pool.session.slots == {}


def test_what_a_later_tape_writes_in_place_reaches_the_tape_after_it(device: CpuDevice) -> None:
    source, out = torch.ones(2), torch.zeros(2)
    pool, made = device.new_pool(), {}
    graphs = [
        record(device, lambda: made.update(x=source + 1), pool),
        record(device, lambda: made["x"].mul_(10), pool),
        record(device, lambda: out.copy_(made["x"][:1].expand(2)), pool),
    ]
    made.clear()
    source.fill_(4)
    for graph in graphs:
        graph.replay()
    assert out.tolist() == [50, 50]


def test_segments_out_of_order_are_an_error_and_in_order_they_run_again(device: CpuDevice) -> None:
    source, out = torch.ones(2), torch.zeros(2)
    pool, made = device.new_pool(), {}
    first = record(device, lambda: made.update(x=source + 1), pool)
    second = record(device, lambda: out.copy_(made["x"]), pool)
    made.clear()
    with pytest.raises(CaptureError, match="order they were captured"):
        second.replay()
    first.replay()
    second.replay()
    with pytest.raises(CaptureError, match="order they were captured"):
        second.replay()
    source.fill_(7)
    first.replay()
    second.replay()
    assert out.tolist() == [8, 8]


def test_buckets_that_share_a_pool_do_not_disturb_each_other(device: CpuDevice) -> None:
    source, out, pool = torch.ones(8), torch.zeros(8), device.new_pool()
    graphs = {}
    for rows in (8, 4, 2):
        made: dict[str, torch.Tensor] = {}
        one = record(device, lambda rows=rows, made=made: made.update(x=source[:rows] * rows), pool)
        two = record(device, lambda rows=rows, made=made: out[:rows].copy_(made.pop("x") + 1), pool)
        graphs[rows] = (one, two)
    for rows in (2, 8, 4, 8, 2):
        source.fill_(float(rows))
        out.zero_()
        for graph in graphs[rows]:
            graph.replay()
        assert out.tolist() == [rows * rows + 1] * rows + [0] * (8 - rows)


# --- kinds of calls -----------------------------------------------------------------------------------------

TABLE = torch.arange(24.0).view(6, 4)
INDEX = torch.tensor([3, 0, 3])
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in place": lambda x: (x + 1).mul_(2).clamp_(min=-1.0).neg_(),
    "in place on a view": lambda x: _changed_by_view(x),
    "several results": lambda x: torch.cat([part * n for n, part in enumerate((x + 1).split(2))]),
    "results left unused": lambda x: (x * 2).split([1, 2, 3])[1],
    "named results": lambda x: x.topk(2, dim=-1).values + x.topk(2, dim=-1).indices,
    "min and max together": lambda x: torch.aminmax(x)[0] + torch.aminmax(x)[1],
    "views of views": lambda x: (x * 2).t().reshape(2, 12).transpose(0, 1)[1:, None, :].squeeze(1),
    "keyword arguments": lambda x: torch.add(x, x, alpha=3).sum(dim=1, keepdim=True),
    "written to out=": lambda x: torch.mul(x, 3, out=torch.empty(6, 4)),
    "infinity and not a number": lambda x: x.masked_fill(x > 3, -INF).nan_to_num(neginf=-7.0) + x.new_full((), INF),
    "dtypes": lambda x: x.to(torch.bfloat16).float() + x.to(torch.int64).to(torch.float32),
    "memory format": lambda x: x.view(1, 6, 2, 2).contiguous(memory_format=torch.channels_last).flatten(),
    "made from nothing": lambda x: x + torch.arange(4.0) * torch.full((6, 1), 0.5) + torch.tensor(2.0),
    "gathered by a static index": lambda x: x.index_select(0, INDEX) + TABLE[INDEX],
    "indexed by a mask of its own making": lambda x: torch.where(x > 5, x, torch.zeros_like(x)),
    "written by index": lambda x: (x * 1).index_copy_(0, INDEX[:1], x[:1] * 100),
    "softmax": lambda x: torch.softmax(x, dim=-1) @ x.t(),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 6, 4)] * 3, is_causal=True),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (4,), eps=1e-5),
}


def _changed_by_view(x: torch.Tensor) -> torch.Tensor:
    made = x * 1
    made[1:3] += 10
    made[:, 0].zero_()
    return made


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_replayed_calls_equal_eager_ones_on_new_inputs(device: CpuDevice, kind: str) -> None:
    work = KINDS[kind]
    source = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    out = torch.empty_like(work(source))
    graph = record(device, lambda: out.copy_(work(source)))
    for seed in (2, 3):
        source.copy_(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) * 4)
        expected = work(source)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_a_view_of_static_memory_is_a_constant_and_no_call(device: CpuDevice) -> None:
    table, out = torch.zeros(6, 4), torch.zeros(2, 4)
    graph = record(device, lambda: out.copy_(table[2:4].t().t().unsqueeze(0).squeeze(0)))
    assert graph.node_count == 1
    left, right = torch.zeros(4), torch.zeros(4)
    split = record(device, lambda: torch.add(*table.view(12, 2).split(6)[0].chunk(2), out=torch.empty(3, 2)))
    assert split.node_count == 2  # the empty tensor and the sum
    table.fill_(3)
    graph.replay()
    assert out.tolist() == [[3.0] * 4] * 2
    written = record(device, lambda: table[1].add_(1))
    for _ in range(2):
        written.replay()
    assert table[1].tolist() == [6.0] * 4
    assert left.equal(right)


def test_a_static_tensor_lives_as_long_as_the_graph(device: CpuDevice) -> None:
    out = torch.zeros(2)

    def make() -> CpuGraph:
        weight = torch.tensor([2.0, 3.0])
        return record(device, lambda: out.copy_(weight * weight))

    graph = make()
    out.zero_()
    graph.replay()
    assert out.tolist() == [4, 9]


def test_a_random_number_is_drawn_anew_by_every_replay(device: CpuDevice) -> None:
    out = torch.zeros(16)
    graph = record(device, lambda: out.copy_(torch.rand(16)))
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


# --- what is refused ----------------------------------------------------------------------------------------

HOST_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "truth": lambda x: bool((x > 0).all()),
    "branch": lambda x: x + 1 if x.sum() > 0 else x,
    "nonzero": lambda x: x.nonzero(),
    "where with one argument": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask as an index": lambda x: x[x > 0],
    "mask as an index, made outside": lambda x: x[torch.zeros(6, dtype=torch.bool)],
    "mask as an index, written": lambda x: (x * 1).index_put_((x > 0,), x.new_zeros(1)),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "repeats that the device knows": lambda x: x.repeat_interleave(torch.ones(6, dtype=torch.int64), dim=0),
    "bincount": lambda x: torch.bincount(x.flatten().abs().long()),
}


@pytest.mark.parametrize("kind", sorted(HOST_READS))
def test_a_host_read_is_refused_and_the_device_works_afterwards(device: CpuDevice, kind: str) -> None:
    source, out, pool = torch.randn(6, 4), torch.zeros(6, 4), device.new_pool()
    with pytest.raises(CaptureError, match="on the host"):
        record(device, lambda: HOST_READS[kind](source * 2), pool)
    assert device.recording is None
    HOST_READS[kind](source * 2)  # outside a capture it is nobody's business
    graph = record(device, lambda: out.copy_(source * 2), pool)
    source.fill_(4)
    graph.replay()
    assert out.eq(8).all()


def test_repeats_of_a_known_total_need_no_host(device: CpuDevice) -> None:
    source, repeats, out = torch.arange(3.0), torch.tensor([1, 2, 1]), torch.zeros(4)
    graph = record(device, lambda: out.copy_(source.repeat_interleave(repeats, output_size=4)))
    source.add_(1)
    graph.replay()
    assert out.tolist() == [1, 2, 2, 3]


# --- any small program --------------------------------------------------------------------------------------

OPERATIONS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * b.sigmoid(),
    lambda a, b: a @ b.t() / 4,
    lambda a, b: torch.softmax(a, dim=-1),
    lambda a, b: a.t(),
    lambda a, b: a.reshape(2, 8)[:, :4].repeat(2, 1),
    lambda a, b: torch.cat([part.flip(0) for part in a.split(2)]),
    lambda a, b: a.topk(4, dim=-1).values,
    lambda a, b: torch.where(a > b, a, torch.full_like(b, -1.5)),
    lambda a, b: a.contiguous().add_(b.tanh()),
    lambda a, b: a.t().mul_(0.5),
    lambda a, b: a[1:3].zero_().sum() + b,
    lambda a, b: a.index_copy_(0, INDEX[:1], b[:1].clone()),
    lambda a, b: torch.add(a, b, alpha=2, out=torch.empty(4, 4)),
    lambda a, b: a.to(torch.bfloat16).float(),
]
step = st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 40), st.integers(0, 40), st.booleans())


def run_program(steps: list[tuple[int, int, int, bool]], statics: list[torch.Tensor], cut: Callable[[], None]) -> None:
    """Every step works on tensors made before or on static ones; the last static tensor takes the sum of all."""
    known = list(statics[:2])
    for operation, one, other, breaks in steps:
        if breaks:
            cut()
        known.append(OPERATIONS[operation](known[one % len(known)], known[other % len(known)]))
    statics[2].zero_()
    for value in known:
        statics[2].add_(value.nan_to_num())


@settings(max_examples=300, deadline=None)
@given(st.lists(step, min_size=1, max_size=12), st.integers(0, 1000))
def test_any_program_replays_bit_equal_to_eager_on_new_inputs(
    steps: list[tuple[int, int, int, bool]], seed: int
) -> None:
    device = CpuDevice(GIB)
    pool, generator, graphs = device.new_pool(), torch.Generator().manual_seed(seed), [device.new_graph()]
    statics = [torch.randn(4, 4, generator=generator) for _ in range(3)]

    def cut() -> None:
        graphs[-1].end()
        graphs.append(device.new_graph())
        graphs[-1].begin(pool)

    with torch.no_grad():
        graphs[0].begin(pool)
        try:
            run_program(steps, statics, cut)
        finally:
            graphs[-1].end()
    for _ in range(2):
        fresh = [torch.randn(4, 4, generator=generator) for _ in range(3)]
        for static, value in zip(statics, fresh, strict=True):
            static.copy_(value)
        run_program(steps, fresh, lambda: None)
        for graph in graphs:
            graph.replay()
        for static, value in zip(statics, fresh, strict=True):
            assert torch.equal(static, value)
        assert pool.session.slots == {}
