"""The state of a Log Doctor: which log, what it says, which line is looked at. Works without a front end."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from traitlets import Bool, HasTraits, Instance, Int, Unicode, observe

from toolkit.errors import InvalidInput, PrefillLabError, one_line
from toolkit.hardware import list_gpu_specs
from toolkit.memory.rank_local import MAX_TP
from toolkit.serverlogs.diagnosis import Diagnosis, diagnose
from toolkit.serverlogs.focus import ExcerptLine, excerpt
from toolkit.serverlogs.lines import Source, open_source
from toolkit.serverlogs.pasted import from_browser
from toolkit.serverlogs.used_settings import UsedSettings, used_settings

if TYPE_CHECKING:
    from toolkit.widgets.forecast_state import ForecastState
    from toolkit.widgets.state import LabState

PASTED = "pasted text"
RANKS = tuple(2**power for power in range(MAX_TP.bit_length()))
"""Ranks that the forecast beside a Lab offers."""
REFUSED = "refused"
"""How a message begins that says why nothing was explained or taken over."""


class DoctorState(HasTraits):
    """`text` is what was pasted; `model`, `gpu` and `version` are for a forecast beside the measurement.

    `diagnosis` is of the log given last, once it is explained. `finding` is the number of the finding looked at, and
    `line` the line of the log shown for it; -1 and 0 when none is. `taken` are the settings last taken over.
    """

    text = Unicode("")
    name = Unicode("")
    model = Unicode("")
    gpu = Unicode("")
    version = Unicode("")
    busy = Bool(False)
    diagnosis = Instance(Diagnosis, allow_none=True)
    finding = Int(-1)
    line = Int(0)
    taken = Instance(UsedSettings, allow_none=True)
    message = Unicode("")

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.gpus: tuple[str, ...] = tuple(spec.id for spec in list_gpu_specs())
        self._data = b""
        self._explained = b""
        self._asked = 0

    def change(self, **controls: Any) -> None:
        """Set controls by their own names."""
        with self.lock, self.hold_trait_notifications():
            for name, value in controls.items():
                setattr(self, name, value)

    @observe("text")
    def _pasted(self, change: Any) -> None:
        # Bytes, because a text of one line may name a file: whoever pastes means the words.
        if change["new"]:
            self._give(from_browser(change["new"]).encode("utf-8", "surrogatepass"), PASTED)

    def load(self, source: Source, name: str | None = None) -> None:
        """Take a log as `toolkit.diagnose` takes it: path, text, bytes, an open file, lines. It is not explained yet.

        Raises InvalidInput when a path cannot be read.
        """
        data = b"".join(open_source(source))
        path = source if isinstance(source, str | os.PathLike) and "\n" not in os.fspath(source) else None
        called = name or (os.path.basename(os.fspath(path)) if path is not None else getattr(source, "name", None))
        with self.lock:
            self.text = ""
            self._give(data, called if isinstance(called, str) else "text")

    def _give(self, data: bytes, name: str) -> None:
        with self.lock:
            self._data, self.name = data, name

    def explain(self) -> Diagnosis | None:
        """Explain the log given last, with the controls as they are; None without one, and `message` says so.

        Takes about a second for five megabytes: whoever shows controls asks on a thread of its own.
        """
        with self.lock:
            self._asked += 1
            data, name, turn = self._data, self.name, self._asked
            asked = {"model": self.model, "gpu": self.gpu, "sglang_version": self.version}
            self.busy = bool(data.strip())
            if not self.busy:
                self.change(diagnosis=None, finding=-1, line=0, message=f"{REFUSED}: there is no log yet")
                return None
            self.message = f"reading {name}, {len(data) / 1e6:.1f} MB"
        problem, found = "", None
        try:
            found = diagnose(data, name=name, **{key: value.strip() or None for key, value in asked.items()})
        except PrefillLabError as error:
            problem = str(error)
        except Exception as error:  # a log is somebody's file; an old diagnosis must not stand for a new log
            problem = one_line(f"this log cannot be explained ({type(error).__name__}: {error})")
        with self.lock:
            if turn != self._asked:
                return found  # asked again meanwhile: that answer is the one to show
            words = f"{REFUSED}: {problem}" if found is None else f"{name}: {found.counters.lines:,} lines read"
            self._explained = data
            self.change(busy=False, diagnosis=found, finding=-1, line=0, taken=None, message=words)
        return found

    def look(self, finding: int, line: int) -> None:
        """Show `line` for a finding, by its number; asked for twice, it is shown no longer."""
        with self.lock:
            same = (self.finding, self.line) == (finding, line)
            self.change(finding=-1 if same else finding, line=0 if same else line)

    @property
    def excerpt(self) -> tuple[ExcerptLine, ...]:
        """The lines around `line` of the log that was explained; empty when none is looked at."""
        return excerpt(self._explained, self.line) if self.line else ()

    def take(self, lab: LabState | None = None, forecast: ForecastState | None = None) -> UsedSettings:
        """Set the controls of a Lab, and of its forecast, to what the server was started with.

        Without a Lab only `taken` changes. Raises InvalidInput when nothing is explained or the log has no start.
        """
        diagnosis = self.diagnosis
        if diagnosis is None:
            raise InvalidInput("no log is explained", "a log that is", "explain one first")
        used = used_settings(diagnosis)
        if lab is not None:
            lab.pick(**used.settings)
        if forecast is not None:
            ranks = {"tp": used.tp} if used.tp in RANKS else {}
            forecast.change(**ranks, **({"gpu": self.gpu} if self.gpu else {}))
        with self.lock:
            left = f", {len(used.left_out)} not taken over" if used.left_out else ""
            self.change(taken=used, message=f"{len(used.settings)} settings taken over{left}")
        return used

    def clear(self) -> None:
        """Forget the log and what it said."""
        with self.lock:
            self._give(b"", "")
            self._explained = b""
            self.change(text="", busy=False, diagnosis=None, finding=-1, line=0, taken=None, message="")
