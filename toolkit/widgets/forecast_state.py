"""The forecast beside a Lab: follows its controls, for a card that need not be here. Works without a front end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import traitlets
from traitlets import HasTraits, Int, Unicode

from toolkit.errors import PrefillLabError, one_line
from toolkit.hardware import list_gpu_specs
from toolkit.settings import Backend
from toolkit.widgets.state import CHOICES, LabState

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

LAST_WITH_TC_PIECEWISE = "0.5.21"
"""The newest release that takes tc_piecewise for prefill; a plan for that backend is made with its rules."""


class ForecastState(HasTraits):
    """`gpu` and `tp` are its own controls; `plan` is what they and the Lab's give, or None and a `problem`."""

    gpu = Unicode("h100-80gb")
    tp = Int(1)
    plan = traitlets.Any()
    problem = Unicode("")

    def __init__(self, lab: LabState) -> None:
        super().__init__()
        self.lab = lab
        self.gpus: tuple[str, ...] = tuple(spec.id for spec in list_gpu_specs())

    def change(self, **controls: Any) -> None:
        """Set its own controls, `gpu` and `tp`."""
        with self.lab.lock, self.hold_trait_notifications():
            for name, value in controls.items():
                setattr(self, name, value)

    def follow(self, wake: Any) -> None:
        """Call `wake()` whenever something changes that the plan depends on."""
        self.lab.observe(lambda _: wake(), [*CHOICES])
        self.observe(lambda _: wake(), ["gpu", "tp"])

    @property
    def settings(self) -> dict[str, Any]:
        """The Lab's controls as settings of a plan."""
        lab, others = self.lab, self.lab.others
        chosen: dict[str, Any] = {"model": lab.model.strip(), "gpu": self.gpu, "tp": self.tp, "backend": lab.backend}
        chosen |= {name: others[name] for name in ("dtype", "chunked_prefill_size") if name in others}
        if lab.leave_exactly:
            chosen["free_memory_gib"] = lab.free_memory_gib
        else:
            chosen["mem_fraction"] = "auto" if lab.auto_fraction else lab.mem_fraction
        if lab.ladder == "ceiling":
            chosen["max_tokens"] = lab.max_tokens
        elif lab.ladder == "own":
            from toolkit.ladder import parse_buckets

            chosen["buckets"] = tuple(parse_buckets(lab.buckets))
        if lab.backend == Backend.TC_PIECEWISE:
            chosen["sglang_version"] = LAST_WITH_TC_PIECEWISE
        return chosen

    def update(self) -> Plan | None:
        """Make the plan anew and return it; what cannot be planned is a `problem` in one line.

        The first call for a model takes a tenth of a second or so, later ones milliseconds.
        """
        from toolkit.forecast.plan import make_plan
        from toolkit.forecast.plan_settings import PlanSettings

        try:
            with self.lab.lock:
                settings = self.settings
            plan = make_plan(PlanSettings.create(**settings))
        except PrefillLabError as error:
            self.plan, self.problem = None, str(error)
            return None
        except Exception as error:  # a config is somebody's file; an old plan must not stand for a new one
            self.plan, self.problem = None, one_line(f"this cannot be planned ({type(error).__name__}: {error})")
            return None
        self.plan, self.problem = plan, ""
        return plan
