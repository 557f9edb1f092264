"""What both devices share: the frozen garbage collector of a capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Collect once, then keep the garbage collector from walking (and freeing) anything during a capture.

    A collection in mid-capture may free tensors of the outside world into the recorded stretch; SGLang
    freezes it for the same reason.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
