"""The prefill ladder of a server, as far as its log shows it: as captured, as listed in its arguments, as counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs.capture_report import CaptureReport, capture_reports
from toolkit.serverlogs.startup import Startup
from toolkit.settings import MAX_BUCKET_TOKENS

_LISTS = ("prefill.bs", "cuda_graph_bs_prefill", "piecewise_cuda_graph_tokens")
_CEILINGS = ("cuda_graph_max_bs_prefill", "piecewise_cuda_graph_max_tokens", "prefill.max_bs")
_SMALLEST = 4


@dataclass(frozen=True, slots=True)
class ServerLadder:
    """Buckets in tokens, smallest first; the line that shows them, and what it is, in words."""

    buckets: tuple[int, ...]
    line: int
    shown_by: str

    @property
    def ceiling(self) -> int | None:
        """The ceiling whose default ladder this is, None for a ladder of its own."""
        largest = self.buckets[-1]
        return largest if tuple(generate_prefill_buckets(largest)) == self.buckets else None


def server_ladder(startup: Startup) -> ServerLadder | None:
    """The target's prefill ladder of a start; None where the log does not show all of it.

    A list that is printed goes before a ceiling. A default ladder is taken from its ceiling only if it has as many
    buckets as the capture counted to, where that is known.
    """
    capture = next((each for each in _captures(startup) if each.n_buckets), None)
    counted = capture.n_buckets if capture is not None else None
    for found in (*_printed(startup), *_from_ceilings(startup, capture)):
        if counted is None or counted == len(found.buckets):
            return found
    return None


def _captures(startup: Startup) -> list[CaptureReport]:
    return [each for each in capture_reports(startup) if each.phase == "prefill" and each.role == "target"]


def _printed(startup: Startup) -> Iterator[ServerLadder]:
    for capture in _captures(startup):
        if capture.buckets:
            yield ServerLadder(capture.buckets, min(capture.lines, default=0), "the buckets of its capture")
    start = startup.start
    for name in _LISTS if start is not None else ():
        assert start is not None
        listed = start.values.get(name)
        if isinstance(listed, tuple | list) and listed and all(0 < each <= MAX_BUCKET_TOKENS for each in listed):
            yield ServerLadder(tuple(sorted(set(listed))), start.line, f"its argument {name}")


def _from_ceilings(startup: Startup, capture: CaptureReport | None) -> Iterator[ServerLadder]:
    """Default ladders up to a ceiling: of the arguments, the first bucket of the bars, the chunk of a counted one."""
    places: list[tuple[object, int, str]] = []
    if startup.start is not None:
        values, line = startup.start.values, startup.start.line
        places += [(values.get(name), line, f"its argument {name}") for name in _CEILINGS]
    if capture is not None and capture.series and capture.series[0].done == 0:
        places.append((capture.series[0].bucket, capture.series[0].line, "the first bar of its capture"))
    if capture is not None:
        words = f"its chunk and {capture.n_buckets} buckets counted"
        places += [(each.chunked_prefill_size, each.line, words) for each in startup.limits[:1]]
    for ceiling, line, words in places:
        if isinstance(ceiling, int) and _SMALLEST <= ceiling <= MAX_BUCKET_TOKENS:
            yield ServerLadder(tuple(generate_prefill_buckets(ceiling)), line, words)
