"""The Log Doctor fed as a person would: logs of tests/serverlogs, pasted into its state."""

from __future__ import annotations

from pathlib import Path

from toolkit.widgets.doctor_state import DoctorState

LOGS = Path(__file__).resolve().parent / "serverlogs"
FIXTURES = sorted(LOGS.glob("*.log"))
GATE, NEW = LOGS / "sglang_gate.log", LOGS / "sglang_new_breakable.log"


def pasted(text: str, **controls: str) -> DoctorState:
    """A state with `text` pasted and explained."""
    state = DoctorState()
    state.change(text=text, **controls)
    state.explain()
    return state
