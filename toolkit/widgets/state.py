"""The state of a Lab: what is picked, what runs, what is shown. No front end is needed to use or test it.

Guarded by one lock: a front end may call in from the kernel's main thread or from a subshell, and captures are
followed on a thread of their own. Observers are called with the lock held, on whichever thread made the change.
"""

from __future__ import annotations

import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from traitlets import Bool, Float, HasTraits, Instance, Int, Tuple, Unicode, observe

from toolkit.errors import InvalidInput, PrefillLabError
from toolkit.runs.child import Event
from toolkit.runs.queue import CaptureQueue
from toolkit.runs.record import RunRecord
from toolkit.runs.store import RunStore
from toolkit.runs.worker import EXECUTOR, CaptureJob
from toolkit.settings import CaptureSettings
from toolkit.views.files import shown_path
from toolkit.widgets.activity import Activity, after_event
from toolkit.widgets.choice import Choice, DeviceOption, Preview, controls_for, preview
from toolkit.widgets.devices import device_options
from toolkit.widgets.pairs import Pair, pair_of
from toolkit.widgets.verdicts import Foresight

CPU_CEILING = 256
"""The ladder the Lab begins with where there is no GPU: the larger buckets take most of the time there."""
REFUSED = "refused"
"""How a message begins that says why a capture did not take place."""
CHOICES = tuple(field.name for field in fields(Choice))


class LabState(HasTraits):
    """Traits are the controls (`CHOICES`), and what follows from them: `preview`, `activity`, `record`, `runs`."""

    model = Unicode("smollm2-135m")
    device = Unicode("cpu")
    device_memory_gib = Float(8.0)
    auto_fraction = Bool(True)
    mem_fraction = Float(0.85)
    backend = Unicode("auto")
    policy = Unicode("ungated")
    ladder = Unicode("default")
    max_tokens = Int(CPU_CEILING)
    buckets = Unicode("8,32,128,512")
    leave_exactly = Bool(False)
    free_memory_gib = Float(3.99)
    reserve = Unicode("")
    later = Unicode("")

    first_policy = Unicode("gated")
    second_policy = Unicode("ungated")
    preview = Instance(Preview, allow_none=True)
    activity = Instance(Activity, args=())
    record = Instance(RunRecord, allow_none=True)
    other = Instance(RunRecord, allow_none=True)
    num_tokens = Int(0)
    runs = Tuple()
    message = Unicode("")

    def __init__(self, runs_dir: Path | str | None = None, *, executor: str = EXECUTOR, **settings: Any) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.store = RunStore(runs_dir)
        self.devices: tuple[DeviceOption, ...] = device_options()
        self.others: dict[str, Any] = {}
        self.closed = False
        self._queue = CaptureQueue(self, executor=executor)
        self._started = 0.0
        self._following = True
        self._unsaved: set[str] = set()
        self._shown_before: RunRecord | None = None
        self._ended: RunRecord | PrefillLabError | None = None
        self._pairs: list[Pair] = []
        self._foresight: tuple[CaptureSettings, float | None, Foresight] | None = None
        self.device = self.devices[0].value
        self.pick(**settings)
        if self.device == "cpu" and not {"max_tokens", "buckets", "chunked_prefill_size"} & settings.keys():
            self.change(ladder="ceiling", max_tokens=CPU_CEILING)
        self.find_runs()

    # --- what is picked ---------------------------------------------------------------------------------------

    def pick(self, **settings: Any) -> None:
        """Set the controls by the names of CaptureSettings: `model`, `mem_fraction="auto"`, `buckets=(8, 16)`, ...

        Raises InvalidInput for a setting that does not exist or cannot be used; then nothing has changed.
        """
        controls = controls_for(settings)
        known = [option.value for option in self.devices]
        meant = {"auto": known[0], "cuda": next((value for value in known if value.startswith("cuda")), "cuda")}
        if "device" in controls:
            controls["device"] = meant.get(controls["device"], controls["device"])
        if controls.get("device", known[0]) not in known:
            raise InvalidInput(
                f"device {controls['device']!r} is not on this machine", f"devices are {', '.join(known)}"
            )
        with self.lock:
            self.others.update({name: controls.pop(name) for name in [*controls] if name not in CHOICES})
            self.change(**controls)
            self._show_preview()

    def change(self, **controls: Any) -> None:
        """Set controls by their own names, whatever their values: the preview says what cannot be used."""
        with self.lock, self.hold_trait_notifications():
            for name, value in controls.items():
                setattr(self, name, value)

    @property
    def choice(self) -> Choice:
        """The controls as they stand, frozen."""
        return Choice(**{name: getattr(self, name) for name in CHOICES})

    @property
    def settings(self) -> CaptureSettings:
        """The settings that the controls stand for. Raises InvalidInput when they cannot be used."""
        return self.choice.settings(**self.others)

    @property
    def total_mib(self) -> float | None:
        """Memory of the device that is picked, MiB: nvidia-smi's, or the capacity declared for the CPU device."""
        if self.device == "cpu":
            return self.device_memory_gib * 1024
        return next((option.total_mib for option in self.devices if option.value == self.device), None)

    @observe(*CHOICES)
    def _show_preview(self, _change: object = None) -> None:
        with self.lock:
            self.preview = self._preview()
            if self.auto_fraction and self.preview.mem_fraction is not None:
                self.mem_fraction = self.preview.mem_fraction  # so that a slider shows what auto gives

    def _preview(self) -> Preview:
        shown = preview(self.choice, self.total_mib, **self.others)
        if self._foresight is None or shown.settings is None:
            return shown
        asked, total_mib, foresight = self._foresight
        if asked != _whoever_decides(shown.settings) or total_mib != self.total_mib:
            return shown
        return preview(self.choice, self.total_mib, foresight, **self.others)

    def foresee(self) -> Preview:
        """The preview with a forecast of the toolkit's own engine: what each policy would do, and the KV pool.

        Takes seconds the first time, up to two for another model, and about a tenth for other settings; whoever shows
        controls asks on a thread of its own. Controls that move meanwhile have a preview without it, until asked again.
        """
        from toolkit.widgets.foresight import foresee

        with self.lock:
            shown, choice, total_mib, others = self.preview, self.choice, self.total_mib, dict(self.others)
            gpu = next((option.gpu for option in self.devices if option.value == self.device), "")
        assert shown is not None
        if shown.settings is None or shown.foreseen or self.closed:
            return shown
        foresight = foresee(shown.settings, total_mib, gpu)
        # Not under the lock, and before it is shown: what the verdicts ask of the forecast is remembered by it.
        preview(choice, total_mib, foresight, **others)
        with self.lock:
            self._foresight = (_whoever_decides(shown.settings), total_mib, foresight)
            self.preview = self._preview()
            return self.preview

    # --- captures ---------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Ask for a capture with the settings as they stand; it begins at once or waits its turn.

        Raises InvalidInput when they cannot be used, and StorageError when the record could not be saved.
        """
        settings = self.settings
        self.store.check()
        with self.lock:
            self._ended = None
            before = self._queue.submit(settings)
            turn = "it begins now" if not before else f"{before} before it: it waits its turn"
            self.message = f"capture asked for ({settings.policy}, {settings.resolved_backend}): {turn}"
            self.activity = replace(self.activity, running=True, waiting=before)

    def capture_pair(self, first: str | None = None, second: str | None = None) -> None:
        """Ask for two captures that differ in the policy alone; when both have ended they are shown over each other.

        Without names these are `first_policy` and `second_policy`. Raises InvalidInput for the same policy twice, for
        an unknown one and for settings that cannot be used, and StorageError when a record could not be saved.
        """
        pair = pair_of(self.settings, first or self.first_policy, second or self.second_policy)
        self.store.check()
        names = [settings.policy for settings in pair.settings]
        with self.lock:
            self._ended = None
            before, _ = [self._queue.submit(settings) for settings in pair.settings]
            self._pairs.append(pair)
            self.first_policy, self.second_policy = names
            self.other = None
            turn = f"they begin when {before} before them have ended" if before else "they begin now"
            self.message = f"two captures asked for ({names[0]}, then {names[1]}): {turn}"
            self.activity = replace(self.activity, running=True, waiting=before + 1)

    def cancel(self) -> None:
        """Stop the capture that runs, between two buckets; after 5 s its process is ended. Those that wait go on."""
        with self.lock:
            if not self.activity.running:
                self.message = "nothing is running"
                return
            self._queue.cancel()
            self.activity = replace(self.activity, cancelling=True)

    def clear(self) -> None:
        """Show nothing and forget the captures that wait. What runs goes on, and records stay in the folder."""
        with self.lock:
            dropped = self._queue.drop_waiting()
            self._following = False
            self._pairs = []
            self.record = self.other = None
            self.activity = replace(self.activity, waiting=0)
            words = f"; {dropped} that waited will not run" if dropped else ""
            self.message = f"cleared{words}; {len(self.runs)} runs are kept in {shown_path(self.store.folder)}"

    def wait(self, timeout: float | None = None) -> RunRecord | None:
        """Wait until nothing runs or waits; the record of the last capture, None when there was none.

        Raises TimeoutError after `timeout` seconds, and what a refused capture was refused with.
        Interrupting it (Ctrl-C, or the stop button of a notebook) cancels the capture that runs.
        """
        try:
            idle = self._queue.wait(timeout)
        except KeyboardInterrupt:
            self._queue.drop_waiting()
            self.cancel()
            idle = self._queue.wait(timeout)
        if not idle:
            raise TimeoutError(f"a capture is still running after {timeout:g} s")
        if isinstance(self._ended, PrefillLabError):
            raise self._ended
        return self._ended

    @property
    def child_pid(self) -> int | None:
        """Process id of the capture that runs, None when none does."""
        job = self._queue.job
        return job.pid if job is not None else None

    def close(self) -> None:
        """End what runs and forget what waits; no forecast is begun any more."""
        self.closed = True
        self._queue.close()

    # --- runs -------------------------------------------------------------------------------------------------

    def find_runs(self) -> None:
        """Read the folder of runs again, newest first; damaged files are counted in the message."""
        before = self.runs
        try:
            records, damaged = self.store.scan()
        except PrefillLabError as error:
            records, damaged = [], [str(error)]
        with self.lock:
            # Not in the folder, or not yet when it was read: what ended meanwhile, and what could not be saved.
            here = {record.id for record in records}
            ours = [run for run in self.runs if run.id not in here and (run not in before or run.id in self._unsaved)]
            self.runs = (*ours, *reversed(records))
            if damaged:
                more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
                self.message = f"{damaged[0]}{more}"

    def show(self, run: RunRecord | str | None, *, other: bool = False) -> None:
        """Show a run, by its record or its id, or lay it over the one shown; None shows none.

        Raises RecordError when there is no run of that id in the folder.
        """
        found = self.store.load(run) if isinstance(run, str) and run else run or None
        assert not isinstance(found, str)
        with self.lock:
            if found is not None and all(found.id != known.id for known in self.runs):
                self.runs = (found, *self.runs)
            if other:
                self.other = found
            else:
                self._following = False
                self._show_record(found)

    def export(self, kind: str) -> Path:
        """Write the run shown to a file in the folder `exports` of the runs folder; returns its path.

        Raises InvalidInput when no finished run is shown, and StorageError when it cannot be written.
        """
        from toolkit.views.export import export_file

        record = self.record
        if record is None or record.is_running:
            raise InvalidInput(
                "no finished run is shown", "a run that has ended", "capture first, or pick one of the runs"
            )
        path = export_file(record, kind, self.store.folder / "exports")
        self.message = f"{kind} saved as {shown_path(path)}"
        return path

    def _show_record(self, record: RunRecord | None) -> None:
        self.record = record
        tokens = [bucket.num_tokens for bucket in record.buckets] if record is not None else []
        if tokens and self.num_tokens not in tokens:
            self.num_tokens = max(tokens)

    # --- what the queue tells ---------------------------------------------------------------------------------

    def started(self, job: CaptureJob, waiting: int) -> None:
        """A capture begins: follow it."""
        with self.lock:
            self._shown_before = self.record
            self._started, self._following = time.monotonic(), True
            self.activity = Activity(running=True, waiting=waiting, stage="starting the child process")
            self._show_record(job.so_far())

    def progress(self, job: CaptureJob, events: list[Event], waiting: int) -> None:
        """Events of the capture that runs, or only time that went by."""
        with self.lock:
            now = self.activity
            for event in events:
                now = after_event(now, event)
            # Whole seconds: what has not changed is not sent to the front end.
            self.activity = replace(now, waiting=waiting, elapsed_s=float(int(time.monotonic() - self._started)))
            if self._following and any(event["event"] not in ("step", "bucket_begin") for event in events):
                self._show_record(job.so_far())

    def ended(self, job: CaptureJob, record: RunRecord | None, problem: PrefillLabError | None, waiting: int) -> None:
        """The capture has ended: save its record and show it."""
        with self.lock:
            self._ended = record or problem
            self.message = self._save(record) if record is not None else f"{REFUSED}: {problem}"
            self.activity = Activity(running=waiting > 0, waiting=waiting)
            if self._following:
                # A refusal leaves no record: what was shown before comes back.
                self._show_record(record if record is not None else self._shown_before)
            self._pair_ended(job, record)

    def _pair_ended(self, job: CaptureJob, record: RunRecord | None) -> None:
        """Show the pair that this capture completes, the first with the second over it."""
        pair = next((pair for pair in self._pairs if pair.holds(job.settings)), None)
        if pair is None or not pair.ended(record):
            return
        self._pairs.remove(pair)
        if self._following:
            self._show_record(pair.records[0])
            self.other = pair.records[1]

    def idle(self) -> None:
        """Nothing runs or waits any more, whoever dropped what waited."""
        with self.lock:
            if not self._queue.waiting:
                self.activity, self._pairs = Activity(), []

    def _save(self, record: RunRecord) -> str:
        self.runs = (record, *self.runs)
        try:
            path = self.store.save(record)
        except PrefillLabError as error:
            self._unsaved.add(record.id)
            return str(error)
        return f"{record.outcome}: saved as {shown_path(path)}"


def _whoever_decides(settings: CaptureSettings) -> CaptureSettings:
    """The settings without the policy: the forecast is the same for each."""
    return settings.model_copy(update={"policy": ""})
