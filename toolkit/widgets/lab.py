"""`toolkit.Lab`: pick, capture, see, keep. The state works alone; the widgets are built when it is displayed."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.runs.record import RunRecord
from toolkit.views import frames
from toolkit.widgets.installed import check_installed

if TYPE_CHECKING:
    from toolkit.widgets.choice import Preview
    from toolkit.widgets.forecast_state import ForecastState
    from toolkit.widgets.log_doctor import LogDoctor
    from toolkit.widgets.state import LabState


class Lab:
    """A Lab in a notebook: `lab = toolkit.Lab()`, and `lab` as the last line of a cell displays it.

    What its buttons do can be done in code: `lab.pick(policy="gated")`, `lab.capture()`, `lab.wait()`.
    """

    def __init__(self, runs_dir: Path | str | None = None, **settings: Any) -> None:
        """Settings are those of CaptureSettings and only the start: every control can be moved.

        Records are kept in `runs_dir`, else PREFILL_LAB_RUNS, else ./runs, and found there again. Raises
        InvalidInput for settings that cannot be used, and where ipywidgets is not installed.
        """
        check_installed("the Lab")
        from toolkit.widgets.state import LabState

        self.state: LabState = LabState(runs_dir, **settings)

    def pick(self, **settings: Any) -> Lab:
        """Set controls by the names of CaptureSettings. Raises InvalidInput; then nothing has changed."""
        self.state.pick(**settings)
        return self

    def capture(self, **settings: Any) -> Lab:
        """Ask for a capture, after picking `settings`. Returns at once: it runs, or waits its turn.

        Raises InvalidInput for settings that cannot be used, StorageError for a folder that cannot be written.
        """
        self.state.pick(**settings)
        self.state.capture()
        return self

    def capture_pair(self, first: str | None = None, second: str | None = None, **settings: Any) -> Lab:
        """Ask for two captures under two policies, with the same settings otherwise; both are shown over each other.

        Returns at once. Without names these are the two that are picked beside the button. Raises InvalidInput for the
        same policy twice and for settings that cannot be used, StorageError for a folder that cannot be written.
        """
        self.state.pick(**settings)
        self.state.capture_pair(first, second)
        return self

    def foresee(self) -> Preview:
        """The preview with a forecast of the toolkit's own engine, for every policy; takes seconds the first time."""
        return self.state.foresee()

    def wait(self, timeout: float | None = None) -> RunRecord | None:
        """Wait until nothing runs or waits, and return the record of the last capture; None if there was none.

        Raises TimeoutError after `timeout` seconds, InvalidInput when the capture was refused. Interrupting
        the cell cancels the capture.
        """
        return self.state.wait(timeout)

    def cancel(self) -> None:
        """Stop the capture that runs, between two buckets."""
        self.state.cancel()

    def clear(self) -> None:
        """Show nothing and forget the captures that wait; records stay in the folder."""
        self.state.clear()

    def show(self, run: RunRecord | str | None, over: RunRecord | str | None = None) -> Lab:
        """Show a run (a record or its id), and another one laid over it; None shows none.

        Raises RecordError for an id that is not in the folder.
        """
        self.state.show(run)
        self.state.show(over, other=True)
        return self

    def export(self, kind: str) -> Path:
        """Write the run shown to the folder `exports` beside the runs, and return the file's path.

        Raises InvalidInput for an unknown kind (the message lists them) or when no finished run is shown.
        """
        return self.state.export(kind)

    def close(self) -> None:
        """End what runs, forget what waits, and take the widgets away, with what they hold in memory."""
        self.state.close()
        if "view" in self.__dict__:
            from toolkit.widgets.binding import close_all

            close_all(self.__dict__.pop("view"))
        if "doctor" in self.__dict__:
            self.__dict__.pop("doctor").close()
        self.state.unobserve_all()
        self.state.runs, self.state.record, self.state.other = (), None, None

    @property
    def preview(self) -> Preview:
        """What the controls mean before anything is captured: fraction, ladder, free memory, verdict, in words."""
        shown = self.state.preview
        assert shown is not None
        return shown

    @property
    def record(self) -> RunRecord | None:
        """The run that is shown; while a capture runs its outcome is `running`."""
        return self.state.record

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        """Every run in the folder, newest first."""
        return self.state.runs

    @cached_property
    def forecast(self) -> ForecastState:
        """The forecast beside the controls: its own are `gpu` and `tp`."""
        from toolkit.widgets.forecast_state import ForecastState

        return ForecastState(self.state)

    @cached_property
    def doctor(self) -> LogDoctor:
        """The Log Doctor of this Lab: `lab.doctor.explain("server.log")`, `lab.doctor.take()`."""
        from toolkit.widgets.log_doctor import LogDoctor

        return LogDoctor(lab=self)

    @cached_property
    def view(self) -> Any:
        """The widgets, built once: displayed twice, they are one and the same."""
        import ipywidgets

        from toolkit.widgets.binding import follow_subshell
        from toolkit.widgets.controls import act_view, pick_view
        from toolkit.widgets.doctor_view import folded
        from toolkit.widgets.forecast_panel import ForecastPanel
        from toolkit.widgets.panels import STYLE
        from toolkit.widgets.results import ResultsView

        views = [pick_view(self.state), act_view(self.state), ResultsView(self.state).box]
        views += [ForecastPanel(self.forecast).box, folded(self.doctor.parts.box)]
        parts = [ipywidgets.HTML(STYLE), *views]
        box = ipywidgets.VBox(parts, layout=ipywidgets.Layout(width="100%"))
        box.add_class("plab")
        follow_subshell(box)
        return box

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = self.view._repr_mimebundle_(**kwargs)
        return {**bundle, "text/plain": repr(self)}

    def __repr__(self) -> str:
        """What is picked, what it means and what is shown, as text: for GitHub, and where no widget is drawn."""
        state = self.state
        shown = state.preview
        lines = [
            f"Prefill Lab: model {state.model}, device {state.device}, backend {state.backend}, policy {state.policy}"
        ]
        if shown is not None and shown.settings is None:
            lines.append(f"  cannot be captured: {shown.problem}")
        elif shown is not None:
            parts = (("memory fraction", shown.fraction), ("ladder", shown.ladder), ("free before", shown.free))
            lines += [f"  {name}: {words}" for name, words in (*parts, ("reserve", shown.reserve))]
            lines += [
                f"  {name}{' (chosen)' if name == state.policy else ''}: {verdict.words}"
                for name, verdict in shown.verdicts.items()
            ]
        lines.append(f"  {_shown(state.record)}")
        return "\n".join(lines)


def _shown(record: RunRecord | None) -> str:
    if record is None:
        return "no run is shown"
    usage = frames.memory_words(record.mem_usage_gib)
    counted = f"{len(record.buckets)} buckets captured, {usage}, measured on {frames.device_name(record)}"
    return f"run shown: {record.outcome}, {counted}"
