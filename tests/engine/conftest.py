"""What tests of many captures share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """Captures collect garbage first; what stands before a module need not be walked each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
