"""How a control and a trait are kept equal, from whichever side and thread a change comes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from traitlets import TraitError

if TYPE_CHECKING:
    import ipywidgets


class Bindable(Protocol):
    """A state that can be bound: it is observed, and changed by `change`."""

    def observe(self, handler: Callable[[Any], None], names: Any) -> None:
        """Call `handler` when one of the traits changes."""

    def change(self, **controls: Any) -> None:
        """Set traits by their names."""


def bind(state: Bindable, name: str, widget: ipywidgets.Widget, write: Callable[[Any], None] | None = None) -> None:
    """Keep `widget.value` and the state's trait `name` equal.

    `write` takes what a person has set; without it the trait is changed as it is. A value outside the limits of
    a slider widens them, or the widget would change the value by itself.
    """

    def to_widget(value: Any) -> None:
        if isinstance(value, float) and hasattr(widget, "min"):
            widget.min, widget.max = min(widget.min, value), max(widget.max, value)
        with suppress(TraitError):  # what a control cannot show is told in words elsewhere
            widget.value = value

    def to_state(change: dict[str, Any]) -> None:
        if not _same(change["new"], getattr(state, name)):
            (write or (lambda value: state.change(**{name: value})))(change["new"])

    to_widget(getattr(state, name))
    widget.observe(to_state, "value")
    state.observe(lambda change: to_widget(change["new"]), name)


def _same(one: Any, other: Any) -> bool:
    """A slider sends back the value it was given, cut to its step: that is not a person's choice."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=5e-4) or (one != one and other != other)
    return bool(one == other)


class Quiet:
    """Tells changes that the program makes on a widget from those a person makes, thread by thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __bool__(self) -> bool:
        return bool(getattr(self._local, "on", False))

    @contextmanager
    def now(self) -> Iterator[None]:
        """Inside, this thread's changes are the program's own."""
        self._local.on = True
        try:
            yield
        finally:
            self._local.on = False


def follow_subshell(widget: ipywidgets.Widget) -> None:
    """Let what a person does on `widget`, or on any widget inside it, arrive while a cell keeps the kernel busy.

    ipykernel 7.4.0 hands it to the shell that made the widget, and not to the subshell which JupyterLab names.
    Without a route of its own it follows JupyterLab. The name is private to ipykernel: a browser test guards it.
    """
    if widget.comm is not None:
        widget.comm._reply_subshell_for = None
    for child in getattr(widget, "children", ()):
        follow_subshell(child)


def close_all(widget: ipywidgets.Widget) -> None:
    """Close a widget and every widget inside it: ipywidgets keeps each one alive until then."""
    for child in getattr(widget, "children", ()):
        close_all(child)
    for part in ("layout", "style"):
        if widget.has_trait(part):
            getattr(widget, part).close()
    widget.close()
