"""The allocator against recordings of real ones: every decision of every trace must come out the same.

A recording holds the events of one device and the segments at its end (see tests/data/allocator/README.md).
The state at its start is rebuilt by walking those segments back through the events. Then the requests and
frees are replayed; the model decides everything else. `empty_cache` is called where segments were given back:
that moment was the program's choice, which segments go is the model's.
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from toolkit.memory.allocator import (
    SMALL_LIMIT,
    SMALL_SEGMENT,
    Block,
    CachingAllocator,
    round_size,
)

DATA = Path(__file__).parents[1] / "data" / "allocator"
INDEX = list(csv.DictReader((DATA / "INDEX.csv").read_text(encoding="utf-8").splitlines()))
GRAPHS = "zdgraph01"
EVENT_TRACES = [
    Path(row["file"]).name.split(".")[0] for row in INDEX if int(row["events"]) > 1 and GRAPHS not in row["file"]
]

# Letters of the recordings; "r" (free requested) and "N" (out of memory, from outside torch) change nothing.
SEGMENT_ALLOC, SEGMENT_FREE, ALLOC, FREE, CAPTURE = "S", "F", "a", "f", "C"


def load(name: str) -> dict[str, Any]:
    with gzip.open(DATA / "traces" / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        recording: dict[str, Any] = json.load(file)
    return recording


def final_segments(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """The segments at the end, in the form of torch.cuda.memory_snapshot()."""
    states = {"A": "active_allocated", "I": "inactive", "W": "active_pending_free"}
    return [
        {
            "address": segment["addr"],
            "total_size": segment["size"],
            "stream": segment["stream"],
            "segment_type": segment["type"],
            "segment_pool_id": tuple(segment["pool"]),
            "blocks": [
                {"address": address, "size": size, "requested_size": requested, "state": states[state]}
                for address, size, requested, state in segment["blocks"]
            ],
        }
        for segment in recording["segments"]
    ]


@dataclass
class Rewound:
    """The state before the first event: segments by address, and blocks in use as (size, requested size)."""

    segments: dict[int, dict[str, Any]]
    blocks: dict[int, tuple[int, int]]
    guessed: set[int] = field(default_factory=set)  # blocks of which only the requested size is known


def rewind(recording: dict[str, Any]) -> Rewound:
    finals = final_segments(recording)
    state = Rewound(
        {segment["address"]: segment for segment in finals},
        {
            block["address"]: (block["size"], block["requested_size"])
            for segment in finals
            for block in segment["blocks"]
            if block["state"] != "inactive"
        },
    )
    for kind, size, address, stream in reversed(recording["events"]):
        if kind == SEGMENT_ALLOC:
            del state.segments[address]
        elif kind == SEGMENT_FREE:
            # Large segments have at least 10 MiB, so the size tells the type.
            segment_type = "small" if size == SMALL_SEGMENT else "large"
            state.segments[address] = {
                "address": address,
                "total_size": size,
                "stream": stream,
                "segment_type": segment_type,
                "segment_pool_id": (0, 0),
            }
        elif kind == ALLOC:
            del state.blocks[address]
            state.guessed.discard(address)
        elif kind == FREE:
            state.blocks[address] = (round_size(size), size)
            state.guessed.add(address)
    return state


def starting_segments(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """The segments before the first event, in the form of torch.cuda.memory_snapshot()."""
    state = rewind(recording)
    return [segment | {"blocks": layout(segment, state)} for _, segment in sorted(state.segments.items())]


def layout(segment: dict[str, Any], state: Rewound) -> list[dict[str, Any]]:
    """The blocks of one starting segment: those in use, and the gaps between them as free blocks."""
    begin, end = segment["address"], segment["address"] + segment["total_size"]
    used = sorted(address for address in state.blocks if begin <= address < end)
    blocks = [entry(begin, (used or [end])[0] - begin, 0, "inactive")]
    for address, following in zip(used, [*used, end][1:], strict=True):
        size, requested = state.blocks[address]
        gap = following - address - size
        # Large free blocks always exceed 1 MiB, so a smaller gap belongs to the block before it.
        if address in state.guessed and segment["segment_type"] == "large" and 0 < gap <= SMALL_LIMIT:
            size, gap = size + gap, 0
        blocks += [
            entry(address, size, requested, "active_allocated"),
            entry(address + size, gap, 0, "inactive"),
        ]
    return [block for block in blocks if block["size"]]


def entry(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state}


@dataclass
class Replay:
    """Recorded requests and frees, replayed on a model that decides the rest."""

    recording: dict[str, Any]
    allocator: CachingAllocator
    give_backs: bool = True  # call empty_cache where the recording gave segments back
    addresses: list[tuple[int, int]] = field(default_factory=list)  # of each allocation: recorded, modelled
    released: list[list[tuple[int, int]]] = field(default_factory=list)  # (size, address) of each give-back

    def run(self) -> Replay:
        log = self.allocator.event_log = []
        in_use: dict[int, Block] = {
            address: self.allocator.block_at(address) for address in rewind(self.recording).blocks
        }
        previous = ""
        for kind, size, address, stream in self.recording["events"]:
            if kind == ALLOC:
                block = in_use[address] = self.allocator.malloc(size, stream=stream)
                self.addresses.append((address, block.address))
            elif kind == FREE:
                self.allocator.free(in_use.pop(address))
            elif kind == SEGMENT_FREE and previous != SEGMENT_FREE and self.give_backs:
                before = len(log)
                self.allocator.empty_cache()
                self.released.append([event[1:] for event in log[before:]])
            previous = kind
        return self

    def events(self, what: str) -> list[tuple[int, int]]:
        """(size, address) of the model's segment events of one kind."""
        assert self.allocator.event_log is not None
        return [event[1:] for event in self.allocator.event_log if event[0] == what]


def recorded(recording: dict[str, Any], kind: str) -> list[tuple[int, int]]:
    return [(size, address) for what, size, address, *_ in recording["events"] if what == kind]


def recorded_give_backs(recording: dict[str, Any]) -> list[list[tuple[int, int]]]:
    runs: list[list[tuple[int, int]]] = []
    previous = ""
    for kind, size, address, _ in recording["events"]:
        if kind == SEGMENT_FREE:
            if previous != SEGMENT_FREE:
                runs.append([])
            runs[-1].append((size, address))
        previous = kind
    return runs


def recorded_reserved(recording: dict[str, Any]) -> list[int]:
    """Reserved bytes at the start and after every segment event."""
    reserved = [sum(segment["total_size"] for segment in rewind(recording).segments.values())]
    for kind, size, *_ in recording["events"]:
        if kind in (SEGMENT_ALLOC, SEGMENT_FREE):
            reserved.append(reserved[-1] + (size if kind == SEGMENT_ALLOC else -size))
    return reserved


def comparable(segments: list[dict[str, Any]]) -> list[Any]:
    """Layouts without what a free block was once asked for, which a rebuilt start cannot know."""
    return [
        (
            segment["address"],
            segment["total_size"],
            segment["stream"],
            segment["segment_type"],
            segment["segment_pool_id"],
            [
                (block["size"], block["requested_size"] if block["state"] != "inactive" else None)
                for block in segment["blocks"]
            ],
        )
        for segment in segments
    ]


def test_the_recordings_are_all_there() -> None:
    assert len(EVENT_TRACES) == 24
    assert sum(int(row["segment_allocs"]) for row in INDEX) == 6685


@pytest.mark.parametrize("name", EVENT_TRACES)
def test_descending_addresses_reproduce_segments_and_bytes(name: str) -> None:
    """Without knowing any recorded address of a new segment, as a plan without a GPU works."""
    recording = load(name)
    allocator = CachingAllocator.from_snapshot(starting_segments(recording))
    replay = Replay(recording, allocator).run()

    sizes = [size for size, _ in recorded(recording, SEGMENT_ALLOC)]
    assert [size for size, _ in replay.events("segment_alloc")] == sizes
    assert [sorted(size for size, _ in run) for run in replay.released] == [
        sorted(size for size, _ in run) for run in recorded_give_backs(recording)
    ]
    reserved = recorded_reserved(recording)
    assert allocator.reserved_bytes() == reserved[-1] == sum(s["size"] for s in recording["segments"])
    assert allocator.peak_reserved_bytes == max(reserved)


@pytest.mark.parametrize("name", EVENT_TRACES)
def test_recorded_segment_addresses_reproduce_every_address(name: str) -> None:
    """A new segment takes the address cudaMalloc really returned; all other addresses are the model's."""
    recording = load(name)
    fresh = iter(recorded(recording, SEGMENT_ALLOC))

    def fresh_address(size: int) -> int:
        expected, address = next(fresh)
        assert size == expected
        return address

    allocator = CachingAllocator.from_snapshot(starting_segments(recording), fresh_addresses=fresh_address)
    replay = Replay(recording, allocator).run()

    assert [model for _, model in replay.addresses] == [real for real, _ in replay.addresses]
    assert replay.events("segment_alloc") == recorded(recording, SEGMENT_ALLOC)
    assert replay.released == recorded_give_backs(recording)
    assert comparable(allocator.snapshot()) == comparable(final_segments(recording))


def test_a_full_device_retries_where_the_real_one_did() -> None:
    """octree08 ran out of memory once. Given its capacity, the model gives back the same segments unasked."""
    recording = load("octree08")
    needed = max(recorded_reserved(recording))
    # Any capacity from the recorded peak up to (not including) what the failed cudaMalloc would have taken.
    failed_at = (18_730 + 7_014) << 20
    for capacity in (needed, failed_at - 1):
        allocator = CachingAllocator.from_snapshot(starting_segments(recording), capacity_bytes=capacity)
        replay = Replay(recording, allocator, give_backs=False).run()
        released = [size for size, _ in replay.events("segment_free")]
        assert released == [size for size, _ in recorded(recording, SEGMENT_FREE)]
        assert allocator.peak_reserved_bytes == needed

    roomy = CachingAllocator.from_snapshot(starting_segments(recording), capacity_bytes=failed_at)
    assert not Replay(recording, roomy, give_backs=False).run().events("segment_free")


def test_graph_pools_reproduce_every_address_of_three_captures() -> None:
    """zdgraph01: eager, warm-up in the pool, three captures; it has no segment events, only addresses."""
    here = 0
    allocator = CachingAllocator(fresh_addresses=lambda size: here)
    log = allocator.event_log = []
    in_use: dict[int, Block] = {}
    counts = {"default": 0, (0, 1): 0}
    captures = 0
    for kind, size, address, stream, *pool_id in load(GRAPHS)["events"]:
        if kind == CAPTURE:
            if captures:
                allocator.end_capture((0, 1))
            allocator.begin_capture((0, 1))
            captures += 1
        elif kind == ALLOC:
            here = address
            pool = "default" if pool_id == [[0, 0]] else (0, 1)
            in_use[address] = block = allocator.malloc(size, pool, stream)
            assert block.address == address
            counts[pool] += 1
        else:
            allocator.free(in_use.pop(address))

    assert (captures, counts) == (3, {"default": 1310, (0, 1): 896})
    assert sum(event[0] == "segment_alloc" for event in log) == 711
    assert allocator.reserved_bytes() == 39_136 << 20
    ends = [(segment["address"], segment["address"] + segment["total_size"]) for segment in allocator.snapshot()]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))


def test_private_pools_of_a_real_snapshot_survive_the_round_trip() -> None:
    """verl01: vLLM's sleep mode keeps weights and KV cache in two pools of their own."""
    segments = final_segments(load("verl01"))
    allocator = CachingAllocator.from_snapshot(segments)
    assert comparable(allocator.snapshot()) == comparable(segments)
    assert allocator.reserved_bytes((0, 1)) == 558 << 20
    assert allocator.reserved_bytes((0, 2)) == 20_784 << 20

    kept = allocator.reserved_bytes((0, 1)) + allocator.reserved_bytes((0, 2))
    allocator.empty_cache()
    assert allocator.reserved_bytes() == kept + allocator.reserved_bytes("default")
