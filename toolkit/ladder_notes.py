"""What a ladder design says in words: what changes, what to beware of, why there is no ladder. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from toolkit.ladder_choice import Limits, best_ladder, candidate_buckets
from toolkit.ladder_coverage import Coverage, cover
from toolkit.ladder_holdout import HeldOut
from toolkit.ladder_models import CostModel, short_figure

FEW_PREFILLS, FEW_PER_BUCKET = 200, 20
"""Fewer prefills than this, in all or for each bucket, are fitted one by one rather than as a traffic."""
_NOTABLE = 0.005
"""A smaller share of prefills is not worth a note."""


def change_words(before: Coverage, after: Coverage) -> str:
    """What changes from one ladder to another, in one sentence; what reads the same for both is left out."""
    gain = 1 - after.mean_cost / before.mean_cost if before.mean_cost else 0.0
    pairs = (
        ("eager {} of prefills", f"{after.eager_share:.2%}", f"{before.eager_share:.2%}"),
        ("padding {} of computed tokens", f"{after.padded_share:.2%}", f"{before.padded_share:.2%}"),
        ("memory {}", _gib(after.memory_gib), _gib(before.memory_gib)),
        ("capture {}", _seconds(after.capture_s), _seconds(before.capture_s)),
    )
    parts = [f"{what.format(new)} instead of {old}" for what, new, old in pairs if new != old]
    if f"{abs(gain):.1%}" != "0.0%":
        parts.append(f"expected cost {abs(gain):.1%} {'lower' if gain >= 0 else 'higher'} ({after.unit})")
    now, then = len(after.ladder), len(before.ladder)
    start = f"{now} bucket{'' if now == 1 else 's'} {'as before' if now == then else f'instead of {then}'}"
    return f"{start}: {', '.join(parts) or 'eager, padding and expected cost are the same'}"


def caution_words(before: Coverage, after: Coverage, held_out: HeldOut | None) -> str:
    """Why a proposal that looks better may not be: what comes before its gains are told. Empty where nothing does."""
    parts = []
    if worse_unseen(before, after, held_out):
        assert held_out is not None
        parts.append(
            f"keep the default ladder: one fitted to half of these prefills costs {-held_out.gain:.1%} more than it "
            "for the other half"
        )
    if too_few(after):
        buckets = f"{len(after.ladder)} bucket{'' if len(after.ladder) == 1 else 's'}"
        parts.append(f"{after.prefills} prefills are too few to fit {buckets} to")
    return "; ".join(parts)


def worse_unseen(before: Coverage, after: Coverage, held_out: HeldOut | None) -> bool:
    """Whether the ladder looks no worse than the default one only for the prefills it was fitted to."""
    return held_out is not None and held_out.gain < -_NOTABLE and after.mean_cost <= before.mean_cost


def too_few(after: Coverage) -> bool:
    """Whether there are too few prefills for so many buckets."""
    buckets = len(after.ladder)
    return bool(buckets) and (after.prefills < FEW_PREFILLS or after.prefills < FEW_PER_BUCKET * buckets)


def _gib(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value * 1024:.1f} MiB" if 0 < value < 0.1 else f"{value:.2f} GiB"


def _seconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f} s"


def design_notes(before: Coverage, after: Coverage, longest: int, held_out: HeldOut | None) -> list[str]:
    """What to beware of in the proposal `after`, for prefills of up to `longest` tokens."""
    notes = [*_few(after), *_lower_ceiling(before, after, longest), *_more_eager(before, after)]
    if worse_unseen(before, after, held_out):
        notes.append(
            "for prefills that were held out a ladder fitted like this one costs more than the default ladder: "
            "give more traffic, or keep the default ladder"
        )
    return notes


def _few(after: Coverage) -> list[str]:
    buckets = len(after.ladder)
    if not too_few(after):
        return []
    return [
        f"{after.prefills} prefills are few for {buckets} buckets ({after.prefills / buckets:.1f} for each): the "
        "ladder fits these very lengths, and others may fit worse; give more traffic"
    ]


def _lower_ceiling(before: Coverage, after: Coverage, longest: int) -> list[str]:
    """Where prefills that were not seen would replay with the default ladder, and with the proposal would not."""
    ceiling = max(before.ladder, default=0)
    top = max(after.ladder, default=0)
    if not top or ceiling <= max(top, longest):
        return []
    return [
        f"prefills over {top} tokens would run eager (the longest of this traffic has {longest}), with the default "
        f"ladder only those over {ceiling}: --keep-ceiling (keep_ceiling=True) lets them replay"
    ]


def _more_eager(before: Coverage, after: Coverage) -> list[str]:
    """A word of caution where the proposal gives up replays that the default ladder has."""
    more = after.eager_share - before.eager_share
    if more < _NOTABLE:
        return []
    start = f"{more:.1%} of prefills run eager that replay with the default ladder: "
    if after.mean_cost <= before.mean_cost:
        return [f"{start}by these costs, and within the limits, that is cheaper; measure before you rely on it"]
    dearer = after.mean_cost / before.mean_cost - 1 if before.mean_cost else 0.0
    return [f"{start}the limits leave room for no more, and a prefill costs {dearer:.1%} more"]


def budget_notes(limits: Limits, ladder: Sequence[int]) -> list[str]:
    """Budgets that the proposal keeps by the middle of the forecast and not by all of its range."""
    notes = []
    for name, unit, law, budget in limits.limited if ladder else ():
        low, high = law.between(ladder)
        if high > budget:
            middle, span = short_figure(law.of(ladder)), f"{short_figure(low)} to {short_figure(high)}"
            notes.append(
                f"uncertain: this ladder keeps the {name} budget of {budget:g} {unit} by the middle of the forecast, "
                f"{middle} {unit}; its range is {span} {unit}"
            )
    return notes


def why_empty(
    histogram: Mapping[int, int],
    default: Sequence[int],
    cost: CostModel,
    replay_limit: int | None,
    limits: Limits,
    step: int = 1,
) -> tuple[str, bool]:
    """Why there is no bucket worth capturing, and whether that is certain.

    Eager is cheapest, or a limit leaves room for none. It is uncertain where the range of what the smallest ladder
    takes has the budget in it.
    """
    free, _ = best_ladder(histogram, default, cost, replay_limit, Limits(), step)
    if not free:
        return "by these costs eager is cheapest", True
    if limits.max_buckets == 0:
        return "no bucket is allowed", True
    smallest = _smallest_of_use(histogram, cost, replay_limit, step)
    missed = [one for one in limits.limited if one[2].of(smallest) > one[3]]
    # A budget that certainly holds nothing decides before one that may.
    for name, unit, law, budget in sorted(missed, key=lambda one: one[2].between(smallest)[0] <= one[3]):
        low, high = law.between(smallest)
        takes = f"a ladder of the bucket {smallest[0]} alone takes {law.words(smallest, unit)}"
        works = f"the smallest {name} budget that works is {_up(law.of(smallest))} {unit}"
        works += f", certainly {_up(high)} {unit}" if high > law.of(smallest) else ""
        if low <= budget:
            return f"uncertain whether anything fits: {takes}, the {name} budget is {budget:g} {unit}; {works}", False
        return f"nothing fits: {takes}, the {name} budget is {budget:g} {unit}; {works}", True
    return "what fits within the limits is dearer than eager", True


def _smallest_of_use(
    histogram: Mapping[int, int], cost: CostModel, replay_limit: int | None, step: int
) -> tuple[int, ...]:
    """The ladder of the smallest bucket that saves anything, else of the smallest there is."""
    every = candidate_buckets(histogram, (), step)
    eager = cover(histogram, (), cost, replay_limit).mean_cost
    found = (one for one in every if cover(histogram, (one,), cost, replay_limit).mean_cost < eager)
    return (next(found, every[0]),)


def _up(value: float) -> str:
    """Rounded up to hundredths: a budget has to hold what it is for."""
    return f"{math.ceil(round(value * 100, 6)) / 100:g}"
