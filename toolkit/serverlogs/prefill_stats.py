"""`Prefill batch` lines of one start, added up."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_LENGTHS = 20_000
"""Different lengths that are kept apart."""


@dataclass(slots=True)
class LengthCount:
    """Prefill batches of one length that all replayed a graph, or all ran eager."""

    batches: int
    first_line: int
    cached_tokens: int = 0


@dataclass(slots=True)
class PrefillStats:
    """`Prefill batch` lines, added up: a log of a million of them takes no more room than its distinct lengths.

    Attributes:
        batches: lines seen; `before_ready` of them were the server's own warm-up.
        before_ready: see `batches`.
        lengths: by (new tokens, whether a graph was replayed; None in builds that do not say). Lengths beyond
            `MOST_LENGTHS` different ones are counted in `not_kept` instead.
        by_graph: all batches by the same True, False or None.
        first_line: of the first of each.
        new_tokens: their sum; `cached_tokens` of those found in the prefix cache.
        cached_tokens: see `new_tokens`.
        not_kept: batches that are in none of `lengths`.
    """

    batches: int = 0
    before_ready: int = 0
    lengths: dict[tuple[int, bool | None], LengthCount] = field(default_factory=dict)
    by_graph: dict[bool | None, int] = field(default_factory=dict)
    first_line: dict[bool | None, int] = field(default_factory=dict)
    new_tokens: int = 0
    cached_tokens: int = 0
    not_kept: int = 0

    def count(self, graph: bool | None) -> int:
        """All batches that replayed a graph (True), ran eager (False) or did not say (None)."""
        return self.by_graph.get(graph, 0)
