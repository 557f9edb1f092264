"""Forecasts as a policy looks at them: of a ladder and of the shorter ones that show which fits."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.forecast.terms import Forecast
from toolkit.policies import BucketNeed, LadderNeed


def ladder_need(forecast: Forecast) -> LadderNeed | None:
    """The forecast in GiB; None where any part of it is n/a.

    The middle of the ranges throughout. A policy that looks at needs keeps a reserve and watches what is really taken,
    so an upper bound would only leave out graphs that fit.
    """
    steps = tuple(
        BucketNeed(one.num_tokens, one.cumulative.mid / 1024, one.peak.mid / 1024) for one in forecast.buckets
    )
    need = LadderNeed(steps, forecast.peak.mid / 1024, forecast.total.mid / 1024)
    return need if need.known else None


def ladder_needs(
    forecast: Callable[[tuple[int, ...]], Forecast], buckets: tuple[int, ...], suits: Callable[[LadderNeed], bool]
) -> tuple[LadderNeed, ...]:
    """Needs of the whole ladder and of those without its largest buckets, around the longest that `suits`.

    A longer ladder never needs less, so the longest that fits is found by halving: six forecasts for 58 buckets.
    Empty when the forecast is n/a.
    """
    ladder, found = tuple(sorted(buckets)), {}

    def fits(count: int) -> bool:
        need = ladder_need(forecast(ladder[:count]))
        if need is not None:
            found[count] = need
        return need is not None and suits(need)

    low, high = 0, len(ladder)
    if fits(high):
        low = high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return tuple(found[count] for count in sorted(found, reverse=True))
