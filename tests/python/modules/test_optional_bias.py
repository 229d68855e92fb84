"""A Linear whose bias is taken away and given back, as in torch.nn.Linear."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ligature as te

ops = te.ops

#: What is around the linear: all the fusions with a bias.
MODELS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "alone": lambda linear: linear,
    "in a container": lambda linear: ops.Sequential(linear),
    "in a fuser": lambda linear: ops.OperationFuser([linear]),
    "gelu": lambda linear: ops.Sequential(linear, ops.GELU()),
    "swiglu": lambda linear: ops.Sequential(ops.LayerNorm(16), linear, ops.SwiGLU()),
    "gelu between": lambda linear: ops.Sequential(
        linear, ops.ReLU(), ops.Linear(16, 8), ops.GELU(), ops.Linear(8, 8)
    ),
    "add": lambda linear: ops.Sequential(ops.MakeExtraOutput(), linear, ops.Identity()),
    "cheap": lambda linear: ops.Sequential(
        ops.RMSNorm(16), linear, ops.GELU(), ops.Linear(16, 16), recompute="cheap"
    ),
    "cheap, at the end": lambda linear: ops.Sequential(
        ops.RMSNorm(16), ops.Linear(16, 16), ops.GELU(), linear, recompute="cheap"
    ),
    "dropout": lambda linear: ops.Sequential(linear, ops.Dropout(0.0), ops.ConstantScale(2.0)),
}
RECIPES = {
    "none": None,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "current": te.recipe.Float8CurrentScaling,
}


def run(model: torch.nn.Module, linear: torch.nn.Module, x: Tensor, recipe: str) -> list[Tensor]:
    made = RECIPES[recipe]
    x = x.detach().clone().requires_grad_()
    for parameter in linear.parameters():
        parameter.grad = None
    with te.autocast(enabled=made is not None, recipe=None if made is None else made()):
        y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    assert linear.weight.grad is not None
    return [y.detach(), x.grad, linear.weight.grad.clone()]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_without_its_bias(name: str, recipe: str) -> None:
    """As one made without a bias, bit for bit; and with it as before."""
    linear = ops.Linear(16, 16)
    bare = ops.Linear(16, 16, bias=False)
    bare.weight = torch.nn.Parameter(linear.weight.detach().clone())
    torch.manual_seed(3)
    model = MODELS[name](linear)
    torch.manual_seed(3)
    reference = MODELS[name](bare)
    x = torch.randn(4, 16)
    before = run(model, linear, x, recipe)
    bias = linear.bias
    linear.bias = None
    for a, b in zip(run(model, linear, x, recipe), run(reference, bare, x, recipe), strict=True):
        assert torch.equal(a, b)
    linear.bias = bias
    for a, b in zip(run(model, linear, x, recipe), before, strict=True):
        assert torch.equal(a, b)
    assert linear.bias.grad is not None


def test_what_is_seen_of_it() -> None:
    linear = ops.Linear(8, 4)
    linear.bias = None
    assert linear.bias is None
    assert "bias=False" in repr(linear)
    assert list(dict(linear.named_parameters())) == ["weight"]
    assert "bias" not in linear.state_dict()
    x = torch.randn(3, 8)
    wanted = torch.nn.functional.linear(x, linear.weight)
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    for other in (copy.deepcopy(linear), torch.load(file, weights_only=False)):
        torch.testing.assert_close(other(x), wanted)
        other.bias = torch.nn.Parameter(torch.ones(4))
        torch.testing.assert_close(other(x), wanted + 1)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"bias"'):
        linear.load_state_dict({"weight": linear.weight, "bias": torch.zeros(4)})
    assert "Bias" in str(ops.Sequential(linear).explain((3, 8)))
    linear.reset_parameters()
    assert not hasattr(linear, "nothing")


def test_hooks_on_the_part_without_a_bias() -> None:
    linear = ops.Linear(8, 4)
    seen = []
    linear.basic_ops[1].register_forward_hook(lambda module, args, y: seen.append(y))
    linear.bias = None
    x = torch.randn(3, 8)
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, linear.weight))
    assert len(seen) == 1


@pytest.mark.parametrize("inside", [False, True])
def test_compiled(inside: bool) -> None:
    """A graph notices either change."""
    linear = ops.Linear(8, 8)
    model = ops.Sequential(linear, ops.GELU()) if inside else linear
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(3, 8, requires_grad=True)
    bias = linear.bias
    for given in (bias, None, bias, None):
        linear.bias = given
        y = compiled(x)
        wanted = torch.nn.functional.linear(x, linear.weight, given)
        if inside:
            wanted = torch.nn.functional.gelu(wanted, approximate="tanh")
        torch.testing.assert_close(y, wanted)
        for a, b in zip(
            torch.autograd.grad(y.sum(), (x, linear.weight)),
            torch.autograd.grad(wanted.sum(), (x, linear.weight)),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_what_cannot_be_taken_away() -> None:
    bias, norm, linear = ops.Bias(8), ops.LayerNorm(8), ops.Linear(8, 4)
    bias.bias = norm.bias = linear.weight = None
    for op, name in ((bias, "bias"), (norm, "bias"), (linear, "weight")):
        with pytest.raises(TypeError, match=f"parameter '{name}' must be a tensor"):
            op(torch.randn(2, 8))
    with pytest.raises(ValueError, match="made with bias=False"):
        ops.Linear(8, 4, bias=False).bias = torch.nn.Parameter(torch.zeros(4))
