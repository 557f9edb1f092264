"""What a ladder costs: time of a replay and of an eager prefill, memory and seconds of a capture. Pure numbers.

Each model says where its figures come from, and nothing here has a figure for a capture's memory or time: those come
from a plan or from a measured run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from toolkit.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

# From the pairs of public PR https://github.com/wejoncy/sfllm/pull/46 (Qwen3-4B, 22 requests, full graphs): 129 tokens
# in a bucket of 160 take 16.613 ms eager and 5.685 ms replayed, 513 in 640 take 16.371 and 13.729. A replay is then
# 3.0 ms and 0.0168 ms a token, eager is flat and meets it at 800 tokens; 3.0 ms are the work of 180 tokens.
LAUNCH_TOKENS, REPLAY_TOKENS = 800, 180
# Where launching no longer limits, public figures disagree: graphs off was 4 to 7 % faster on two small cards
# (sgl-project/sglang#40094), sfllm#46 pads no more than 16 tokens over 1024, and padding 6940 tokens to 8192 still
# gained 7.7 % for a 1T MoE at tp 4 (sgl-project/sglang#31203). A ladder that pads too much costs a few percent, one
# that ends too early may cost half, so the choice leans towards replay.
RESIDUAL_SHARE = 0.05
MAX_ASSUMED_TOKENS = 1 << 24


class Speed(Protocol):
    """A timed bucket, as in a RunRecord: median milliseconds of `num_tokens` tokens, eager and replayed."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the bucket, all of them used."""

    @property
    def eager_ms(self) -> float:
        """Eager, in milliseconds."""

    @property
    def replay_ms(self) -> float:
        """Replayed, in milliseconds."""


@dataclass(frozen=True)
class Curve:
    """A figure against tokens: straight between its knots, and on with the outermost slopes, never under 0."""

    knots: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        at = [tokens for tokens, _ in self.knots]
        if not at or any(left >= right for left, right in itertools.pairwise(at)):
            raise InvalidInput(
                f"knots at {at[:6]} are no curve", "at least one, each at more tokens than the one before"
            )

    @classmethod
    def line(cls, at_zero: float, per_token: float) -> Curve:
        """A straight line."""
        return cls(((0.0, at_zero), (1.0, at_zero + per_token)))

    def at(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """The figure at each of `tokens`."""
        where = np.asarray(tokens, dtype=np.float64)
        x, y = (np.array(part, dtype=np.float64) for part in zip(*self.knots, strict=True))
        if len(x) == 1:
            return np.full_like(where, max(y[0], 0.0))
        slopes = np.diff(y) / np.diff(x)
        inside = np.interp(where, x, y)
        below, above = np.minimum(where - x[0], 0.0), np.maximum(where - x[-1], 0.0)
        # A falling end is noise of a measurement: going on with it would make the longest prefill the cheapest.
        beyond = below * max(float(slopes[0]), 0.0) + above * max(float(slopes[-1]), 0.0)
        return np.asarray(np.maximum(inside + beyond, 0.0), dtype=np.float64)


@dataclass(frozen=True)
class CostModel:
    """What one prefill costs, in `unit`: `replay` of a bucket, whatever is in it, and `eager` of its own tokens.

    Attributes:
        eager: against the tokens of the prefill.
        replay: against the tokens of the bucket.
        unit: of both.
        source: where the figures come from, or that they are assumed.
        measured_up_to: the largest bucket that was timed, None where nothing was.
    """

    eager: Curve
    replay: Curve
    unit: str
    source: str
    measured_up_to: int | None = None

    @classmethod
    def assumed(
        cls,
        launch_tokens: int = LAUNCH_TOKENS,
        replay_tokens: int = REPLAY_TOKENS,
        residual_share: float = RESIDUAL_SHARE,
    ) -> CostModel:
        """Costs where nothing was measured, in tokens' worth of work. A replay costs its bucket plus `replay_tokens`.

        Eager takes at least as long as a replay of `launch_tokens`, because the host cannot launch faster, and where
        that no longer limits `residual_share` more a token than a replay without padding. The first two defaults are
        read off public PR wejoncy/sfllm#46 for one 4B model, the third is a choice between public figures that
        disagree. More layers, or a model spread over more GPUs, have a higher `launch_tokens`. The pairs are of full
        graphs: breakable ones leave attention to the host and save a smaller share (public PR
        sgl-project/sglang-omni#1398: 16.8 against 22.5 ms), which `replay_tokens` expresses; it does not change which
        ladder is cheapest. Measure yours with `prefill-lab capture`.

        Raises:
            InvalidInput: a value is negative or absurdly large.
        """
        for name, value, most in (
            ("launch tokens", launch_tokens, MAX_ASSUMED_TOKENS),
            ("replay tokens", replay_tokens, MAX_ASSUMED_TOKENS),
            ("residual share", residual_share, 10),
        ):
            if not 0 <= value <= most:
                raise InvalidInput(f"{name} {value:g} is out of range", f"0 to {most}")
        floor, slope = float(replay_tokens + launch_tokens), 1 + residual_share
        meets = launch_tokens / slope
        # Two knots at one place would have no slope between them.
        knots = ((meets, floor), (meets + 1, floor + slope))
        eager = Curve(((0.0, floor), *knots) if meets else knots)
        chosen = (launch_tokens, replay_tokens, residual_share) != (LAUNCH_TOKENS, REPLAY_TOKENS, RESIDUAL_SHARE)
        origin = "chosen by hand" if chosen else "read off public PR wejoncy/sfllm#46, one 4B model with full graphs"
        return cls(
            eager,
            Curve.line(float(replay_tokens), 1.0),
            "tokens of work",
            f"assumed, not measured: a replay takes {replay_tokens} tokens more than its bucket, eager at least the "
            f"time of a replay of {launch_tokens} tokens ({origin}), and {residual_share:.0%} more work than a replay "
            "of as many tokens",
        )

    @classmethod
    def from_speed(cls, points: Sequence[Speed], source: str) -> CostModel:
        """Milliseconds as measured, straight between the buckets that were timed and on beyond them.

        Raises:
            InvalidInput: fewer than two buckets were timed.
        """
        ordered = sorted({point.num_tokens: point for point in points}.items())
        if len(ordered) < 2:
            raise InvalidInput(
                f"{len(ordered)} buckets were timed eager against replay",
                "costs need at least two",
                "capture with speed measured, or leave the record out",
            )
        eager = Curve(tuple((float(tokens), point.eager_ms) for tokens, point in ordered))
        replay = Curve(tuple((float(tokens), point.replay_ms) for tokens, point in ordered))
        return cls(eager, replay, "ms", f"measured, {source}", ordered[-1][0])


def short_figure(value: float) -> str:
    """Two decimals, and for less than a tenth two digits, so that little does not read as nothing."""
    return f"{value:.2g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


@dataclass(frozen=True)
class LadderLaw:
    """What capturing a ladder takes, in GiB or in seconds: a max-term, a count-term and a sum-term.

    Attributes:
        largest: paid once, by the largest bucket, against its tokens; what every ladder pays is part of it.
        per_bucket: paid by each bucket, the largest included.
        per_token: paid by each token of each bucket.
        source: where the figures come from.
        check: the figure of a whole ladder, where the terms are only fitted to it.
        bounds: between which the figure of a whole ladder should lie; None where nothing says.
    """

    largest: Curve
    per_bucket: float
    per_token: float
    source: str
    check: Callable[[tuple[int, ...]], float] | None = None
    bounds: Callable[[tuple[int, ...]], tuple[float, float]] | None = None

    def __post_init__(self) -> None:
        if not (self.per_bucket >= 0 and self.per_token >= 0):
            raise InvalidInput(
                f"a law with {self.per_bucket:g} a bucket and {self.per_token:g} a token cannot be used",
                "no bucket gives anything back: both are 0 or more",
            )

    def fitted(self, ladder: Sequence[int]) -> float:
        """The figure by the terms; 0 for no ladder."""
        if not ladder:
            return 0.0
        once = float(self.largest.at(max(ladder)))
        return once + self.per_bucket * len(ladder) + self.per_token * sum(ladder)

    def of(self, ladder: Sequence[int]) -> float:
        """The figure as well as it is known: `check` where there is one, else the terms."""
        return self.check(tuple(ladder)) if self.check is not None and ladder else self.fitted(ladder)

    def between(self, ladder: Sequence[int]) -> tuple[float, float]:
        """(least, most) that a ladder should take; the figure itself, twice, where no range is known."""
        if self.bounds is None or not ladder:
            return self.of(ladder), self.of(ladder)
        return self.bounds(tuple(ladder))

    def words(self, ladder: Sequence[int], unit: str) -> str:
        """What a ladder takes, with its range where there is one, for example `0.51 GiB (0.38 to 0.68)`."""
        low, high = self.between(ladder)
        words = f"{short_figure(self.of(ladder))} {unit}"
        return words + (f" ({short_figure(low)} to {short_figure(high)})" if low != high else "")

    @classmethod
    def from_steps(
        cls, steps: Sequence[tuple[int, float]], source: str, *, once: float = 0.0, grows: bool = True
    ) -> LadderLaw:
        """Fitted to what each bucket of one capture took, in order of capture, largest first.

        One capture shows one ceiling only. What its first bucket took beyond the others' line is taken to grow with
        that bucket's tokens, as the pool does, or, without `grows`, to be the same for every ladder, as compiling is.
        `once` is added whatever the ladder.

        Raises:
            InvalidInput: no bucket was captured.
        """
        if not steps:
            raise InvalidInput("no bucket has a figure for what it took", "a run that captured at least one bucket")
        (first, took), rest = steps[0], steps[1:]
        per_bucket, per_token = fit_line(rest) if rest else (0.0, 0.0)
        beyond = max(took - per_bucket - per_token * first, 0.0)
        largest = Curve.line(once, beyond / first) if grows else Curve.line(once + beyond, 0.0)
        return cls(largest, per_bucket, per_token, source)


def fit_line(steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The line a + b * tokens with a and b not negative that is closest to what the steps took."""
    tokens, took = (np.array(part, dtype=np.float64) for part in zip(*steps, strict=True))
    flat, slope = max(float(took.mean()), 0.0), max(float((tokens * took).sum() / (tokens**2).sum()), 0.0)
    choices = [(flat, 0.0), (0.0, slope)]
    spread = float(((tokens - tokens.mean()) ** 2).sum())
    if spread > 0:
        both = float(((tokens - tokens.mean()) * (took - took.mean())).sum()) / spread
        start = float(took.mean()) - both * float(tokens.mean())
        if both >= 0 and start >= 0:
            choices.append((start, both))
    return min(choices, key=lambda one: float(((one[0] + one[1] * tokens - took) ** 2).sum()))
