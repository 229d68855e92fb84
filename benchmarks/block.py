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


def step_of(
    model: nn.Module,
    x: torch.Tensor,
    dy: torch.Tensor,
    recipe: te.recipe.Recipe | None = None,
    new_weights: bool = False,
) -> Callable[[], None]:
    """Forward and backward with all gradients; the weights have changed as by an optimizer."""
    parameters = list(model.parameters())

    def run() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
            if new_weights:
                torch.autograd.graph.increment_version(parameter)
        with low_precision(recipe):
            y = model(x)
        y.backward(dy)

    return run


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """The step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def low_precision(recipe: te.recipe.Recipe | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)
