"""What was chosen by hand about the prefill graph, as far as the arguments of a start show.

A backend named outranks the switches that turn graphs off, and the config's own value outranks both (SGLang 0.5.15 to
0.5.23, executed).
"""

from __future__ import annotations

from toolkit.serverlogs.events import Value
from toolkit.serverlogs.startup import Startup

_SWITCHES = ("disable_cuda_graph", "disable_prefill_cuda_graph", "disable_piecewise_cuda_graph")


def argument(startup: Startup, name: str) -> Value:
    """A server argument as printed; None when the log does not have it."""
    return startup.start.values.get(name) if startup.start else None


def positive(value: Value) -> int | None:
    """A size or count as an argument gives it; None when it is missing, or no whole number over 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def explicit_backend(startup: Startup) -> str | None:
    """The prefill backend chosen by hand; None when none was, or when it was chosen to have no graph."""
    asked = argument(startup, "cuda_graph_backend_prefill")
    return asked if isinstance(asked, str) and asked not in ("disabled", "auto") else None


def switched_off(startup: Startup) -> str | None:
    """The flag that turned the prefill graph off by hand."""
    if explicit_backend(startup) is not None or argument(startup, "prefill.backend") not in (None, "disabled"):
        return None
    if argument(startup, "cuda_graph_backend_prefill") == "disabled":
        return "--cuda-graph-backend-prefill=disabled"
    return next((f"--{name.replace('_', '-')}" for name in _SWITCHES if argument(startup, name) is True), None)


def resolved_off(startup: Startup) -> bool:
    """Whether the printed arguments say that there is no prefill graph, by a flag or as the config resolved it."""
    return switched_off(startup) is not None or argument(startup, "prefill.backend") == "disabled"
