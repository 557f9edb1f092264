"""What a ladder does for a traffic: how many prefills replay, how much is padding, what it costs. Pure numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.ladder_models import CostModel


@dataclass(frozen=True)
class BucketUse:
    """One bucket: how many prefills replay in it, their tokens, and the rows computed for padding."""

    bucket: int
    prefills: int
    tokens: int
    padded_tokens: int


@dataclass(frozen=True)
class Coverage:
    """What a ladder does for a traffic. Shares are 0 to 1.

    Attributes:
        ladder: buckets, smallest first; empty where nothing is captured.
        prefills: how many there are.
        tokens: how many they have.
        replayed: prefills that replay.
        too_long: prefills that run eager because the largest bucket is too small.
        too_padded: prefills that run eager because their bucket is over the replay limit.
        padded_tokens: rows computed for padding.
        mean_cost: of one prefill, in `unit`.
        unit: of the cost.
        uses: what each bucket does, smallest first.
        memory_gib: GiB the capture takes, None where nothing says.
        capture_s: seconds the capture takes, None where nothing says.
    """

    ladder: tuple[int, ...]
    prefills: int
    tokens: int
    replayed: int
    too_long: int
    too_padded: int
    padded_tokens: int
    mean_cost: float
    unit: str
    uses: tuple[BucketUse, ...]
    memory_gib: float | None = None
    capture_s: float | None = None

    @property
    def hit_rate(self) -> float:
        """Share of prefills that replay."""
        return self.replayed / self.prefills

    @property
    def eager_share(self) -> float:
        """Share of prefills that run eager."""
        return (self.too_long + self.too_padded) / self.prefills

    @property
    def padded_share(self) -> float:
        """Share of padding in the tokens that are computed."""
        return self.padded_tokens / (self.tokens + self.padded_tokens)

    @property
    def buckets_used(self) -> int:
        """Buckets in which at least one prefill replays."""
        return sum(use.prefills > 0 for use in self.uses)


def cover(
    histogram: Mapping[int, int],
    ladder: Sequence[int],
    cost: CostModel,
    replay_limit: int | None,
    *,
    memory_gib: float | None = None,
    capture_s: float | None = None,
) -> Coverage:
    """What `ladder` does for prefills of these token counts; `replay_limit` as in `exceeds_replay_limit`."""
    tokens = np.array(sorted(histogram), dtype=np.int64)
    weights = np.array([histogram[one] for one in tokens.tolist()], dtype=np.float64)
    buckets = np.array(sorted(ladder), dtype=np.int64)
    # Behind the last bucket stands one that holds nothing, so that every prefill finds a place.
    place = np.searchsorted(buckets, tokens)
    long = place == len(buckets)
    chosen = np.append(buckets, 0)[place]
    padded = ~long & (chosen > (tokens * replay_limit if replay_limit is not None else chosen))
    replays = ~long & ~padded
    costs = np.where(replays, cost.replay.at(chosen), cost.eager.at(tokens))
    waste = (chosen - tokens) * weights
    uses = tuple(
        BucketUse(
            int(bucket),
            _total(weights[here := replays & (place == position)]),
            _total((tokens * weights)[here]),
            _total(waste[here]),
        )
        for position, bucket in enumerate(buckets)
    )
    count = _total(weights)
    return Coverage(
        ladder=tuple(int(bucket) for bucket in buckets),
        prefills=count,
        tokens=_total(tokens * weights),
        replayed=_total(weights[replays]),
        too_long=_total(weights[long]),
        too_padded=_total(weights[padded]),
        padded_tokens=sum(use.padded_tokens for use in uses),
        mean_cost=float((costs * weights).sum()) / count,
        unit=cost.unit,
        uses=uses,
        memory_gib=memory_gib,
        capture_s=capture_s,
    )


def _total(values: np.ndarray) -> int:
    return int(values.sum())
