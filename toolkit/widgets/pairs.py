"""Two captures that belong together: under two policies with the same settings otherwise, shown over each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.errors import InvalidInput
from toolkit.policies import get_policy
from toolkit.runs.record import RunRecord
from toolkit.settings import CaptureSettings


@dataclass
class Pair:
    """Two captures in their order, and the records of those that have ended. Told apart by identity, not by value."""

    settings: tuple[CaptureSettings, CaptureSettings]
    records: list[RunRecord] = field(default_factory=list)

    def holds(self, settings: CaptureSettings) -> bool:
        """Whether that capture is one of the two."""
        return any(one is settings for one in self.settings)

    def ended(self, record: RunRecord | None) -> bool:
        """Take the record of one that has ended; whether both have one now."""
        if record is not None:
            self.records.append(record)
        return len(self.records) == len(self.settings)


def pair_of(settings: CaptureSettings, first: str, second: str) -> Pair:
    """The same settings under two policies. Raises InvalidInput for an unknown policy, or the same one twice."""
    names = (get_policy(first).name, get_policy(second).name)
    if first == second:
        raise InvalidInput(
            f"policy {first!r} is picked twice", "two different policies to run side by side", "pick another for B"
        )
    one, other = (CaptureSettings.create(**{**settings.model_dump(), "policy": name}) for name in names)
    return Pair((one, other))
