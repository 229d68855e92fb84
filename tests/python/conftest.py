"""Fixtures that every test file uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kind of device that this machine has. It is torch's default device during the test."""
    with torch.device(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """The same random numbers in every test, and none of its settings left behind."""
    torch.manual_seed(1234)
    yield
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
