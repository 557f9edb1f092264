"""What is said about a log: one sentence with a stable code, how serious, the lines it rests on, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SEVERITIES = ("info", "warning", "error")
"""In rising order: worth knowing, costs something, the server did not come up (or fell) because of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        code: stable name, for example `GATE_SKIPPED`.
        severity: one of `SEVERITIES`.
        message: one plain sentence, with its figures and their units.
        lines: the lines of the log that show it, first one first.
        advice: what to do about it, with values where the log has what they follow from; empty when nothing is to do.
        source: public address of the fact behind it, None where there is none.
        ranks: labels of the ranks concerned, empty when it concerns the whole start.
        startups: numbers of the starts that show it, from 0.
    """

    code: str
    severity: str
    message: str
    lines: tuple[int, ...]
    advice: str = ""
    source: str | None = None
    ranks: tuple[str, ...] = ()
    startups: tuple[int, ...] = field(default=())

    @property
    def line(self) -> int | None:
        """The first line that shows it."""
        return self.lines[0] if self.lines else None

    def to_dict(self) -> dict[str, Any]:
        """As `prefill-lab diagnose --json` prints it."""
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "line": self.line,
            "lines": list(self.lines),
            "advice": self.advice,
            "source": self.source,
            "ranks": list(self.ranks),
            "startups": list(self.startups),
        }


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The most serious first, then by line, each once."""
    unique = dict.fromkeys(findings)
    return tuple(sorted(unique, key=lambda one: (-SEVERITIES.index(one.severity), one.line or 0, one.code)))
