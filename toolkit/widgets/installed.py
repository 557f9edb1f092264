"""Whether the widgets can be shown at all."""

from __future__ import annotations

from importlib.util import find_spec

from toolkit.errors import InvalidInput


def check_installed(what: str) -> None:
    """Raise InvalidInput where ipywidgets is not installed; `what` needs it."""
    if find_spec("ipywidgets") is None:
        raise InvalidInput(f"{what} needs ipywidgets", "it comes with the extra lab", "pip install 'prefill-lab[lab]'")
