"""Tensors without memory of their own, and how errors call them."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has a shape alone."""
    return isinstance(tensor, FakeTensor)


def describe(tensor: torch.Tensor) -> tuple[str, str]:
    """What an error calls a tensor of a subclass without memory, and the way out."""
    kind = type(tensor)
    name = f"a {kind.__name__}"
    if isinstance(tensor, FakeTensor):
        return name, ("it has none in FakeTensorMode, where the input must be a FakeTensor as well")
    for method, way in {
        "to_local": "pass its local part, to_local()",
        "trigger_wait": "pass wait(), its value",
        "get_data": "pass get_data(), or to_tensor(value)",
    }.items():
        if callable(getattr(kind, method, None)):
            return name, way
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return name, f"pass the tensors that it holds: {', '.join(map(str, flatten()[0]))}"
    return name, "pass a plain tensor"
