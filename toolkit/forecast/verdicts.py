"""Whether a policy decided right: what would have fitted, and what that makes of a capture or a skip. Pure.

A wrong skip gave up graphs that would have fitted; a wrong capture tried graphs that did not. Neither is said of a case
whose forecast has both in its range: that is uncertain, and counted apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from toolkit.forecast.outcomes import PolicyOutcome
from toolkit.forecast.terms import Range


class Fits(StrEnum):
    """Whether a ladder fits: at both ends of every range, at neither, or only at one."""

    YES = "yes"
    NO = "no"
    UNCERTAIN = "uncertain"


class Verdict(StrEnum):
    """What became of one decision.

    `no start` is a server that never came to the decision, `no graph` one whose release or user ruled graphs out.
    """

    RIGHT_CAPTURE = "right capture"
    RIGHT_SKIP = "right skip"
    WRONG_SKIP = "wrong skip"
    WRONG_CAPTURE = "wrong capture"
    UNCERTAIN = "uncertain"
    NO_START = "no start"
    NO_GRAPH = "no graph"


DECIDED = (
    Verdict.RIGHT_CAPTURE, Verdict.RIGHT_SKIP, Verdict.WRONG_SKIP, Verdict.WRONG_CAPTURE, Verdict.UNCERTAIN,
)  # fmt: skip
"""Verdicts on a decision, as opposed to none having been taken."""
WRONG = (Verdict.WRONG_SKIP, Verdict.WRONG_CAPTURE)


@dataclass(frozen=True, slots=True)
class Room:
    """GiB free before a capture, between which bounds, and what is needed when it is done."""

    gib: float
    low_gib: float
    high_gib: float
    later_gib: float = 0.0

    def with_more(self, gib: float) -> Room:
        """The same with `gib` more free."""
        return Room(self.gib + gib, self.low_gib + gib, self.high_gib + gib, self.later_gib)


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a ladder fits, and whether it does by the middle of every range (None where the forecast is n/a)."""

    fits: Fits
    by_middle: bool | None

    @property
    def middle(self) -> Fits:
        """By the middle alone."""
        if self.by_middle is None:
            return Fits.UNCERTAIN
        return Fits.YES if self.by_middle else Fits.NO


def would_fit(peak: Range, stays: Range, room: Room) -> Fit:
    """Whether a capture fits: at its worst moment, and when it is done beside what is needed later.

    Args:
        peak: MiB at the worst moment.
        stays: MiB that are gone when the ladder is done.
        room: what is free, and what is needed later, as a figure without a range.

    Returns:
        `yes` if the most it may need fits into the least that may be free, `no` if the least it may need does not fit
        into the most, else `uncertain`. By the middle: the middle of the need against the middle of what is free.
    """
    if not math.isfinite(peak.mid):
        return Fit(Fits.UNCERTAIN, None)

    def holds(peak_mib: float, stays_mib: float, free_gib: float) -> bool:
        return peak_mib / 1024 <= free_gib and stays_mib / 1024 + room.later_gib <= free_gib

    middle = holds(peak.mid, stays.mid, room.gib)
    if holds(peak.high, stays.high, room.low_gib):
        return Fit(Fits.YES, middle)
    if not holds(peak.low, stays.low, room.high_gib):
        return Fit(Fits.NO, middle)
    return Fit(Fits.UNCERTAIN, middle)


def verdict(captures: bool, fits: Fits) -> Verdict:
    """The verdict on a decision.

    Args:
        captures: whether the policy let a capture begin, however it ended.
        fits: of a skip whether the WHOLE ladder would have fitted beside a KV pool that was sized first; of a capture
            whether that which was captured fits. So a ladder that was trimmed counts as right if it captures
            something and nothing overflows; what it gives up is another figure.
    """
    if fits is Fits.UNCERTAIN:
        return Verdict.UNCERTAIN
    if captures:
        return Verdict.RIGHT_CAPTURE if fits is Fits.YES else Verdict.WRONG_CAPTURE
    return Verdict.WRONG_SKIP if fits is Fits.YES else Verdict.RIGHT_SKIP


def let_capture(outcome: PolicyOutcome) -> bool:
    """Whether a capture began: it succeeded, or it ran out of memory on the way or after it."""
    return outcome.outcome != "skipped"


AT_WORST = {
    "gated": "out of memory: it does not start",
    "ungated": "out of memory: it does not start",
    "budgeted": "watched: it stops early, or runs eager",
    "capture_first": "a smaller KV pool",
}
"""What a policy does wherever a capture takes more than its forecast; whether it may, the range says, not this."""

MARKS = {
    "C": "captures the whole ladder",
    "T": "captures a trimmed ladder",
    "L": "captures; what comes later lacks memory",
    "S": "skips: prefill runs eager",
    "X": "out of memory: does not start",
    "-": "does not start, whatever the policy",
    "D": "prefill graph disabled",
}
"""The letter of a cell, and what it stands for."""


def mark(outcome: PolicyOutcome | None) -> str:
    """The letter for what a policy leads to; None is a server that does not come so far."""
    if outcome is None or outcome.code == "out_of_memory_before_capture":
        return "-"
    if outcome.outcome == "oom":
        return "X"
    if outcome.outcome == "skipped":
        return "D" if outcome.code == "disabled" else "S"
    if outcome.starved_gib:
        return "L"
    return "T" if outcome.trimmed else "C"
