"""Captures that wait their turn: one child at a time, on one thread that ends with the last of them.

For user interfaces: whoever asks is not blocked, and a listener hears what happens. Nothing here knows widgets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from toolkit.errors import CaptureError, PrefillLabError, one_line
from toolkit.runs.child import Event
from toolkit.runs.record import RunRecord
from toolkit.runs.worker import EXECUTOR, CaptureJob, check_names
from toolkit.settings import CaptureSettings

_LOG = logging.getLogger(__name__)
TICK_S = 0.1
"""How often a running capture is looked at, in seconds."""
STUCK_S = 12.0
"""Longest that `close` waits for the thread: a child ends within the grace of a cancel and two seconds."""


class QueueListener(Protocol):
    """What hears of a queue's captures. Called on the queue's thread; `waiting` is how many are behind."""

    def started(self, job: CaptureJob, waiting: int) -> None:
        """A capture begins."""

    def progress(self, job: CaptureJob, events: list[Event], waiting: int) -> None:
        """Called about every TICK_S seconds with what came since; `events` may be empty."""

    def ended(self, job: CaptureJob, record: RunRecord | None, problem: PrefillLabError | None, waiting: int) -> None:
        """A capture has ended: with a record, or with the problem for which there is none."""

    def idle(self) -> None:
        """Nothing runs or waits any more."""


class CaptureQueue:
    """Runs captures one after the other. Safe to use from several threads.

    `executor` names the function the child calls; only tests give another one.
    """

    def __init__(self, listener: QueueListener, *, executor: str = EXECUTOR) -> None:
        self._listener = listener
        self._executor = executor
        self._lock = threading.Condition()
        self._waiting: deque[CaptureSettings] = deque()
        self._job: CaptureJob | None = None
        self._cancel_grace_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """How many captures wait behind the one that runs."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a capture runs or waits."""
        return self._thread is not None

    @property
    def job(self) -> CaptureJob | None:
        """The capture that runs now."""
        return self._job

    def submit(self, settings: CaptureSettings) -> int:
        """Ask for a capture; returns how many are before it. Raises InvalidInput for a wrong name, at once."""
        check_names(settings)
        with self._lock:
            before = len(self._waiting) + (self._job is not None)
            self._waiting.append(settings)
            if self._thread is None:
                self._start()
        return before

    def cancel(self, grace_s: float = 5.0) -> None:
        """Ask the capture that runs, or is about to, to stop between two buckets; those that wait go on."""
        with self._lock:
            if self._thread is not None:
                self._cancel_grace_s = grace_s

    def drop_waiting(self) -> int:
        """Forget the captures that wait; returns how many."""
        with self._lock:
            dropped = len(self._waiting)
            self._waiting.clear()
        return dropped

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing runs or waits; False after `timeout` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: self._thread is None, timeout)

    def close(self) -> None:
        """Forget those that wait and end the one that runs, now."""
        self.drop_waiting()
        self.cancel(grace_s=0)
        self.wait(STUCK_S)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="capture-queue", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._waiting.pop()
            raise CaptureError(f"no thread could be started for the capture ({error})") from None
        self._thread = thread  # the thread waits for the lock until this is set

    def _work(self) -> None:
        while True:
            with self._lock:
                job = CaptureJob(self._waiting.popleft(), executor=self._executor) if self._waiting else None
                self._job = job
            if job is not None:
                self._run(job)
                continue
            # Without the lock: a listener has one of its own, which whoever submits may hold.
            self._tell(self._listener.idle)
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    self._lock.notify_all()
                    return

    def _run(self, job: CaptureJob) -> None:
        record: RunRecord | None = None
        problem: PrefillLabError | None = None
        try:
            record = self._follow(job)
        except PrefillLabError as error:
            problem = error
        except Exception as error:  # no thread to be had, a record that is none: the next one gets its turn
            _LOG.exception("a capture of the queue failed")
            problem = CaptureError(
                f"the capture could not be followed ({one_line(f'{type(error).__name__}: {error}')})"
            )
        with self._lock:
            self._cancel_grace_s = None  # it was for this one
        self._tell(lambda: self._listener.ended(job, record, problem, self.waiting))

    def _follow(self, job: CaptureJob) -> RunRecord:
        job.start()
        self._tell(lambda: self._listener.started(job, self.waiting))
        while job.running:
            # Told from this thread alone, so that no cancel can overtake the request or get lost before the start.
            with self._lock:
                grace_s, self._cancel_grace_s = self._cancel_grace_s, None
            if grace_s is not None:
                job.cancel(grace_s)
            self._tell(lambda: self._listener.progress(job, job.poll(), self.waiting))
            time.sleep(TICK_S)
        self._tell(lambda: self._listener.progress(job, job.poll(), self.waiting))
        return job.wait()

    def _tell(self, call: Callable[[], None]) -> None:
        """A listener that fails, a figure that cannot be drawn for one, must not take the queue with it."""
        try:
            call()
        except Exception:
            _LOG.exception("a listener of the capture queue failed")
