"""The child process that does one capture. It speaks JSON lines with its parent and never outlives it.

In: one line with the settings, then perhaps `cancel`. End of file means that the parent is gone.
Out: one event a line, through a descriptor that no library knows; the last one is `record`, `refused` or
`error`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from toolkit.errors import InvalidInput, one_line
from toolkit.runs.record import BucketFigures, RunRecord
from toolkit.settings import CaptureSettings

Event = dict[str, Any]
Executor = Callable[..., RunRecord]
_FACTS = frozenset(RunRecord.model_fields) - {
    "schema_version", "id", "created", "settings", "software", "outcome", "runner", "buckets", "log", "notes"
}  # fmt: skip
CANCEL_LINE = b"cancel"
LAST_EVENTS = frozenset({"record", "refused", "error"})
"""Events of the protocol itself: they end the stream and no consumer of events ever sees them."""
_PARENT_GONE = 70
_PARENT_CHECK_S = 0.5


class Seen:
    """What a child reported so far: what a record needs when it cannot write one itself."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._stage = "the start"
        self._ladder: list[int] = []
        self._begun: list[int] = []
        self._bucket: Event | None = None
        self._buckets: list[BucketFigures] = []
        self._log: list[str] = []
        self._notes: list[str] = []

    def take(self, event: Event) -> None:
        """Note one event. `facts` events may carry any field of a record that is known by then."""
        fields = {key: value for key, value in event.items() if key not in ("event", "index", "total")}
        match event["event"]:
            case "stage":
                self._stage, self._bucket = str(event["name"]), None
            case "log":
                self._log.append(str(event["line"]))
            case "note":
                self._notes.append(str(event["text"]))
            case "facts":
                self._facts.update({key: fields[key] for key in fields if key in _FACTS})
            case "ladder":
                self._ladder = [int(tokens) for tokens in event["buckets"]]
            case "bucket_begin":
                self._bucket = event
                self._begun.append(event["num_tokens"])
                self._facts.setdefault("free_before_gib", event.get("free_gib"))
            case "bucket":
                self._bucket = None
                self._buckets.append(BucketFigures.model_validate(fields))

    def where(self) -> str:
        """How far the child came, in words that end a sentence."""
        if self._bucket is not None:
            at, done = self._bucket, len(self._buckets)
            return f"while capturing bucket {at['num_tokens']} ({done} of {at['total']} buckets were captured)"
        captured = f" ({len(self._buckets)} buckets were captured)" if self._buckets else ""
        return f"during {self._stage}{captured}"

    def fields(self) -> dict[str, Any]:
        """The fields of a record that are known: figures seen are kept, all others stay unknown."""
        # What was not reached comes as planned: largest first.
        ahead = sorted({*self._ladder} - {*self._begun}, reverse=True)
        shown = {"buckets": [*self._buckets], "log": [*self._log], "notes": [*self._notes]}
        return {"capture_order": self._begun + ahead, **self._facts, **shown}


class EventPipe:
    """The way events take to the parent: the original standard output, taken away from everybody else."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        # Libraries print; a print between two events would corrupt the stream, so it goes to standard error.
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Send one event. What JSON does not know is sent as its text. Ends the process when nobody reads."""
        line = memoryview(json.dumps(event, default=str).encode() + b"\n")
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                _end_with_parent()


class ParentLink:
    """What the parent says: the request, then perhaps `cancel`. Ends this process when the parent ends."""

    def __init__(self) -> None:
        self._fd = os.dup(0)
        # A library that asks a question on standard input must not swallow the parent's next line.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._pending = b""
        self._parent: int | None = None
        self.cancelled = threading.Event()

    def request(self) -> dict[str, Any]:
        """The first line: settings, run_id, created, executor and the parent's process id."""
        request: dict[str, Any] = json.loads(self._next_line())
        self._parent = request["parent"]
        return request

    def watch(self) -> None:
        """Follow the parent from a thread: `cancel` sets `cancelled`, its end ends this process at once."""
        threading.Thread(target=self._follow, name="parent-link", daemon=True).start()

    def _follow(self) -> None:
        while True:
            if self._next_line() == CANCEL_LINE:
                self.cancelled.set()

    def _next_line(self) -> bytes:
        while b"\n" not in self._pending:
            # A process that the parent forked can keep the pipe open after the parent was killed. The id of
            # the parent settles it: an orphan gets another one.
            readable, _, _ = select.select([self._fd], [], [], _PARENT_CHECK_S)
            if self._parent not in (None, os.getppid()):
                _end_with_parent()
            if readable:
                chunk = os.read(self._fd, 65536)
                if not chunk:
                    _end_with_parent()
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def perform(request: dict[str, Any], emit: Callable[[Event], None], cancelled: Callable[[], bool]) -> None:
    """Run the capture a request describes; its end, whatever it is, goes out as the last event."""
    try:
        settings = CaptureSettings.create(**request["settings"])
        execute = load_executor(request["executor"])
        record = execute(settings, emit, cancelled, run_id=request["run_id"], created=request["created"])
        emit({"event": "record", "record": record.model_dump(mode="json")})
    except InvalidInput as error:
        parts = {"what": error.what, "allowed": error.allowed, "next_step": error.next_step}
        emit({"event": "refused", "kind": type(error).__name__, **parts})
    except BaseException as error:
        # Also SystemExit and KeyboardInterrupt: whatever ended the capture, the parent wants a reason.
        traceback.print_exc()
        emit({"event": "error", "kind": type(error).__name__, "line": _last_line(error)})


def load_executor(name: str) -> Executor:
    """The function called `module:function`."""
    module, _, function = name.partition(":")
    executor: Executor = getattr(importlib.import_module(module), function)
    return executor


def main() -> None:
    """Entry of the fresh interpreter that `toolkit.runs.worker` starts. Never returns."""
    pipe, link = EventPipe(), ParentLink()
    faulthandler.enable()
    request = link.request()
    link.watch()
    perform(request, pipe.emit, link.cancelled.is_set)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # The record is out: a driver that crashes while the interpreter is torn down can no longer spoil it.
    os._exit(0)


def _end_with_parent() -> NoReturn:
    """End now, with whatever this process started: its group, where it leads one, as under `worker`."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(_PARENT_GONE)


def _last_line(error: BaseException) -> str:
    return one_line("".join(traceback.format_exception_only(error)).strip().splitlines()[-1])
