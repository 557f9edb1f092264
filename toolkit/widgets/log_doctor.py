"""`toolkit.LogDoctor`: a server's log, explained. The state works alone; widgets are built when it is displayed."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.widgets.installed import check_installed

if TYPE_CHECKING:
    from toolkit.serverlogs.diagnosis import Diagnosis
    from toolkit.serverlogs.lines import Source
    from toolkit.serverlogs.used_settings import UsedSettings
    from toolkit.widgets.doctor_state import DoctorState
    from toolkit.widgets.doctor_view import DoctorView
    from toolkit.widgets.lab import Lab


class LogDoctor:
    """A Log Doctor in a notebook: `toolkit.LogDoctor()` as the last line of a cell, then paste or upload.

    By code: `toolkit.LogDoctor("server.log")`, or `doctor.explain(source)`.
    """

    def __init__(
        self,
        source: Source | None = None,
        *,
        name: str | None = None,
        model: str | None = None,
        gpu: str | None = None,
        sglang_version: str | None = None,
        lab: Lab | None = None,
    ) -> None:
        """Parameters are those of `toolkit.diagnose`; `lab` is the Lab whose controls can be set from the log.

        Raises InvalidInput when the log cannot be read, and where ipywidgets is not installed.
        """
        check_installed("the Log Doctor")
        from toolkit.widgets.doctor_state import DoctorState

        self.state: DoctorState = DoctorState()
        self._lab = lab
        self.state.change(model=model or "", gpu=gpu or "", version=sglang_version or "")
        if source is not None:
            self.explain(source, name=name)

    def explain(self, source: Source, *, name: str | None = None) -> LogDoctor:
        """Explain a log, as `toolkit.diagnose` takes it. Raises InvalidInput when a path cannot be read."""
        self.state.load(source, name)
        self.state.explain()
        return self

    def show(self, finding: int, line: int | None = None) -> LogDoctor:
        """Show a line of the log under a finding, by its number from 0; by default the finding's first line."""
        found = self.diagnosis.findings if self.diagnosis is not None else ()
        meant = line or (found[finding].line if 0 <= finding < len(found) else None)
        if meant and (self.state.finding, self.state.line) != (finding, meant):
            self.state.look(finding, meant)
        return self

    def take(self) -> UsedSettings:
        """Set the Lab's controls to what the server was started with; without a Lab only say what that is.

        Raises InvalidInput when no log is explained, or it has no start of a server.
        """
        lab = self._lab
        return self.state.take(lab.state if lab else None, lab.forecast if lab else None)

    def close(self) -> None:
        """Forget the log, and take the widgets away."""
        if "parts" in self.__dict__:
            from toolkit.widgets.binding import close_all

            parts = self.__dict__.pop("parts")
            close_all(self.__dict__.pop("view", parts.box))
        self.state.unobserve_all()
        self.state.clear()

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What the log says; None before one is explained."""
        return self.state.diagnosis

    @cached_property
    def parts(self) -> DoctorView:
        """The widgets without a frame, as the Lab puts them among its own."""
        from toolkit.widgets.doctor_view import DoctorView

        lab = self._lab
        return DoctorView(self.state, lab.state if lab else None, lab.forecast if lab else None)

    @cached_property
    def view(self) -> Any:
        """The widgets, built once: displayed twice, they are one and the same."""
        import ipywidgets

        from toolkit.widgets.binding import follow_subshell
        from toolkit.widgets.panels import STYLE

        heading = ipywidgets.HTML(f"{STYLE}<h3>Server logs explained</h3>")
        box = ipywidgets.VBox([heading, self.parts.box], layout=ipywidgets.Layout(width="100%"))
        box.add_class("plab")
        follow_subshell(box)
        return box

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = self.view._repr_mimebundle_(**kwargs)
        return {**bundle, "text/plain": repr(self)}

    def __repr__(self) -> str:
        """What the log is and its findings, as text: for GitHub, and where no widget is drawn."""
        diagnosis = self.diagnosis
        if diagnosis is None:
            return "Log Doctor: no log is explained"
        lines = [f"Log Doctor: {diagnosis.source}: {diagnosis.summary}"]
        lines += [
            f"  {one.severity} {one.code} (line {one.line or 'n/a'}): {one.message}" for one in diagnosis.findings
        ]
        return "\n".join(lines)
