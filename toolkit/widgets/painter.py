"""Drawing beside the work: a thread that draws what was asked for last, and ends when that is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_PAUSE_S, _PAUSE_FACTOR = 1.0, 8.0
"""While a capture runs, drawing pauses this long, and for so many times what the last drawing took: it shares the
cores with the capture, whose times are being measured."""


class Painter:
    """Draws on a thread of its own, which ends when there is nothing to draw: a figure takes a good part of a
    second, and neither a person at a control nor the capture that is followed should wait for it.
    """

    def __init__(self, draw: Callable[[], bool]) -> None:
        self._draw = draw
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        self._stale = False
        self._thread: threading.Thread | None = None

    def ask(self, *, now: bool) -> None:
        """Ask for a drawing: at once, or when the pause after the last one is over."""
        with self._lock:
            self._stale = True
            if now:
                self._hurry.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="lab-painter", daemon=True)
                self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything asked for is drawn."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._stale:
                    self._thread = None
                    return
                self._stale = False
                self._hurry.clear()
            start = time.monotonic()
            try:
                goes_on = self._draw()
            except BaseException:
                with self._lock:
                    self._thread = None
                raise
            if goes_on:
                self._hurry.wait(max(_PAUSE_S, _PAUSE_FACTOR * (time.monotonic() - start)))
