"""Fixtures that every test file uses."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from fusion_support import REGISTER

import ligature

#: LIGATURE_TEST_DEVICES names those to test on, as "cuda"; without it, all that are there.
DEVICES = os.environ.get("LIGATURE_TEST_DEVICES", "").split() or [
    "cpu",
    *(["cuda"] if torch.cuda.is_available() else []),
]


@pytest.fixture(params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kind of device that this machine has. It is torch's default device during the test."""
    with torch.device(request.param):
        yield request.param


@pytest.fixture
def _cuda_backend(device: str) -> None:
    """For tests of what our CUDA kernels alone do."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    if not ligature.show_config("dict")["cuda"]["built"]:
        pytest.skip("built without the CUDA backend")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """The same random numbers in every test, and none of its settings left behind."""
    torch.manual_seed(1234)
    yield
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With tiny tensors several threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def registered() -> Iterator[Callable[..., ligature.ops.FusionHandle]]:
    """Registers until the end of the test."""
    with ExitStack() as stack:

        def register(kind: str, func: Any, prepend: bool = False) -> ligature.ops.FusionHandle:
            return stack.enter_context(REGISTER[kind](func, prepend=prepend))

        yield register


@pytest.fixture
def _large_memory() -> Iterator[None]:
    """For a test that needs many GB of the GPU: no other on this machine runs meanwhile, and none
    of the C++ tests that take the same lock. Nothing is left in torch's cache."""
    path = os.path.join(tempfile.gettempdir(), "ligature-large-tests.lock")
    try:
        file = os.open(path, os.O_RDONLY)  # another user's may be opened, but not with O_CREAT
    except FileNotFoundError:
        file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        gc.collect()
        torch.cuda.empty_cache()
    finally:
        os.close(file)
