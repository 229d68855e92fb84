"""Tensors of the user's own classes: results are of the class that torch.nn.Linear's would have."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import ligature as te

ops = te.ops


class Tagged(torch.Tensor):
    """Keeps its class, as torch's functions do."""


class Logged(torch.Tensor):
    """Sees every function it is given to."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    """Takes no part in functions."""

    __torch_function__ = torch._C._disabled_torch_function_impl


MODULES = {
    "Linear": lambda: ops.Linear(8, 4),
    "BasicLinear": lambda: ops.BasicLinear(8, 4),
    "LayerNorm": lambda: ops.LayerNorm(8),
    "GELU": lambda: ops.GELU(),
    "Sequential": lambda: ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.SwiGLU()),
    "Sequential with a module": lambda: ops.Sequential(
        ops.Linear(8, 8), torch.nn.ReLU(), ops.Linear(8, 4)
    ),
    "OperationFuser": lambda: ops.OperationFuser([ops.Linear(8, 4)]),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("cls", [Tagged, Logged, Plain])
def test_class_of_the_output(name: str, cls: type[torch.Tensor]) -> None:
    model = MODULES[name]()
    x = torch.randn(3, 8)
    wanted = model(x)
    own = x.as_subclass(cls)
    assert type(model(own)) is type(torch.nn.Linear(8, 4)(own))
    assert type(model(own)) is (torch.Tensor if cls is Plain else cls)
    assert torch.equal(model(own).as_subclass(torch.Tensor), wanted)
    with torch.no_grad():
        assert type(model(own)) is type(torch.nn.Linear(8, 4)(own))
    assert type(model(x)) is torch.Tensor


def test_gradients() -> None:
    linear = ops.Linear(8, 4)
    x = torch.randn(3, 8, requires_grad=True)
    results = []
    for cls in (torch.Tensor, Tagged):
        own = x.detach().as_subclass(cls).requires_grad_()
        linear.zero_grad()
        y = linear(own)
        assert y.grad_fn is not None
        y.square().sum().backward()
        grads = [own.grad, linear.weight.grad, linear.bias.grad]
        results.append([g.as_subclass(torch.Tensor).clone() for g in grads])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_parameter_of_a_class() -> None:
    """As in torch.nn.Linear, whose output is then of the weight's class."""
    linear, plain = ops.Linear(8, 4), torch.nn.Linear(8, 4)
    weight = torch.randn(4, 8)
    for module in (linear, plain):
        module.weight = torch.nn.Parameter(weight.as_subclass(Tagged))
    x = torch.randn(3, 8)
    assert type(linear(x)) is type(plain(x)) is Tagged
    linear(x).sum().backward()
    assert linear.weight.grad is not None
    linear.weight = torch.nn.Parameter(weight)
    assert type(linear(x)) is torch.Tensor


def test_extra_inputs_and_outputs() -> None:
    model = ops.Sequential(ops.MakeExtraOutput(), ops.Linear(8, 8), ops.AddExtraInput())
    x, extra = torch.randn(3, 8), torch.randn(3, 8)
    wanted = model(x, extra)
    for inputs in ((x.as_subclass(Tagged), extra), (x, extra.as_subclass(Tagged))):
        results = model(*inputs)
        assert isinstance(results, tuple)
        assert [type(y) for y in results] == [Tagged, Tagged]
        for y, w in zip(results, wanted, strict=True):
            assert torch.equal(y.as_subclass(torch.Tensor), w)


def test_a_class_that_looks_on() -> None:
    Logged.seen.clear()
    model = ops.Sequential(ops.Linear(8, 8), ops.GELU())
    x = torch.randn(3, 8).as_subclass(Logged)
    Logged.seen.clear()
    model(x)
    assert Logged.seen == ["OperationFuser"]
    Logged.seen.clear()
    with torch._C.DisableTorchFunctionSubclass():
        y = model(x)
    assert Logged.seen == []
    assert type(y) is torch.Tensor


def test_keyword_arguments_come_along() -> None:
    seen = []

    class Looks(ops.BasicOperation):
        def op_forward(self, ctx: Any, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            seen.append(kwargs["factor"])
            return input_ * kwargs["factor"]

        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            return grad_output, ()

    op = Looks()
    y = ops.Sequential(op)(torch.ones(2).as_subclass(Tagged), op_kwargs={op: {"factor": 3}})
    assert type(y) is Tagged
    assert seen == [3]


def test_two_classes() -> None:
    """The class of a subclass decides; of unrelated ones the first that answers."""

    class More(Tagged):
        pass

    add = ops.AddExtraInput()
    x = torch.randn(3, 8)
    assert type(add(x.as_subclass(Tagged), x.as_subclass(More))) is More
    assert type(torch.add(x.as_subclass(Tagged), x.as_subclass(More))) is More
    other = x.as_subclass(Logged)
    with pytest.raises(TypeError, match="OperationFuser"):
        add(x.as_subclass(Tagged), other)
    with pytest.raises(TypeError):
        torch.add(x.as_subclass(Tagged), other)


def test_quantized_tensors_are_taken_as_they_are() -> None:
    """They are of a class too, and need not be asked."""
    with te.quantized_model_init(recipe=te.recipe.MXFP8BlockScaling()):
        linear = ops.Linear(32, 32)
    assert type(linear(torch.randn(4, 32))) is torch.Tensor
