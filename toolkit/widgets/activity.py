"""What is going on while captures run, from the events they send. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolkit.runs.child import Event

FIRST_BUCKET_NOTE = "the first bucket also pays for what happens only once, such as compilation and loading kernels"


@dataclass(frozen=True, slots=True)
class Activity:
    """What is going on. `done` of `total` are buckets (or steps of a check); `total` is 0 outside of those."""

    running: bool = False
    cancelling: bool = False
    waiting: int = 0
    stage: str = ""
    done: int = 0
    total: int = 0
    num_tokens: int | None = None
    elapsed_s: float = 0.0
    note: str = ""

    @property
    def words(self) -> str:
        """One line: stage, buckets done, elapsed seconds, who waits. Never an estimate of what is left."""
        if not self.running:
            return "idle"
        parts = ["cancelling: stops after the bucket it is in" if self.cancelling else self.stage or "starting"]
        if self.total:
            parts.append(f"{self.done} of {self.total}")
        if self.num_tokens is not None and not self.cancelling:
            parts.append(f"at {self.num_tokens} tokens")
        parts.append(f"{self.elapsed_s:.0f} s elapsed")
        if self.waiting:
            parts.append(f"{self.waiting} waiting for their turn")
        return ", ".join(parts) + (f" ({self.note})" if self.note else "")


def after_event(now: Activity, event: Event) -> Activity:
    """What is going on after one event of a capture."""
    match event["event"]:
        case "stage":
            stage = ": ".join(str(event[key]) for key in ("name", "detail") if event.get(key))
            return replace(now, stage=stage, done=0, total=0, num_tokens=None, note="")
        case "bucket_begin":
            first = event["index"] == 0
            note = FIRST_BUCKET_NOTE if first else ""
            return replace(now, num_tokens=event["num_tokens"], total=event["total"], note=note)
        case "bucket":
            return replace(now, done=now.done + 1)
        case "step":
            return replace(now, done=event["index"], total=event["total"])
    return now
