"""A weight that has changed is quantized anew, however it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ligature as te
from ligature.common import recipe as recipes


def _neg(rows: Any) -> Callable[[torch.Tensor], Any]:
    return lambda weight: weight.data[rows].neg_()


# Each leaves the version counter as it is, and all but a few bits.
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data.neg_": lambda weight: weight.data.neg_(),
    "a row": _neg(0),
    "the last row": _neg(-1),
    "two rows": lambda weight: weight.data.__setitem__([3, 17], -weight.data[[3, 17]]),
    "every second row": _neg(slice(0, None, 2)),
    "columns": lambda weight: weight.data[:, 5:7].neg_(),
    "two values": lambda weight: weight.data.view(-1).__setitem__(
        [0, 32], -weight.data.view(-1)[[0, 32]]
    ),
    "numpy": lambda weight: weight.detach().numpy().__imul__(-1),
    "a sign": lambda weight: weight.data[5].__setitem__(7, -weight.data[5, 7]),
    "two rows exchanged": lambda weight: weight.data.copy_(weight.data.roll(1, 0)),
    "two values exchanged": lambda weight: weight.data.view(-1).__setitem__(
        [1, 33], weight.data.view(-1)[[33, 1]]
    ),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_writes_that_are_not_counted(device: str, way: str, times: int) -> None:
    if device != "cpu":
        pytest.skip("a GPU's memory is not looked at")
    linear = te.ops.BasicLinear(64, 64)
    recipe = recipes.MXFP8BlockScaling()
    x = torch.randn(8, 64)
    with torch.no_grad(), te.autocast(recipe=recipe):
        for _ in range(times):
            linear(x)
        version = linear.weight._version
        before = linear.weight.detach().clone()
        WRITES[way](linear.weight)
        assert linear.weight._version == version
        assert not torch.equal(before, linear.weight)
        fresh = te.ops.BasicLinear(64, 64)
        fresh.weight.copy_(linear.weight)
        assert torch.equal(linear(x), fresh(x))
