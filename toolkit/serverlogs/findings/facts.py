"""What a check is given: one start, and what is known around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from toolkit.serverlogs import chosen
from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.events import Value
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.findings.room import ForecastRoom
from toolkit.serverlogs.ledger import RankLedger
from toolkit.serverlogs.replay import ReplayStats
from toolkit.serverlogs.startup import Capture, Startup
from toolkit.settings import MAX_BUCKET_TOKENS


@dataclass(frozen=True)
class Facts:
    """One start with the figures drawn from it.

    Attributes:
        startup: what the log said, line by line.
        captures: its captures as figures.
        ledgers: its memory, rank by rank.
        replay: its prefill batches, None when it has none.
        version: release that wrote the log, None when not known.
        previous: the start before it in the same log.
        followed: whether another start of the same server follows.
        room: what a forecast says about this start's prefill capture, None without one.
    """

    startup: Startup
    captures: tuple[CaptureReport, ...]
    ledgers: tuple[RankLedger, ...]
    replay: ReplayStats | None
    version: str | None = None
    previous: Facts | None = None
    followed: bool = False
    room: ForecastRoom | None = None

    def argument(self, name: str) -> Value:
        """A server argument as printed; None when the log does not have it."""
        return chosen.argument(self.startup, name)

    @property
    def explicit_backend(self) -> str | None:
        """The prefill backend chosen by hand, as far as printed arguments show."""
        return chosen.explicit_backend(self.startup)

    @property
    def switched_off(self) -> str | None:
        """The flag that turned the prefill graph off by hand, as far as printed arguments show."""
        return chosen.switched_off(self.startup)

    @property
    def flags(self) -> dict[str, str]:
        """The flags of this build for `prefill` and `decode` ceilings, and `buckets` for the prefill list itself."""
        return _OLD_FLAGS if any(_is_old(each) for each in self.startup.captures) else _FLAGS

    @property
    def mla(self) -> bool:
        """Whether the KV pool is that of an MLA model: one size for K and V together."""
        pools = [pool for log in self.startup.ranks.values() for pool in log.kv_pools if not pool.after_capture]
        return bool(pools) and all(pool.kv_gib is not None for pool in pools)

    @property
    def chunk(self) -> int | None:
        """chunked_prefill_size: of the line of limits, else of the arguments; None when unknown, off or no size."""
        printed = [each.chunked_prefill_size for each in self.startup.limits if each.chunked_prefill_size is not None]
        value: Value = printed[0] if printed else self.argument("chunked_prefill_size")
        chunk = chosen.positive(value)
        return chunk if chunk is not None and chunk <= MAX_BUCKET_TOKENS else None

    def ledger_of(self, rank: str) -> RankLedger | None:
        """The memory of one rank."""
        return next((ledger for ledger in self.ledgers if ledger.rank == rank), None)


_FLAGS = {
    "prefill": "--cuda-graph-max-bs-prefill",
    "decode": "--cuda-graph-max-bs-decode",
    "buckets": "--cuda-graph-bs-prefill",
}
_OLD_FLAGS = {
    "prefill": "--piecewise-cuda-graph-max-tokens",
    "decode": "--cuda-graph-max-bs",
    "buckets": "--piecewise-cuda-graph-tokens",
}


def _is_old(capture: Capture) -> bool:
    """Builds up to about June 2026, by their wording; a failed capture that only bars tell of is taken for theirs."""
    said = capture.end or capture.begin
    return said.wording == "old" if said is not None else capture.skip is None


Check = Callable[[Facts], Iterable[Finding]]


def labels(ranks: Iterable[str]) -> tuple[str, ...]:
    """Labels of the ranks concerned, each once; empty for a server on one GPU, whose rank has no name."""
    found = tuple(sorted(set(ranks), key=_by_number))
    return () if found == ("rank 0",) else found


def _by_number(label: str) -> list[tuple[str, int]]:
    """TP2 before TP10."""
    return [(letters, int(digits)) for letters, digits in re.findall(r"(\D+)(\d{1,9})", label)]


def listed(names: Iterable[str], most: int = 4) -> str:
    """`TP0, TP1 and 6 more`."""
    found = list(names)
    if len(found) <= most:
        return ", ".join(found)
    return f"{', '.join(found[:most])} and {len(found) - most} more"


def of_ranks(ranks: Iterable[str]) -> str:
    """` on TP0, TP1`, or nothing where ranks have no names."""
    found = labels(ranks)
    return f" on {listed(found)}" if found else ""


def quoted(words: str, most: int = 200) -> str:
    """Words of the log, shortened, without characters that are not to be seen."""
    shown = "".join(mark if mark.isprintable() else "?" for mark in words[:most])
    return shown.strip().rstrip(".")


def gib(value: float) -> str:
    """`1.71 GiB`; what would read as nothing in MiB, `2.0 MiB`."""
    return f"{value * 1024:.1f} MiB" if 0 < abs(value) < 0.01 else f"{value:.2f} GiB"


def between(values: Iterable[float]) -> str:
    """`2.05 GiB`, or `2.05 to 2.28 GiB` over ranks."""
    found = sorted(values)
    least, most = gib(found[0]), gib(found[-1])
    return least if least == most else f"{least.removesuffix(' GiB')} to {most}"
