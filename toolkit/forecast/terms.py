"""What a forecast consists of: terms with ranges and sources, and figures by bucket. Pure data; MiB is 2**20 bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

MIB = 1 << 20
GRAPH_POOL, RETAINED, DRIVER, WORKSPACE, CONTEXT = (
    "graph pool", "retained tensors", "driver per segment", "library workspaces", "context",
)  # fmt: skip
TERMS = (GRAPH_POOL, RETAINED, DRIVER, WORKSPACE, CONTEXT)
"""The five terms. `context` is taken before the weights: it is named here and is no part of a total."""
TORCH_TERMS = frozenset({GRAPH_POOL, RETAINED})


@dataclass(frozen=True, slots=True)
class Range:
    """MiB: the figure expected, and between which it should lie. An exact figure has all three equal."""

    mid: float
    low: float
    high: float

    @classmethod
    def exact(cls, mib: float) -> Range:
        """A figure that is no estimate."""
        return cls(mib, mib, mib)

    def __add__(self, other: Range) -> Range:
        return Range(self.mid + other.mid, self.low + other.low, self.high + other.high)

    def __sub__(self, other: Range) -> Range:
        """Bound by bound: for two points on one line, of which the other came first."""
        return Range(self.mid - other.mid, self.low - other.low, self.high - other.high)


ZERO = Range.exact(0.0)


def total(ranges: Iterable[Range]) -> Range:
    """The sum, bound by bound."""
    return sum(ranges, ZERO)


@dataclass(frozen=True, slots=True)
class Term:
    """One part of what a ladder costs when the whole of it is captured."""

    name: str
    mib: Range
    source: str


@dataclass(frozen=True, slots=True)
class BucketForecast:
    """One bucket, in order of capture. `peak` is the most in use while it is captured, counted from the start."""

    num_tokens: int
    added: Range
    cumulative: Range
    peak: Range


@dataclass(frozen=True, slots=True)
class Forecast:
    """What capturing a ladder costs: terms that add up to the total, and the way there, bucket by bucket.

    `capture_s` is seconds per bucket in order of capture, empty where no data supports one.
    """

    engine: str
    terms: tuple[Term, ...]
    buckets: tuple[BucketForecast, ...]
    notes: tuple[str, ...] = ()
    capture_s: tuple[float, ...] = field(default=())

    @property
    def total(self) -> Range:
        """MiB that are gone from free memory when the capture has ended."""
        return total(term.mib for term in self.terms if term.name != CONTEXT)

    @property
    def torch_pool(self) -> Range:
        """The part of the total that torch's allocator holds."""
        return total(term.mib for term in self.terms if term.name in TORCH_TERMS)

    @property
    def non_torch(self) -> Range:
        """The part of the total that torch knows nothing of."""
        return total(term.mib for term in self.terms if term.name not in TORCH_TERMS and term.name != CONTEXT)

    @property
    def peak(self) -> Range:
        """The most MiB in use at once on the way: this much has to be free, or the capture runs out of memory."""
        highest = [bucket.peak for bucket in self.buckets] or [ZERO]
        return Range(*(max(getattr(one, name) for one in highest) for name in ("mid", "low", "high")))

    def frame(self) -> pd.DataFrame:
        """One row per bucket in order of capture; `_mib` columns with `_low` and `_high` beside them, `capture_s`."""
        import pandas as pd

        rows = []
        for position, bucket in enumerate(self.buckets):
            row: dict[str, float | int | None] = {"num_tokens": bucket.num_tokens}
            for name in ("added", "cumulative", "peak"):
                one: Range = getattr(bucket, name)
                row |= {f"{name}_mib": one.mid, f"{name}_low_mib": one.low, f"{name}_high_mib": one.high}
            row["capture_s"] = self.capture_s[position] if self.capture_s else None
            rows.append(row)
        names = [f"{name}{bound}_mib" for name in ("added", "cumulative", "peak") for bound in ("", "_low", "_high")]
        columns = ["num_tokens", *names, "capture_s"]
        return pd.DataFrame(rows, columns=columns).astype({"num_tokens": "Int64", "capture_s": "float64"})

    def terms_frame(self) -> pd.DataFrame:
        """One row per term: MiB expected, low and high, and where the figure comes from."""
        import pandas as pd

        rows = [(term.name, term.mib.mid, term.mib.low, term.mib.high, term.source) for term in self.terms]
        return pd.DataFrame(rows, columns=["term", "mib", "low_mib", "high_mib", "source"])
