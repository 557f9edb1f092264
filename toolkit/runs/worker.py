"""One capture in a child process: events out, cancel, and a record whatever happens to the child.

The child is a fresh interpreter (see `toolkit.runs.child`): a capture that runs out of memory, hangs or
brings the process down takes neither the notebook nor the next capture with it. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, Any, Self

from toolkit import errors
from toolkit.errors import CaptureError, InvalidInput
from toolkit.runs.child import CANCEL_LINE, LAST_EVENTS, Event, Seen
from toolkit.runs.environment import child_environment
from toolkit.runs.provenance import scrub_record, software_versions
from toolkit.runs.record import RunRecord
from toolkit.runs.store import new_run_id
from toolkit.settings import CaptureSettings

EXECUTOR = "toolkit.runs.execute:execute"
STDERR_TAIL_BYTES = 4096
_TERM_GRACE_S = 2.0
_DRAIN_S = 5.0
_CHILD_CODE = "from toolkit.runs.child import main; main()"


class CaptureJob:
    """One capture, running in a child process. Safe to use from several threads.

    `start()` it, read `events()` or `poll()` if wanted, `wait()` for the record. Used as a context manager it
    leaves no child behind. `executor` names the function the child calls; only tests give another one.
    """

    def __init__(self, settings: CaptureSettings, *, executor: str = EXECUTOR) -> None:
        self.settings = settings
        self._executor = executor
        now = datetime.now(UTC)
        self.run_id = new_run_id(now)
        self.created = now.isoformat(timespec="seconds").replace("+00:00", "Z")
        self._process: subprocess.Popen[bytes] | None = None
        self._reaped = False
        self._lock = threading.Lock()
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._seen = Seen()
        self._last: Event | None = None
        self._stderr: deque[int] = deque(maxlen=STDERR_TAIL_BYTES)
        self._cancel_asked = False
        self._record: RunRecord | None = None
        self._refusal: Exception | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.cancel(grace_s=0)
            self._ended.wait(_DRAIN_S)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before `start()`."""
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        """Whether the child was started and has not ended."""
        return self._process is not None and not self._ended.is_set()

    def start(self) -> Self:
        """Check the input and start the child. Returns the job itself.

        Raises InvalidInput for a policy or model that does not exist, before any process is started, and
        CaptureError when the operating system starts no process.
        """
        if self._process is not None:
            raise CaptureError("this capture was started before; a CaptureJob runs once")
        check_names(self.settings)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD_CODE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(),
                # Its own group: Ctrl-C reaches only the parent, and compile workers can be ended with it.
                start_new_session=True,
            )
        except OSError as error:
            raise CaptureError(f"the child process could not be started ({error.strerror})") from None
        self._tell(json.dumps(self._request()).encode())
        readers = [
            threading.Thread(target=self._read_events, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        try:
            for thread in (*readers, threading.Thread(target=self._supervise, args=(readers,), daemon=True)):
                thread.start()
        except RuntimeError as error:  # no thread is to be had: nobody would follow the child
            self._signal(signal.SIGKILL)
            raise CaptureError(f"the capture cannot be followed ({error})") from None
        return self

    def events(self) -> Iterator[Event]:
        """Events as they come, until the child has ended. Blocks between events."""
        while (event := self._events.get()) is not None:
            yield event
        self._events.put(None)  # The end stays visible to whoever asks next.

    def poll(self) -> list[Event]:
        """Events that came since the last call; does not block. For user interfaces with their own loop."""
        new: list[Event] = []
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return new
            if event is None:
                self._events.put(None)
                return new
            new.append(event)

    def so_far(self) -> RunRecord:
        """What is known of the run by now, as a record that is not one yet: its outcome is `running`.

        For plots and tables that follow a capture; figures that are not known yet are None. Never save it.
        """
        fields = {
            **self._unfinished_fields(),
            "outcome": "running",
            "reason": f"not finished, {self._seen.where()}",
        }
        return RunRecord.model_construct(**fields)

    def cancel(self, grace_s: float = 5.0) -> None:
        """Ask the capture to stop between two buckets; returns at once, `wait()` for the record.

        After `grace_s` seconds the child gets SIGTERM, and two seconds later SIGKILL.
        """
        if not self.running:
            return
        self._cancel_asked = True
        self._tell(CANCEL_LINE)
        threading.Thread(target=self._enforce, args=(grace_s,), daemon=True).start()

    def wait(self, timeout: float | None = None) -> RunRecord:
        """The record, once the child has ended.

        Raises TimeoutError after `timeout` seconds, and InvalidInput when the child refused the input (an
        unknown model, no such device); then there is no record.
        """
        if self._process is None:
            raise CaptureError("this capture was not started; call start() first")
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the capture is still running after {timeout:g} s")
        if self._refusal is not None:
            raise self._refusal
        assert self._record is not None
        return self._record

    def _request(self) -> dict[str, Any]:
        return {
            "settings": self.settings.model_dump(mode="json"),
            "run_id": self.run_id,
            "created": self.created,
            "executor": self._executor,
            "parent": os.getpid(),
        }

    def _tell(self, line: bytes) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        # A child that is gone cannot be told anything; its end is reported by `_supervise`.
        with self._lock, contextlib.suppress(OSError, ValueError):
            process.stdin.write(line + b"\n")
            process.stdin.flush()

    def _read_events(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                try:
                    event = json.loads(line)
                    is_last = event["event"] in LAST_EVENTS
                    if not is_last:
                        self._seen.take(event)
                except (ValueError, TypeError, KeyError):
                    self._stderr.extend(line)  # The half line of a child that died while it wrote it, or no event.
                    continue
                if is_last:
                    self._last = event
                else:
                    self._events.put(event)

    def _read_stderr(self, stream: IO[bytes]) -> None:
        with stream:
            while chunk := os.read(stream.fileno(), 65536):
                self._stderr.extend(chunk)

    def _supervise(self, readers: list[threading.Thread]) -> None:
        """Wait for the child, end what it left behind, and turn its end into a record."""
        process = self._process
        assert process is not None
        # Not reaped yet: until then the process id, and with it the group, cannot belong to anybody else.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self._signal(signal.SIGKILL)
        with self._lock:
            code = process.wait()
            self._reaped = True
        for thread in readers:
            thread.join(_DRAIN_S)
        try:
            self._conclude(code)
        except Exception as error:  # A record that cannot be built must not leave `wait` waiting for ever.
            why = errors.one_line(f"{type(error).__name__}: {error}")
            self._refusal = CaptureError(f"the child's report cannot be read ({why})")
        finally:
            self._ended.set()
            self._events.put(None)
            with contextlib.suppress(OSError):
                process.stdin.close() if process.stdin else None

    def _conclude(self, code: int) -> None:
        last = self._last
        if last is not None and last["event"] == "refused":
            kind = getattr(errors, last["kind"], InvalidInput)
            self._refusal = kind(last["what"], last["allowed"], last["next_step"])
            return
        if last is not None and last["event"] == "record":
            record = RunRecord.model_validate(last["record"])
        else:
            fields = {**self._unfinished_fields(), "software": software_versions()}
            record = RunRecord.model_validate({**fields, **self._ending(code, last)})
        self._record = scrub_record(record)

    def _unfinished_fields(self) -> dict[str, Any]:
        return {
            "id": self.run_id,
            "created": self.created,
            "settings": self.settings.model_dump(mode="json"),
            "device": {"label": _expected_device(self.settings)},
            "software": {},
            "runner": None,
            **self._seen.fields(),
        }

    def _ending(self, code: int, last: Event | None) -> dict[str, Any]:
        """Outcome, reason, signal and advice for a child that sent no record."""
        where, tail = self._seen.where(), _lines(bytes(self._stderr))
        if last is not None:
            if last["kind"] == errors.CaptureCancelled.__name__:
                return {"outcome": "cancelled", "reason": f"cancelled {where}"}
            reason = f"{last['line']} ({where})"
            return {"outcome": "failed", "reason": reason, "advice": [_STDERR_KEPT], "stderr_tail": tail}
        name = _signal_name(-code) if code < 0 else None
        if self._cancel_asked and name in ("SIGTERM", "SIGKILL"):
            return {"outcome": "cancelled", "reason": f"cancelled: ended with {name} {where}", "signal": name}
        end = f"was ended by {name}" if name else f"left with exit code {code}"
        return {
            "outcome": "crashed",
            "reason": f"the child process {end} {where}{_last_words(tail)}",
            "signal": name,
            "advice": [_KILLED if name == "SIGKILL" else _CRASHED],
            "stderr_tail": tail,
        }

    def _enforce(self, grace_s: float) -> None:
        if self._ended.wait(grace_s):
            return
        self._signal(signal.SIGTERM)
        if not self._ended.wait(_TERM_GRACE_S):
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._process is not None and not self._reaped:
                os.killpg(self._process.pid, number)


def run_capture(
    settings: CaptureSettings, on_event: Callable[[Event], None] | None = None, *, executor: str = EXECUTOR
) -> RunRecord:
    """Do one capture in a child process and return its record, whatever the outcome. Saves nothing.

    `on_event` is called with every event. Ctrl-C (or interrupting the notebook's kernel) cancels between two
    buckets and gives a `cancelled` record; a second Ctrl-C ends the child at once. Raises InvalidInput for
    input that cannot be used.
    """
    grace_s = 5.0
    with CaptureJob(settings, executor=executor).start() as job:
        while True:
            try:
                for event in job.events():
                    if on_event is not None:
                        on_event(event)
                return job.wait()
            except KeyboardInterrupt:
                job.cancel(grace_s)
                grace_s = 0.0


def run_each(
    several: Sequence[CaptureSettings], on_event: Callable[[Event], None] | None = None
) -> Iterator[RunRecord]:
    """Captures one after the other, each in its own child; a cancelled one is the last. Saves nothing.

    All are checked before the first is started. Raises InvalidInput for input that cannot be used.
    """
    for settings in several:
        check_names(settings)
    for position, settings in enumerate(several, 1):
        if on_event is not None and len(several) > 1:
            on_event({"event": "stage", "name": f"run {position} of {len(several)}", "detail": settings.policy})
        record = run_capture(settings, on_event)
        yield record
        if record.outcome == "cancelled":
            return


def per_policy(settings: CaptureSettings, policies: Sequence[str] | None = None) -> list[CaptureSettings]:
    """The same settings once per policy; None means every policy there is.

    Raises InvalidInput for an unknown policy, one that is named twice, and for none at all.
    """
    from toolkit.policies import POLICIES, get_policy

    names = list(POLICIES) if policies is None else list(policies)
    for position, name in enumerate(names):
        get_policy(name)
        if name in names[:position]:
            raise InvalidInput(f"policy {name!r} is named twice", "each policy is compared once")
    if not names:
        raise InvalidInput("no policy is named", f"policies are {', '.join(POLICIES)}, or all")
    return [settings.with_changes(policy=name) for name in names]


def check_names(settings: CaptureSettings) -> None:
    """Whether policy and model exist. Raises InvalidInput; needs neither torch nor a network."""
    from toolkit.catalogue import resolve_model
    from toolkit.policies import get_policy

    get_policy(settings.policy)
    resolve_model(settings.model)


_STDERR_KEPT = "the end of the child's standard error is in the record (stderr_tail)"
_CRASHED = f"{_STDERR_KEPT}; try --backend breakable or fewer buckets"
_KILLED = (
    "SIGKILL comes from outside, most often from the kernel's out-of-memory killer (see dmesg); "
    "try a smaller --max-tokens or a smaller --mem-fraction"
)


def _expected_device(settings: CaptureSettings) -> str:
    return "cpu (accounted)" if settings.device == "cpu" else "n/a"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # Real-time signals have no name.


def _lines(stderr: bytes) -> list[str]:
    lines = stderr.decode(errors="replace").splitlines()
    # A full buffer begins in the middle of a line.
    kept = lines[1:] if len(stderr) == STDERR_TAIL_BYTES else lines
    return [line.rstrip() for line in kept if line.strip()]


def _last_words(tail: list[str]) -> str:
    """What the child said about its end, if anything: Python's fatal error, or the last line with `error`."""
    fatal = [line for line in tail if line.startswith("Fatal Python error")]
    spoken = fatal or [line for line in tail if "error" in line.lower()][-1:]
    return f": {errors.one_line(spoken[0])[:200]}" if spoken else ""
