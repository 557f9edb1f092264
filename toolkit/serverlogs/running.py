"""The capture that each rank is in, and the one that a line without a rank speaks of, found without a look at all."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from toolkit.serverlogs.events import NO_RANK, Rank

if TYPE_CHECKING:
    from toolkit.serverlogs.startup import Capture

PHASES = ("prefill", "decode", "verify", "extend")


def order(rank: Rank) -> tuple[int, int, int, int, str]:
    """What ranks are sorted by: DP, then PP, then TP."""
    numbers = (rank.dp, rank.pp, rank.tp, rank.ep)
    first, second, third, fourth = (-1 if number is None else number for number in numbers)
    return first, second, third, fourth, rank.worker


def lowest_rank(ranks: Iterable[Rank]) -> Rank:
    """The rank that prints what only one rank prints (progress bars)."""
    return min(ranks, key=order, default=NO_RANK)


def same_engine(said: Rank, rank: Rank) -> bool:
    """Whether `rank` is of the engine that `said` speaks for: of its data-parallel part and its pipeline stage."""
    return said.dp in (None, rank.dp) and said.pp in (None, rank.pp)


class Running:
    """A rank is in one capture at a time; a log has up to a thousand ranks and any number of lines without one.

    Of each phase it keeps the captures by when a line last spoke of them (with bars and without), and by rank.
    """

    def __init__(self) -> None:
        self._of: dict[Rank, Capture] = {}
        self._doubted: dict[Rank, Capture] = {}
        self._recent: dict[tuple[bool, str], dict[Rank, Capture]] = {}
        self._by_rank: dict[str, list[tuple[tuple[int, int, int, int, str], int, Capture]]] = {}
        self._pushed = 0
        self._up: set[tuple[int | None, int | None]] = set()
        self._all_up = False

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._of

    def get(self, rank: Rank) -> Capture | None:
        """The capture that `rank` is in, ended by a failure or not."""
        return self._of.get(rank)

    def doubt(self, capture: Capture) -> None:
        """An error was said in `capture`."""
        self._doubted[capture.rank] = capture

    def settle(self) -> list[Capture]:
        """Those in which an error was said since this was asked last."""
        found = [capture for rank, capture in self._doubted.items() if self._of.get(rank) is capture]
        self._doubted.clear()
        return found

    def add(self, capture: Capture) -> None:
        """The rank of `capture` is in it from now on."""
        self.drop(capture.rank)
        self._of[capture.rank] = capture
        self.touch(capture)
        self.reopen(capture)

    def drop(self, rank: Rank) -> None:
        """`rank` is in no capture any more."""
        self._of.pop(rank, None)
        for kept in self._recent.values():
            kept.pop(rank, None)

    def touch(self, capture: Capture) -> None:
        """A line has just spoken of `capture`."""
        if self._of.get(capture.rank) is not capture or self.is_up(capture.rank):
            return
        if capture.last_bar is not None:
            self._recent.get((False, capture.phase), {}).pop(capture.rank, None)
        kept = self._recent.setdefault((capture.last_bar is not None, capture.phase), {})
        kept.pop(capture.rank, None)
        kept[capture.rank] = capture

    def reopen(self, capture: Capture) -> None:
        """`capture` is open, as when it began; to be said again whenever it had ceased to be."""
        self._pushed += 1
        heapq.heappush(self._by_rank.setdefault(capture.phase, []), (order(capture.rank), self._pushed, capture))

    def lowest_open(self, phases: Iterable[str]) -> Capture | None:
        """The open capture of the lowest rank that is in one of these phases: the one that bars are of."""
        found = [capture for phase in phases if (capture := self._first_open(phase)) is not None]
        return min(found, key=lambda capture: order(capture.rank), default=None)

    def _first_open(self, phase: str) -> Capture | None:
        waiting = self._by_rank.get(phase, [])
        while waiting:
            capture = waiting[0][2]
            if capture.open and self._of.get(capture.rank) is capture:
                return capture
            heapq.heappop(waiting)
        return None

    def last_drawn(self, phases: Iterable[str]) -> Capture | None:
        """The capture of these phases whose bar was drawn last, open or not."""
        return self._latest((True, phase) for phase in phases)

    def latest(self, phase: str | None = None, but: Rank | None = None) -> Capture | None:
        """The capture that an error without a rank interrupts: of `phase` where one is, else of any; not `but`'s.

        Ranks capture in step and one of them draws bars: where it got to says what all were doing.
        """
        for phases in ((phase,) if phase is not None else (), PHASES):
            for drawn in (True, False):
                found = self._latest(((drawn, each) for each in phases), but)
                if found is not None:
                    return found
        return None

    def _latest(self, keys: Iterable[tuple[bool, str]], but: Rank | None = None) -> Capture | None:
        last = []
        for key in keys:
            spoken_of = reversed(self._recent.get(key, {}).values())
            last += [capture for capture in itertools.islice(spoken_of, 2) if capture.rank != but][:1]
        return max(last, key=_last_line, default=None)

    def is_up(self, rank: Rank) -> bool:
        """Whether the engine that `rank` is one of has started: an error interrupts no capture of it any more."""
        if self._all_up or not self._up:
            return self._all_up
        return not self._up.isdisjoint(((None, None), (rank.dp, None), (None, rank.pp), (rank.dp, rank.pp)))

    def came_up(self, rank: Rank | None = None) -> None:
        """The engine of `rank` said its limits; without a rank, the server is ready."""
        engine = (rank.dp, rank.pp) if rank is not None else None
        if self._all_up or engine in self._up:
            return
        self._all_up = engine is None
        if engine is not None:
            self._up.add(engine)
        for kept in self._recent.values():
            for each in [each for each in kept if self.is_up(each)]:
                del kept[each]


def _last_line(capture: Capture) -> int:
    bar = capture.last_bar
    return max((*capture.lines, bar.line if bar else 0))
