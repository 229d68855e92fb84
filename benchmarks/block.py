"""The block that the benchmarks time, in plain PyTorch and in Ligature, and one step of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

import ligature as te

RECIPES: dict[str, Callable[[], te.recipe.Recipe]] = {
    "fp8 delayed": te.recipe.DelayedScaling,
    "fp8 current": te.recipe.Float8CurrentScaling,
    "fp8 block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": te.recipe.NVFP4BlockScaling,
}


class TorchBlock(nn.Module):
    def __init__(self, norm: str, h: int, f: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = getattr(nn, norm)(h, dtype=dtype)
        self.fc1 = nn.Linear(h, f, bias=bias, dtype=dtype)
        self.fc2 = nn.Linear(f // 2, h, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(nn.functional.silu(a) * b)


def ligature_block(
    norm: str, h: int, f: int, bias: bool, dtype: torch.dtype, recompute: str = "none"
) -> te.ops.Sequential:
    return te.ops.Sequential(
        getattr(te.ops, norm)(h, dtype=dtype),
        te.ops.Linear(h, f, bias=bias, dtype=dtype),
        te.ops.SwiGLU(),
        te.ops.Linear(f // 2, h, bias=bias, dtype=dtype),
        recompute=recompute,
    )


def forward_only(
    model: nn.Module, x: torch.Tensor, recipe: te.recipe.Recipe | None = None
) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad(), low_precision(recipe):
            model(x)

    return run


class Step:
    """Forward and backward with all gradients.

    With ``new_weights`` the weights count as changed, as by an optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        dy: torch.Tensor,
        recipe: te.recipe.Recipe | None = None,
        new_weights: bool = False,
    ) -> None:
        self.model, self.x, self.dy, self.recipe = model, x, dy, recipe
        self.parameters = list(model.parameters())
        self.new_weights = new_weights

    def clear(self) -> None:
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def __call__(self) -> None:
        self.clear()
        if self.new_weights:
            for parameter in self.parameters:
                torch.autograd.graph.increment_version(parameter)
        with low_precision(self.recipe):
            y = self.model(self.x)
        y.backward(self.dy)


def captured(step: Step) -> Callable[[], None]:
    """The step as one CUDA graph, which works on the step's own tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def run(held: Step = step) -> None:
        graph.replay()

    return run


def low_precision(recipe: te.recipe.Recipe | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)
