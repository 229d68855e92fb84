"""What the experts of a module compute between their linear layers, as an operation.

The module is asked to compute it on a few numbers of our own, which are compared with what the
operations would make of them; so neither names of classes nor of attributes matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ... import ops
from .recognition import ACTIVATIONS, _close, _random

Tensor = torch.Tensor

#: Operations with one half only.
UNGATED: dict[type[ops.BasicOperation], Callable[[Tensor], Tensor]] = {
    ops.SReLU: lambda x: functional.relu(x).square(),
    ops.ReLU: functional.relu,
    ops.GELU: lambda x: functional.gelu(x, approximate="tanh"),
    ops.QGELU: lambda x: x * torch.sigmoid(1.702 * x),
    ops.SiLU: functional.silu,
}
#: Those that can scale each row of their result.
_SCALED: dict[type[ops.BasicOperation], type[ops.BasicOperation]] = {
    ops.SwiGLU: ops.ScaledSwiGLU,
    ops.ClampedSwiGLU: ops.ScaledClampedQGeGLU,
    ops.SReLU: ops.ScaledSReLU,
}


@dataclass(frozen=True)
class Gate:
    """The activation of a module's experts."""

    kind: type[ops.BasicOperation] | None = None  #: None: the module computes it itself
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""  #: what the module calls it, where it computes it itself
    note: str = ""  #: why it does

    @property
    def is_scaled(self) -> bool:
        """Whether the operation can scale each row of its result."""
        return self.kind in _SCALED

    def make(self, scaled: bool) -> ops.BasicOperation:
        """The operation; ``scaled`` by a weight per row, or not."""
        assert self.kind is not None
        return (_SCALED[self.kind] if scaled else self.kind)(**self.options)


def read_gate(module: torch.nn.Module) -> Gate:
    """What a module computes between its linear layers."""
    compute = module._apply_gate if module.has_gate else getattr(module, "act_fn", None)
    name = f"{type(module).__name__}.{'_apply_gate' if module.has_gate else 'act_fn'}"
    try:
        found = _gated(compute) if module.has_gate else _ungated(compute)
        reason = "no operation computes the same"
    except Exception as error:  # it may do anything
        lines = str(error).strip().splitlines()
        found, reason = None, f"it cannot be tried out: {lines[0] if lines else error!r}"
    note = f"{name} runs between the operations, since {reason}"
    return found or Gate(name=name, note=note)


def _tried(compute: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        y: Tensor = compute(x)
    return y


def _ungated(compute: Any) -> Gate | None:
    x = 3 * _random(12, 10, dtype=torch.float64)
    y = _tried(compute, x)
    for kind, activation in UNGATED.items():
        if _close(y, activation(x)):
            return Gate(kind)
    return None


def _gated(compute: Any) -> Gate | None:
    for interleave in (None, 1):
        halves = partial(_halves, interleave=interleave)
        x = 3 * _random(12, 20, dtype=torch.float64)
        y = _tried(compute, x)
        gate, linear = halves(x)
        for kind, activation in ACTIVATIONS.items():
            if _close(y, activation(gate) * linear) and (interleave is None or kind is ops.SwiGLU):
                options = {} if interleave is None else {"glu_interleave_size": interleave}
                return Gate(kind, options)
        clamp = _clamp(lambda a, b: _tried(compute, _joined(a, b, interleave)))  # noqa: B023
        if clamp is not None:
            return Gate(ops.ClampedSwiGLU, {**clamp, "glu_interleave_size": interleave})
    return None


def _halves(x: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    if interleave is not None:
        return x[..., ::2], x[..., 1::2]
    gate, linear = x.chunk(2, dim=-1)
    return gate, linear


def _joined(gate: Tensor, linear: Tensor, interleave: int | None) -> Tensor:
    if interleave is not None:
        return torch.stack([gate, linear], dim=-1).flatten(-2)
    return torch.cat([gate, linear], dim=-1)


def _clamped(a: Tensor, b: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    a, b = a.clamp(max=limit), b.clamp(-limit, limit) + offset
    return a * torch.sigmoid(alpha * a) * b


def _clamp(compute: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any] | None:
    """Options with which ClampedSwiGLU is the same: found from three points, then compared."""

    def at(gate: float, linear: float) -> float:
        row = torch.ones(1, 10, dtype=torch.float64, device="cpu")
        return float(compute(gate * row, linear * row)[0, 0])

    small, large = 2.0**-4, 2.0**20  # no limit is that small, and none that large
    base = at(small, 0.0) / small
    sigmoid = (at(small, small) / small - base) / small
    if not 0 < sigmoid < 1:
        return None
    alpha, offset = math.log(sigmoid / (1 - sigmoid)) / small, base / sigmoid
    limit = at(small, large) / small / sigmoid - offset
    if not small < limit < large / 2:
        return None
    found = [float(f"{value:.9g}") for value in (limit, alpha, offset)]
    limit, alpha, offset = (0.0 if abs(value) < 1e-9 else value for value in found)
    a, b = (2 * limit * _random(rows, 10, dtype=torch.float64)[:12] for rows in (12, 13))
    if not _close(compute(a, b), _clamped(a, b, limit, alpha, offset)):
        return None
    return {"limit": limit, "alpha": alpha, "glu_linear_offset": offset}
