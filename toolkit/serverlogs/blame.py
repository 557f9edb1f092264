"""Which rank an error is of: its lines have no prefix of their own, or one that counts otherwise."""

from __future__ import annotations

from toolkit.serverlogs import events as ev
from toolkit.serverlogs.chosen import argument
from toolkit.serverlogs.startup import Startup
from toolkit.serverlogs.words import whole

LONGEST_TRACEBACK, MOST_NEAR = 400, 64


def whose(startup: Startup, event: ev.Event, by_card: ev.Rank | None = None) -> ev.Rank:
    """The rank that went wrong: of torchrun's `[rank3]:`, else one that the head of a traceback names.

    An exception's last line has no prefix of its own. Of several heads it is that of the card's rank, else the last
    one whose memory did not run out yet; without any, the card's rank alone.
    """
    if event.rank.named:
        return _of_world(startup, event.rank)
    if not startup.running:
        return by_card or event.rank
    near = (
        error.rank
        for error in reversed(startup.errors[-MOST_NEAR:])
        if error.kind == "SchedulerException" and 0 <= event.line - error.line <= LONGEST_TRACEBACK
    )
    heads = [rank for rank in near if is_rank(startup, rank) and _may_run_out(startup, rank)]
    if by_card is not None and (not heads or by_card in heads):
        return by_card
    return heads[0] if heads else event.rank


def _may_run_out(startup: Startup, rank: ev.Rank) -> bool:
    capture = startup.running.get(rank)
    return capture is not None and capture.oom is None


def is_rank(startup: Startup, rank: ev.Rank) -> bool:
    """Whether a line's prefix names a rank of this start. An actor's process id on a bar need not be one."""
    return rank.named and (rank in startup.ranks or not rank.worker)


def _of_world(startup: Startup, rank: ev.Rank) -> ev.Rank:
    """The rank that `[rank3]:` names: they count through each pipeline stage. `rank` itself where that is not one."""
    name, _, number = rank.worker.partition(" ")
    if name != "rank" or rank in startup.ranks or not number.isdigit():
        return rank
    if startup.world[0] != len(startup.ranks):
        startup.world = (len(startup.ranks), _world(startup))
    return startup.world[1].get(int(number)) or rank


def _world(startup: Startup) -> dict[int, ev.Rank | None]:
    """Ranks by torchrun's number, None where several have it."""
    size = max((each.tp for each in startup.ranks if each.tp is not None), default=0) + 1
    found: dict[int, ev.Rank | None] = {}
    for each in startup.ranks:
        if each.tp is not None:
            number = (each.pp or 0) * size + each.tp
            found[number] = None if number in found else each
    return found


_CARDS = 8  # of one host: with more ranks than this, several hosts count their cards from 0


def of_its_card(startup: Startup, event: ev.OutOfMemory) -> ev.Rank | None:
    """The rank of `GPU 3`, where cards are counted as ranks are: TP0, TP1 and so on of one host; else None.

    The arguments say which card is TP0's and how far the next one is. `GPU 0` says nothing, for a process that is
    shown one card only calls it 0.
    """
    card = whole(event.message, " GPU ")
    if not card or len(startup.ranks) > _CARDS + 1:
        return None
    first, step = _whole(argument(startup, "base_gpu_id"), 0), _whole(argument(startup, "gpu_id_step"), 1)
    named = [rank for rank in startup.ranks if rank.named]
    numbers = sorted(rank.tp for rank in named if rank.tp is not None and rank.dp is rank.pp is None)
    alike = len(numbers) == len(named) <= _CARDS and numbers == list(range(len(numbers)))
    if not alike or step < 1 or card < first or (card - first) % step:
        return None
    return next((rank for rank in named if rank.tp == (card - first) // step), None)


def _whole(value: ev.Value, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
