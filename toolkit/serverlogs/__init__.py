"""Reading what servers write: their logs, and the traffic that went through them. Nothing here needs a GPU.

from toolkit.serverlogs import diagnose
diagnose("server.log").findings
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.serverlogs.compare import Comparison, compare_diagnoses, compare_logs
    from toolkit.serverlogs.diagnosis import Diagnosis, diagnose
    from toolkit.serverlogs.findings.finding import Finding

__all__ = ["Comparison", "Diagnosis", "Finding", "compare_diagnoses", "compare_logs", "diagnose"]

_HOMES = {
    "Comparison": "toolkit.serverlogs.compare",
    "compare_diagnoses": "toolkit.serverlogs.compare",
    "compare_logs": "toolkit.serverlogs.compare",
    "Diagnosis": "toolkit.serverlogs.diagnosis",
    "diagnose": "toolkit.serverlogs.diagnosis",
    "Finding": "toolkit.serverlogs.findings.finding",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
