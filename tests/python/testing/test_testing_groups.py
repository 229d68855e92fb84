"""check_operation with operations whose extra inputs are sizes or indices."""

from __future__ import annotations

import pytest
import torch

import ligature as te
from ligature.testing import check_operation

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor


def grouped(
    x: Tensor, splits: Tensor, scales: Tensor | None = None, **parameters: Tensor
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    parts, begin = [], 0
    for group, size in enumerate(splits.tolist()):
        y = rows[begin : begin + size] @ parameters[f"weight{group}"].T
        bias = parameters[f"bias{group}"]
        y = y + (bias if scales is None else scales.flatten()[begin : begin + size, None] * bias)
        parts.append(y)
        begin += size
    parts.append(rows.new_zeros(rows.shape[0] - begin, parts[0].shape[1]))
    return torch.cat(parts).reshape(*x.shape[:-1], parts[0].shape[1])


SHAPES = [(7, 6), (2, 4, 6), (1, 6)]


@pytest.mark.parametrize("scale_bias", [False, True])
def test_a_right_operation_passes(scale_bias: bool, device: str) -> None:
    def make(dtype: torch.dtype, device: torch.device) -> te.ops.GroupedLinear:
        return te.ops.GroupedLinear(3, 6, 5, scale_bias=scale_bias, dtype=dtype, device=device)

    extra = [[(3,), shape[:-1]][: 1 + scale_bias] for shape in SHAPES]
    report = check_operation(make, grouped, SHAPES, extra_shapes=extra, device=device)
    assert report.runs > 0


def test_a_wrong_gradient_is_found(device: str) -> None:
    """Splits are those of the operation's own example, so that groups count."""
    with pytest.raises(AssertionError, match="GroupedLinear"):
        check_operation(
            lambda dtype, device: te.ops.GroupedLinear(3, 6, 5, dtype=dtype, device=device),
            lambda x, splits, **parameters: grouped(x, splits.flip(0), **parameters),
            [(7, 6)],
            device=device,
        )
