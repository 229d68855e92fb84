"""Large results on the CPU lie in large pages, where the system has them for who asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ligature as te

SMAPS = Path("/proc/self/smaps")


def flags_of(t: torch.Tensor) -> list[str]:
    """What the system was told about the memory in the middle of a tensor."""
    middle = t.data_ptr() + t.nbytes // 2
    inside = False
    for line in SMAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(x, 16) for x in head.split("-"))
            inside = begin <= middle < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping has this address")


@pytest.mark.parametrize(
    "make",
    [
        te.ops.ReLU,
        lambda: te.ops.Bias(4096),
        lambda: te.ops.LayerNorm(4096),
        lambda: te.ops.Linear(4096, 4096, bias=False),
    ],
)
def test_large_results(make, device: str) -> None:
    if device != "cpu" or not SMAPS.exists():
        pytest.skip("reads what Linux tells of a process' memory")
    x = torch.randn(4096, 4096)  # 64 MiB: always fresh memory
    if "hg" in flags_of(x):
        pytest.skip("torch asks for large pages itself")
    if "hg" not in flags_of(te.ops.ReLU()(x)):
        enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        assert not enabled.exists()
        pytest.skip("this system has no large pages to ask for")
    with torch.no_grad():
        assert "hg" in flags_of(make()(x))
