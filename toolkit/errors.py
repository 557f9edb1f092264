"""Every error a user can meet. Each message is one line: what was wrong, what is allowed, what to do next."""

from __future__ import annotations


class PrefillLabError(Exception):
    """Base of every error this toolkit raises on purpose. `exit_code` is what the command line ends with."""

    exit_code = 1


class InvalidInput(PrefillLabError):
    """Something a person gave cannot be used. Raised before anything is done, so nothing is half-written.

    `what` names the value, `allowed` says what would be accepted, `next_step` says what to do.
    """

    exit_code = 2

    def __init__(self, what: str, allowed: str = "", next_step: str = "") -> None:
        self.what, self.allowed, self.next_step = what, allowed, next_step
        super().__init__(one_line("; ".join(part for part in (what, allowed, next_step) if part)))


class ModelUnavailable(InvalidInput):
    """A model or its weights cannot be obtained here (unknown, hub unreachable, refused format, too large)."""


class DeviceUnavailable(InvalidInput):
    """The device asked for is not on this machine, or is too small for what was asked of it."""


class RecordError(InvalidInput):
    """A run record cannot be read: it is missing, damaged, or written by a newer schema."""


class StorageError(PrefillLabError):
    """A record, report or cache could not be written (full disk, no permission). Nothing was left behind."""


class CaptureError(PrefillLabError):
    """A graph could not be captured, for a reason that is not memory (a host read, a moved buffer, nesting)."""


class CaptureCancelled(PrefillLabError):
    """Somebody asked the capture to stop; it stopped between two buckets."""


class OutOfMemoryAtBucket(PrefillLabError):
    """The device ran out of memory while a bucket was warmed up or captured."""

    def __init__(self, num_tokens: int, detail: str) -> None:
        self.num_tokens, self.detail = num_tokens, one_line(detail)
        super().__init__(f"out of memory at bucket {num_tokens}: {self.detail}")


class ReplayMismatch(PrefillLabError):
    """Graphs were captured, but a replay does not agree with eager: the capture counts as failed."""


def one_line(text: str) -> str:
    """`text` with every run of white space, line breaks included, folded into one blank."""
    return " ".join(str(text).split())
