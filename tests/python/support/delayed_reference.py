"""Delayed scaling in plain Python: what a linear layer should compute and remember, and what
of it is in a state dict."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

import ligature as te

ELEMENTS = {448.0: torch.float8_e4m3fn, 57344.0: torch.float8_e5m2}


def factor_for(largest: float, x: torch.Tensor) -> float:
    """What ``x`` is multiplied by, so that its largest value becomes the format's."""
    return float(np.float32(largest) / np.float32(x.detach().abs().max().item()))


class Factor:
    """What is remembered of one tensor."""

    def __init__(self, largest: float, length: int, margin: int = 0, algo: str = "max") -> None:
        self.largest = np.float32(largest)
        self.scale = np.float32(1)
        self.amax = 0.0
        self.history = [0.0] * length
        self.margin = margin
        self.algo = algo

    def note(self, x: torch.Tensor) -> None:
        self.amax = max(self.amax, float(x.detach().abs().max()))

    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        """The values in float64 after a cast to FP8 and back, on the CPU."""
        bound = float(self.largest)
        scaled = (x.detach().float().cpu() * float(self.scale)).clamp(-bound, bound)
        codes = scaled.to(ELEMENTS[bound])
        return (codes.double() * float(np.float32(1) / self.scale)).to(x.device)

    def update(self) -> None:
        self.history = [self.amax, *self.history[:-1]]
        self.amax = 0.0
        amax = max(self.history) if self.algo == "max" else self.history[0]
        if amax > 0 and math.isfinite(amax):
            self.scale = self.largest / np.float32(amax) / np.float32(2**self.margin)


class LinearReference:
    """``x W^T`` with an input, a weight and a gradient in FP8."""

    def __init__(self, length: int, margin: int = 0, algo: str = "max") -> None:
        self.x = Factor(448, length, margin, algo)
        self.w = Factor(448, length, margin, algo)
        self.dy = Factor(57344, length, margin, algo)

    def forward(self, x: torch.Tensor, w: torch.Tensor, *, cached: bool = False) -> torch.Tensor:
        """``cached``: the weight was quantized before and is not looked at again."""
        self.x.note(x)
        if not cached:
            self.w.note(w)
        self.saved = self.x.quantized(x), self.w.quantized(w)
        return self.saved[0] @ self.saved[1].T

    def backward(self, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.dy.note(dy)
        x, w = self.saved
        q = self.dy.quantized(dy)
        return q @ w, q.T @ x

    def check(self, linear: te.ops.FusibleOperation) -> None:
        """The operation remembers the same."""
        forward, backward = state_of(linear)
        for name, factor, got in (
            ("x", self.x, forward[0]),
            ("w", self.w, forward[1]),
            ("dy", self.dy, backward[0]),
        ):
            scale, amax, history = got
            assert history.tolist() == factor.history, name
            assert amax.item() == factor.amax, name
            assert scale.item() == float(factor.scale), name


def state_of(linear: te.ops.FusibleOperation) -> tuple[list, list]:
    """(scale, amax, history) of each quantizer, forward and backward, of the last recipe."""
    part = linear.basic_ops[0] if isinstance(linear, te.ops.FusedOperation) else linear
    _, forward, backward = part._handle.recipe_states()[-1]
    return forward, backward


def recipe_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries that hold what delayed scaling remembers."""
    return {key: value for key, value in state.items() if "_recipe_state." in key}
