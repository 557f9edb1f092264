"""The contract of the Device/Graph seam: always on the CPU device, on CUDA where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from toolkit.prefill.devices import make_device
from toolkit.prefill.devices.contract import CHECKS


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh device of each kind."""
    yield make_device(request.param, 1.0)


@pytest.mark.parametrize("name", CHECKS)
def test_contract(name: str, device: Any) -> None:
    CHECKS[name](device)
