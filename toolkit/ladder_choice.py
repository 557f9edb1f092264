"""The choice of a ladder: what it may take, which buckets it may have, and the cheapest within that. Pure numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.errors import InvalidInput
from toolkit.ladder_models import CostModel, LadderLaw
from toolkit.ladder_solver import Budget, Solution, solve
from toolkit.settings import MAX_BUCKET_TOKENS

MAX_CANDIDATES = 384
"""Buckets a ladder is chosen from; more distinct sizes than this are thinned. Keeps a design to seconds."""
MAX_CANDIDATES_WITH_SUM = 128
"""The same where a budget has a sum-term."""
_TURNS = 16


@dataclass(frozen=True)
class Limits:
    """What a ladder may take. None is no limit; a limit in GiB or seconds needs the law that says what a ladder takes.

    Attributes:
        max_buckets: how many buckets it may have.
        memory_gib: GiB the capture may take.
        time_s: seconds the capture may take.
        memory: GiB of a ladder.
        time: seconds of a ladder.
    """

    max_buckets: int | None = None
    memory_gib: float | None = None
    time_s: float | None = None
    memory: LadderLaw | None = None
    time: LadderLaw | None = None

    def __post_init__(self) -> None:
        if self.max_buckets is not None and self.max_buckets < 0:
            raise InvalidInput(f"max buckets {self.max_buckets} is negative", "0 or more", "for example 16")
        for name, unit, value, law, give in (
            ("memory", "GiB", self.memory_gib, self.memory, "a plan (--model and --gpu), or a measured record"),
            ("time", "s", self.time_s, self.time, "a measured record, or a plan whose backend has capture times"),
        ):
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidInput(f"{name} budget {value:g} {unit} is out of range", "0 or more, finite")
            if value is not None and law is None:
                raise InvalidInput(f"a {name} budget needs to know what a ladder takes", give)

    @property
    def budgets(self) -> list[Budget]:
        """The limits that depend on which buckets a ladder has."""
        pairs = ((self.memory, self.memory_gib), (self.time, self.time_s))
        return [Budget(law, limit) for law, limit in pairs if law is not None and limit is not None]

    @property
    def limited(self) -> list[tuple[str, str, LadderLaw, float]]:
        """(name, unit, law, budget) of each GiB or second that is limited."""
        every = (("memory", "GiB", self.memory, self.memory_gib), ("time", "s", self.time, self.time_s))
        return [(name, unit, law, most) for name, unit, law, most in every if law is not None and most is not None]

    def words(self, ladder: Sequence[int]) -> list[str]:
        """What a ladder takes of each GiB or second that is limited, for example `0.61 GiB (0.50 to 0.75)`."""
        return [law.words(ladder, unit) for _, unit, law, _ in self.limited]


def candidate_buckets(
    histogram: Mapping[int, int], also: Sequence[int], step: int = 1, most: int | None = None
) -> list[int]:
    """The buckets a ladder is chosen from: every size in the traffic rounded up to `step`, and those of `also` in use.

    No other bucket is worth having: the largest prefill that replays in a bucket could have one of its own size. With
    more than `most` of them, sizes are kept at even steps of the traffic's prefills and of its tokens, half each,
    with the largest one; of `also` at most half of `most` stay, evenly spread, the largest among them.
    """
    sizes = sorted(histogram)
    rounded = {min(-(-size // step) * step, MAX_BUCKET_TOKENS) for size in sizes if size <= MAX_BUCKET_TOKENS}
    before = [0, *sorted(also)]
    used = {bucket for below, bucket in itertools.pairwise(before) if any(below < size <= bucket for size in sizes)}
    if most is None or len(rounded | used) <= most:
        return sorted(rounded | used)
    used = _spread(used, most // 2)
    room = max(most - len(used), 2)
    kept = {max(rounded)}
    for weight in ({size: histogram[size] for size in sizes}, {size: size * histogram[size] for size in sizes}):
        total, seen, number = sum(weight.values()), 0, 0
        for size in sizes:
            seen += weight[size]
            if size <= MAX_BUCKET_TOKENS and seen * (room // 2) >= total * (number + 1):
                kept.add(min(-(-size // step) * step, MAX_BUCKET_TOKENS))
                number = seen * (room // 2) // total
    return sorted(kept | used)


def _spread(buckets: set[int], most: int) -> set[int]:
    """At most `most` of them at even steps, the largest included."""
    ordered = sorted(buckets, reverse=True)
    return set(ordered[:: -(-len(ordered) // most)]) if ordered else set()


def check_step(step: int) -> None:
    """Raises InvalidInput where buckets cannot be multiples of `step`."""
    if not 1 <= step <= MAX_BUCKET_TOKENS:
        raise InvalidInput(f"step {step} is out of range", f"1 to {MAX_BUCKET_TOKENS} tokens", "for example 8")


def ceiling_buckets(default: Sequence[int], longest: int, replay_limit: int | None, step: int = 1) -> tuple[int, ...]:
    """The buckets of `default` with which every prefill over `longest` that it replays still replays: as few as do.

    The largest one is always among them. Without a replay limit it is enough; with one, a bucket holds no prefill of
    less than its share, and those between `longest` and that need further ones. All are rounded up to `step`.
    """
    check_step(step)
    left = sorted({min(-(-bucket // step) * step, MAX_BUCKET_TOKENS) for bucket in default})
    kept = left[-1:]
    while replay_limit is not None and left and kept[-1] > longest:
        shortest = -(-kept[-1] // replay_limit)  # the fewest tokens that replay in the smallest bucket so far
        left = [bucket for bucket in left if bucket < kept[-1]]
        if not left or shortest <= longest + 1:
            break
        kept.append(next((bucket for bucket in left if bucket >= shortest - 1), left[-1]))
    return tuple(sorted(bucket for bucket in kept if bucket > longest or bucket == kept[0]))


def best_ladder(
    histogram: Mapping[int, int],
    default: Sequence[int],
    cost: CostModel,
    replay_limit: int | None,
    limits: Limits,
    step: int = 1,
    required: Sequence[int] = (),
) -> tuple[tuple[int, ...], bool]:
    """The cheapest ladder within the limits, and whether no other ladder of the candidates is cheaper.

    The buckets of `required` are in it; it is empty where no such ladder fits.

    Raises:
        InvalidInput: `step` is not 1 or more.
    """
    check_step(step)
    budgets = limits.budgets
    most = MAX_CANDIDATES_WITH_SUM if any(one.law.per_token > 0 for one in budgets) else MAX_CANDIDATES
    every = candidate_buckets(histogram, [bucket for bucket in default if bucket % step == 0], step)
    candidates = every
    if len(every) > most:
        candidates = candidate_buckets(histogram, [bucket for bucket in default if bucket % step == 0], step, most)
    ladder, exact = _within(histogram, candidates, cost, replay_limit, limits, required)
    return ladder, exact and candidates == every


def _within(
    histogram: Mapping[int, int],
    candidates: Sequence[int],
    cost: CostModel,
    replay_limit: int | None,
    limits: Limits,
    required: Sequence[int],
) -> tuple[tuple[int, ...], bool]:
    """Solve; where a law's `check` finds more than its terms did, lower that limit, and raise it where it finds less.

    Between limits that were too high and limits that were not it goes on by halves. The cheapest ladder that was
    found to fit is the answer.
    """
    asked = limits.budgets
    free = solve(candidates, histogram, cost, replay_limit, limits.max_buckets, [], required)
    if all(each.law.of(free.ladder) <= each.limit for each in asked):
        return free.ladder, free.exact
    budgets, best = asked, Solution((), math.inf, False)
    fits: list[Budget] | None = None
    too_high: list[Budget] | None = None
    for _ in range(_TURNS):
        found = solve(candidates, histogram, cost, replay_limit, limits.max_buckets, budgets, required)
        ratios = [each.limit / max(each.law.of(found.ladder), 1e-12) for each in asked]
        if min(ratios, default=1.0) >= 1:
            same, fits = found.ladder == best.ladder, budgets
            best = min(best, found, key=lambda one: one.cost)
            if same or all(each.law.check is None for each in asked):
                break
        else:
            too_high = budgets
        if fits is None:
            budgets = [_tighter(*each, found.ladder) for each in zip(budgets, ratios, strict=True)]
        elif too_high is None:
            budgets = [replace(low, limit=low.limit * ratio) for low, ratio in zip(fits, ratios, strict=True)]
        else:
            pairs = zip(fits, too_high, strict=True)
            budgets = [replace(low, limit=(low.limit + high.limit) / 2) for low, high in pairs]
    return best.ladder, best.exact and budgets is asked


def _tighter(budget: Budget, ratio: float, ladder: Sequence[int]) -> Budget:
    """The budget lowered by as much as its terms were too low for this ladder, which must not come again."""
    if ratio >= 1:
        return budget
    return replace(budget, limit=min(budget.limit * ratio, budget.law.fitted(ladder) * (1 - 1e-6)))
