"""Settings as what a person would type: a Python snippet, and a command line. Both name only what was changed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from toolkit.settings import (
    CaptureSettings,
    DeviceChoice,
    GraphChoice,
    MemoryChoice,
    ModelChoice,
    PolicyChoice,
    ReserveChoice,
)

_CONCERNS = (ModelChoice, DeviceChoice, MemoryChoice, GraphChoice, ReserveChoice, PolicyChoice)
_LINE = 100
_NUL_IN_COMMAND = "# a NUL cannot be written in a command line: use the Python form"


def as_python(settings: CaptureSettings) -> str:
    """Two statements that run this capture: `import toolkit` and `record = toolkit.capture(...)`."""
    arguments = [f"{name}={_literal(value)}" for name, value in _chosen(settings)]
    call = f"record = toolkit.capture({', '.join(arguments)})"
    if len(call) > _LINE:
        call = "record = toolkit.capture(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
    return f"import toolkit\n\n{call}\n"


def as_command(settings: CaptureSettings) -> str:
    """The `prefill-lab capture` line that runs this capture, quoted for a POSIX shell.

    Every setting has an option. A text with a NUL in it has no place on a command line: then it is a comment.
    """
    words = ["prefill-lab", "capture"]
    for name, value in _chosen(settings):
        # An option leaves out the unit that the setting's name carries: --free-memory, --post-capture-per-1k.
        option, text = "--" + name.removesuffix("_gib").replace("_mib_", "_").replace("_", "-"), _typed(value)
        # Apart, what begins with a dash could be taken for an option.
        words += [f"{option}={text}"] if text.startswith("-") else [option, text]
    line = shlex.join(words)
    return _NUL_IN_COMMAND if "\0" in line else line


def _chosen(settings: CaptureSettings) -> Iterator[tuple[str, Any]]:
    """The model, and every other setting that is not its default, concern by concern."""
    for concern in _CONCERNS:
        for name, field in concern.model_fields.items():
            value = getattr(settings, name)
            if name == "model" or value != field.default:
                yield name, value


def _literal(value: Any) -> str:
    """A value as Python source, in double quotes where that needs no escape."""
    # A StrEnum prints as its value and is accepted as such.
    text = repr(str(value) if isinstance(value, str) else value)
    return f'"{text[1:-1]}"' if text.startswith("'") and '"' not in text else text


def _typed(value: Any) -> str:
    """A value as text for one option; `repr` of a float is the shortest text that gives the same float."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value)
