"""Models, data and comparisons of the tests of CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ligature as te
from ligature.quantization import note_weights_changed

H, ROWS = 128, 128  # whole tiles of 128: the kernels that models train with
BF16 = torch.bfloat16
RECIPES: dict[str, Callable[[], te.recipe.Recipe | None]] = {
    "high precision": lambda: None,
    "delayed": lambda: te.recipe.DelayedScaling(amax_history_len=3),
    "current": te.recipe.Float8CurrentScaling,
    "block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": lambda: te.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
ALL = pytest.mark.parametrize("name", RECIPES)


def make_model(**linear: Any) -> te.ops.Sequential:
    ops = te.ops
    return ops.Sequential(
        ops.LayerNorm(H, dtype=BF16),
        ops.Linear(H, 4 * H, dtype=BF16, **linear),
        ops.SwiGLU(),
        ops.Linear(2 * H, H, dtype=BF16, **linear),
    )


def twins(**linear: Any) -> tuple[te.ops.Sequential, te.ops.Sequential]:
    model = make_model(**linear)
    return model, copy.deepcopy(model)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Another size each time, so that factors of delayed scaling move."""
    generator = torch.Generator("cuda").manual_seed(step)
    size = [1.0, 7.0, 0.3, 3.0, 0.05][step % 5]
    x = torch.randn(ROWS, H, generator=generator) * size
    return x.to(BF16).requires_grad_(), torch.randn(ROWS, H, generator=generator).to(BF16)


def low_precision(recipe: te.recipe.Recipe | None) -> te.autocast:
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def eager(
    model: Callable[..., Any], x: torch.Tensor, dy: torch.Tensor, recipe: te.recipe.Recipe | None
) -> torch.Tensor:
    note_weights_changed()
    with low_precision(recipe):
        y = model(x)
    y.backward(dy)
    return y.detach()


def same(actual: torch.Tensor | None, wanted: torch.Tensor | None, what: str) -> None:
    assert (actual is None) == (wanted is None), what
    if actual is not None and wanted is not None:
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, msg=lambda m: f"{what}: {m}")


def same_state(model: torch.nn.Module, twin: torch.nn.Module, what: str = "") -> None:
    """Parameters, their gradients, and all that recipes remember."""
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        same(p.grad, q.grad, f"{what} gradient of {name}")
    state, wanted = model.state_dict(), twin.state_dict()
    assert list(state) == list(wanted)
    for key, tensor in wanted.items():
        if isinstance(tensor, torch.Tensor):
            same(state[key], tensor, f"{what} {key}")


def has_state(model: torch.nn.Module) -> bool:
    return any("_recipe_state" in key for key in model.state_dict())
