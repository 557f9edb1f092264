"""Capture traces: what capturing one bucket asks of the allocator, warm-up passes and segments in their order.

An `AllocationTrace` is one forward in one pool. A capture is several: eager passes in the default pool, an emptied
cache, and segments that hand tensors to each other in a private one. `RecordingAllocator` writes that down while the
engine's own runner captures on meta tensors, so that nobody writes the sequence a second time. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from toolkit.memory.allocator import DEFAULT_POOL, Block, CachingAllocator, PoolId

Command = Literal["empty_cache", "begin", "end", "layer"]
"""`begin` and `end` of a segment; `layer` is no action, it says that attention is asked here."""
Events = tuple[int, ...]
"""What happened, in order: `i` for allocation `i`, `~i` for its end, as in `AllocationTrace`."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """The steps of one decoder layer once more, `copies` times: those right before it in the trace.

    Its own allocations are `count` from number `first`; ends may reach back to the layer before it, no further.
    """

    steps: tuple[Command | Events, ...]
    first: int
    count: int
    copies: int


Step = Command | Events | Repeat


@dataclass(frozen=True)
class CaptureTrace:
    """What the capture of one bucket allocates and frees.

    Attributes:
        sizes: bytes asked for by each allocation, in order.
        steps: allocations and their ends, and what the runner told the device in between.
    """

    sizes: tuple[int, ...]
    steps: tuple[Step, ...]

    @cached_property
    def segments(self) -> int:
        """Graphs of this bucket."""
        return sum(_segments(step) for step in self.steps)

    @cached_property
    def warm_up(self) -> CaptureTrace:
        """What happens before the first segment begins."""
        return CaptureTrace(self.sizes, self.steps[: self._first_segment])

    @cached_property
    def recording(self) -> CaptureTrace:
        """The first segment and all that follows. To be replayed alone only where the trace is `separable`."""
        return CaptureTrace(self.sizes, self.steps[self._first_segment :])

    @cached_property
    def separable(self) -> bool:
        """Whether the warm-up leaves nothing alive, and its cache is emptied before the first segment."""
        events = [event for step in self.warm_up.steps for event in _events(step)]
        return self.warm_up.steps[-1:] == ("empty_cache",) and sum(1 if e >= 0 else -1 for e in events) == 0

    @property
    def _first_segment(self) -> int:
        return self.steps.index("begin") if "begin" in self.steps else len(self.steps)

    def replay(self, allocator: CachingAllocator, pool: PoolId, stream: int = 0) -> list[Block]:
        """Make the allocator do what the capture did, segments in `pool`; returns the blocks still in use."""
        run = _Run(self.sizes, allocator, pool, stream)
        for step in self.steps:
            run.step(step)
        return list(run.blocks.values())


def _segments(step: Step) -> int:
    if isinstance(step, Repeat):
        return step.copies * step.steps.count("begin")
    return int(step == "begin")


def _events(step: Step) -> Events:
    return step if isinstance(step, tuple) else ()


class _Run:
    """One replay on its way: the blocks in use, and the pool that is allocated from."""

    def __init__(self, sizes: tuple[int, ...], allocator: CachingAllocator, pool: PoolId, stream: int) -> None:
        self.blocks: dict[int, Block] = {}
        self._sizes, self._allocator, self._stream = sizes, allocator, stream
        self._private = pool
        self._pool: PoolId = DEFAULT_POOL
        self._commands: dict[Command, Callable[[], None]] = {
            "empty_cache": allocator.empty_cache,
            "begin": self._begin,
            "end": self._end,
            "layer": lambda: None,
        }

    def step(self, step: Step) -> None:
        if isinstance(step, str):
            self._commands[step]()
        elif isinstance(step, Repeat):
            self._repeat(step)
        else:
            self._happen(step)

    def _begin(self) -> None:
        # The engine empties the cache itself, before a bucket's first segment.
        self._allocator.begin_capture(self._private, self._stream, keep_cache=True)
        self._pool = self._private

    def _end(self) -> None:
        self._allocator.end_capture(self._private)
        self._pool = DEFAULT_POOL

    def _happen(self, events: Events) -> None:
        malloc, free, pool, stream = self._allocator.malloc, self._allocator.free, self._pool, self._stream
        sizes, blocks = self._sizes, self.blocks
        for event in events:
            if event >= 0:
                blocks[event] = malloc(sizes[event], pool, stream)
            else:
                free(blocks.pop(~event))

    def _repeat(self, repeat: Repeat) -> None:
        """Layer after layer. Where one finds what an earlier one found, all goes round: whole rounds change nothing.

        What is free follows from the segments and from what is in use, which only the layer's own blocks change.
        """
        seen: dict[tuple[object, ...], int] = {}
        left = repeat.copies
        while left:
            state = (self._allocator.reserved_bytes(), *self._layer_blocks(repeat))
            if state in seen:
                left %= seen[state] - left
                break
            seen[state] = left
            self._copy(repeat)
            left -= 1
        for _ in range(left):
            self._copy(repeat)

    def _copy(self, repeat: Repeat) -> None:
        for number in range(repeat.first, repeat.first + repeat.count):
            if number in self.blocks:  # what the layer before left for this one
                self.blocks[number - repeat.count] = self.blocks.pop(number)
        for step in repeat.steps:
            self.step(step)

    def _layer_blocks(self, repeat: Repeat) -> list[tuple[int, int, int]]:
        numbers = range(repeat.first, repeat.first + repeat.count)
        in_use = [(number, self.blocks[number]) for number in numbers if number in self.blocks]
        return [(number, block.address, block.size) for number, block in in_use]


# --- recording ----------------------------------------------------------------------------------------------


class RecordingAllocator(CachingAllocator):
    """An allocator that writes down what it is asked for while `record` runs."""

    def __init__(self) -> None:
        super().__init__()
        self._log: _Log | None = None

    def record(self, capture: Callable[[], object]) -> CaptureTrace:
        """The trace of one call; what was in use before it, and is still, is no part of it."""
        self._log = log = _Log()
        try:
            capture()
        finally:
            self._log = None
        log.flush()
        return CaptureTrace(tuple(log.sizes), tuple(log.steps))

    def mark_layer(self) -> None:
        """Note that attention is asked now."""
        self._note("layer")

    def malloc(self, nbytes: int, pool: PoolId = DEFAULT_POOL, stream: int = 0) -> Block:
        """As in `CachingAllocator`, noted."""
        block = super().malloc(nbytes, pool, stream)
        if self._log is not None and block.size:
            self._log.allocate(block, nbytes)
        return block

    def free(self, block: Block) -> None:
        """As in `CachingAllocator`, noted."""
        if self._log is not None and block.size:
            self._log.end(block)
        super().free(block)

    def begin_capture(self, pool: PoolId, stream: int = 0, keep_cache: bool = False) -> None:
        """As in `CachingAllocator`, noted."""
        super().begin_capture(pool, stream, keep_cache)
        self._note("begin")

    def end_capture(self, pool: PoolId) -> None:
        """As in `CachingAllocator`, noted."""
        super().end_capture(pool)
        self._note("end")

    def empty_cache(self) -> None:
        """As in `CachingAllocator`, noted."""
        super().empty_cache()
        self._note("empty_cache")

    def _note(self, command: Command) -> None:
        if self._log is not None:
            self._log.flush()
            self._log.steps.append(command)


class _Log:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.steps: list[Command | Events] = []
        self._events: list[int] = []
        self._numbers: dict[Block, int] = {}

    def allocate(self, block: Block, nbytes: int) -> None:
        self._numbers[block] = len(self.sizes)
        self._events.append(len(self.sizes))
        self.sizes.append(nbytes)

    def end(self, block: Block) -> None:
        if block in self._numbers:
            self._events.append(~self._numbers.pop(block))

    def flush(self) -> None:
        if self._events:
            self.steps.append(tuple(self._events))
            self._events.clear()
