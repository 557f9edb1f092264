"""How a ladder does for prefills it was not fitted to: half of the traffic, held out. Pure numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.ladder_choice import Limits, best_ladder
from toolkit.ladder_coverage import Coverage, cover
from toolkit.ladder_models import CostModel

FEWEST_HELD_OUT = 40
"""With fewer prefills than this, half of them say nothing."""
_SEED = 20260714
_MOST_DRAWN = 1 << 53


@dataclass(frozen=True)
class HeldOut:
    """A ladder fitted to one random half of the prefills, and what it does for the other half.

    It is another ladder than the proposal, which is fitted to all of them: it shows what fitting to this many prefills
    is worth for the next ones, if those are like these.

    Attributes:
        fitted_on: prefills the ladder was fitted to.
        fitted: what that ladder does for the other half.
        default: what the default ladder does for the other half.
    """

    fitted_on: int
    fitted: Coverage
    default: Coverage

    @property
    def gain(self) -> float:
        """How much less a prefill of the other half costs than with the default ladder; negative: more."""
        return 1 - self.fitted.mean_cost / self.default.mean_cost if self.default.mean_cost else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The figures by name; shares are 0 to 1, costs in `unit`."""
        return {
            "fitted_on": self.fitted_on,
            "prefills": self.fitted.prefills,
            "buckets": len(self.fitted.ladder),
            "eager_share": self.fitted.eager_share,
            "default_eager_share": self.default.eager_share,
            "mean_cost": self.fitted.mean_cost,
            "default_mean_cost": self.default.mean_cost,
            "unit": self.fitted.unit,
            "gain_over_default": self.gain,
        }

    def words(self) -> str:
        """The figures in one sentence."""
        cost = f"{abs(self.gain):.1%} {'lower' if self.gain >= 0 else 'higher'} than with the default ladder"
        return (
            f"fitted to a random half ({self.fitted_on} prefills), the other half runs {self.fitted.eager_share:.2%} "
            f"eager (default ladder {self.default.eager_share:.2%}), cost {cost}"
        )


def hold_out(
    histogram: Mapping[int, int],
    default: Sequence[int],
    cost: CostModel,
    replay_limit: int | None,
    limits: Limits,
    step: int = 1,
    required: Sequence[int] = (),
) -> HeldOut | None:
    """The check for this traffic with the limits of the design; None with fewer than `FEWEST_HELD_OUT` prefills.

    Each prefill goes to either half by chance, with a fixed seed: the same traffic has the same halves.
    """
    if sum(histogram.values()) < FEWEST_HELD_OUT:
        return None
    draw = np.random.default_rng(_SEED)
    one = {size: _half(draw, histogram[size]) for size in sorted(histogram)}
    half = {size: count for size, count in one.items() if count}
    other = {size: histogram[size] - count for size, count in one.items() if histogram[size] > count}
    if not half or not other:
        return None
    ladder, _ = best_ladder(half, default, cost, replay_limit, limits, step, required)
    return HeldOut(
        sum(half.values()), cover(other, ladder, cost, replay_limit), cover(other, default, cost, replay_limit)
    )


def _half(draw: np.random.Generator, count: int) -> int:
    """How many of `count` prefills go to the first half; of more than can be drawn, just half."""
    return int(draw.binomial(count, 0.5)) if count <= _MOST_DRAWN else count // 2
