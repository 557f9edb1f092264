"""Which start of a log is the one to look at, and what stands around a line of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.serverlogs.lines import Source, read_lines

if TYPE_CHECKING:
    from toolkit.serverlogs.diagnosis import Diagnosis
    from toolkit.serverlogs.startup import Startup

AROUND = 4
"""Lines shown before and after the one that is meant."""
MOST_CHARACTERS, MOST_BESIDE = 4_000, 300
"""Characters kept of the line that is meant, and of each line beside it; the middle of a longer one is left out."""


@dataclass(frozen=True, slots=True)
class ExcerptLine:
    """One line as the log has it, without colours; `meant` is whether it is the one that was asked for."""

    number: int
    text: str
    meant: bool


def start_to_show(diagnosis: Diagnosis) -> Startup | None:
    """The start that the most serious finding is about, the last such one; without errors and warnings the last start.

    None for a log without any start.
    """
    serious = [number for one in diagnosis.findings[:1] if one.severity != "info" for number in one.startups]
    by_number = {startup.index: startup for startup in diagnosis.startups}
    meant = by_number.get(max(serious, default=-1))
    return meant or (diagnosis.startups[-1] if diagnosis.startups else None)


def excerpt(source: Source, line: int, around: int = AROUND) -> tuple[ExcerptLine, ...]:
    """The lines around `line` (from 1), numbered as in a diagnosis of the same source; none when it has no such line.

    The states of a progress bar that a terminal draws over each other are one line; they are joined with a blank.

    Raises:
        InvalidInput: the source cannot be read.
    """
    found: dict[int, list[str]] = {}
    last = 0
    for number, text in read_lines(source):
        if number > line + around:
            last = line + around
            break
        last = number
        if number >= line - around:
            found.setdefault(number, []).append(text)
    if not 1 <= line <= last:
        return ()
    numbers = range(max(line - around, 1), min(last, line + around) + 1)
    return tuple(
        ExcerptLine(
            number,
            shortened(" ".join(found.get(number, [])), MOST_CHARACTERS if number == line else MOST_BESIDE),
            number == line,
        )
        for number in numbers
    )


def shortened(text: str, most: int) -> str:
    """`text`, or its two ends with a word on how much was left out between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"
