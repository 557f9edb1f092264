"""The backends, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from toolkit.settings import Backend

if TYPE_CHECKING:
    from toolkit.prefill.backends.base import PrefillBackend
    from toolkit.prefill.model_runner import ModelRunner


def _full(runner: ModelRunner) -> PrefillBackend:
    from toolkit.prefill.backends.full import FullBackend

    return FullBackend(runner)


def _breakable(runner: ModelRunner) -> PrefillBackend:
    from toolkit.prefill.backends.base import BreakableBackend

    return BreakableBackend(runner)


def _tc_piecewise(runner: ModelRunner) -> PrefillBackend:
    from toolkit.prefill.backends.tc_piecewise import TcPiecewiseBackend

    return TcPiecewiseBackend(runner)


BACKENDS: dict[Backend, Callable[[ModelRunner], PrefillBackend]] = {
    Backend.FULL: _full,
    Backend.BREAKABLE: _breakable,
    Backend.TC_PIECEWISE: _tc_piecewise,
}
"""Every backend that captures. `disabled` captures nothing and `auto` has been resolved before."""
