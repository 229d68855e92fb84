"""GroupedLinear in every layout of its parameters, for tests."""

from __future__ import annotations

from typing import Any

import torch

import ligature as te

LAYOUTS: dict[str, dict[str, bool]] = {
    "separate": {},
    "one weight": {"single_grouped_weight": True},
    "one bias": {"single_grouped_bias": True},
    "one of each": {"single_grouped_weight": True, "single_grouped_bias": True},
    "no bias": {"bias": False},
    "one weight, no bias": {"bias": False, "single_grouped_weight": True},
}


def grouped(*sizes: int, **options: Any) -> te.ops.GroupedLinear:
    """With biases that are not all zero."""
    op = te.ops.GroupedLinear(*sizes, **options)
    for name, parameter in op.named_parameters():
        if name.startswith("bias"):
            torch.nn.init.normal_(parameter)
    return op


def gradient(op: torch.nn.Module, name: str) -> torch.Tensor:
    found = getattr(op, name).grad
    assert found is not None, name
    return found
