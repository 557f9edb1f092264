"""What a ladder takes by a plan's forecast, as terms a ladder can be designed with."""

from __future__ import annotations

from dataclasses import replace

from toolkit.errors import InvalidInput
from toolkit.forecast.capture_time import seconds_range
from toolkit.forecast.plan import Plan, forecaster
from toolkit.forecast.terms import Range
from toolkit.ladder_models import Curve, LadderLaw, fit_line

_SIZES = tuple(4 << (2 * power) for power in range(8))  # 4 to 65536 tokens


def memory_law(plan: Plan) -> LadderLaw:
    """GiB that must be free for a ladder's capture: the most in use at once, the middle of the forecast.

    The max-term is the forecast of ladders of one bucket, count and sum are fitted to ladders of two. Whole ladders
    are checked against the forecast itself.

    Raises:
        InvalidInput: the plan captures no graph.
    """
    if plan.forecast is None:
        raise InvalidInput(
            "no ladder can be designed", plan.summary, "plan a backend that captures, --backend breakable"
        )
    ask = forecaster(plan.settings)

    def forecast(ladder: tuple[int, ...]) -> Range:
        return ask(plan.model, plan.backend, tuple(sorted(ladder))).peak

    def peak(ladder: tuple[int, ...]) -> float:
        return forecast(ladder).mid / 1024

    def bounds(ladder: tuple[int, ...]) -> tuple[float, float]:
        return forecast(ladder).low / 1024, forecast(ladder).high / 1024

    top = max(plan.buckets)
    alone = peak((top,))
    per_bucket, per_token = fit_line([(size, peak((size, top)) - alone) for size in _SIZES if size < top])
    singles = [(float(size), peak((size,)) - per_bucket - per_token * size) for size in sorted({*_SIZES, top})]
    source = f"forecast (engine {plan.settings.engine}) of {plan.model.id}, tp {plan.settings.tp}, {plan.gpu.name}, "
    source += plan.backend.value
    return LadderLaw(Curve(tuple(singles)), per_bucket, per_token, source, check=peak, bounds=bounds)


def time_law(plan: Plan) -> LadderLaw | None:
    """Seconds of a ladder's capture by the plan's forecast, None where it has none."""
    if plan.forecast is None or not plan.forecast.capture_s:
        return None
    steps = [
        (bucket.num_tokens, took) for bucket, took in zip(plan.forecast.buckets, plan.forecast.capture_s, strict=True)
    ]
    law = LadderLaw.from_steps(steps, f"forecast (engine {plan.settings.engine})", grows=False)
    engine = plan.forecast.engine
    if seconds_range(engine, len(steps)) is None:
        return law
    return replace(law, bounds=lambda ladder: seconds_range(engine, len(ladder)) or (law.of(ladder), law.of(ladder)))
