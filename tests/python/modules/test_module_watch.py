"""What a container watches of its modules: edits that pass by its methods, and the lives of what it
looks at."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch

import ligature as te

ops = te.ops
Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("device")


def model_of(*extra: torch.nn.Module) -> te.ops.Sequential:
    return ops.Sequential(ops.Linear(16, 16), ops.GELU(), *extra)


@pytest.mark.parametrize("compiled", [False, True])
def test_other_modules_are_noticed(compiled: bool) -> None:
    model, x = model_of(), torch.randn(4, 16)
    torch._dynamo.reset()
    call: Any = torch.compile(model, backend="aot_eager") if compiled else model
    call(x)
    other = ops.Linear(16, 16)
    model._modules = {"0": other, "1": ops.ReLU()}
    wanted = torch.relu(torch.nn.functional.linear(x, other.weight, other.bias))
    torch.testing.assert_close(call(x), wanted)
    model._modules = OrderedDict(only=ops.ReLU())
    assert torch.equal(call(x), torch.relu(x))
    assert len(model) == 1


def test_modules_of_a_copy_of_the_dict() -> None:
    model, x = model_of(), torch.randn(4, 16)
    wanted = model(x)
    model._modules = dict(model._modules)
    gc.collect()
    assert torch.equal(model(x), wanted)
    model._modules["1"] = ops.ReLU()
    assert torch.equal(model(x), torch.relu(model[0](x)))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_after_attributes_were_rebuilt(compiled: bool) -> None:
    """As torch.export does with those of every module, and then again."""
    from torch.utils import _pytree as pytree

    model, x = model_of(), torch.randn(4, 16)
    wanted = model(x)
    if compiled:
        torch.compile(model, backend="aot_eager")(x)
    for _ in range(3):
        attributes = {k: v for k, v in model.__dict__.items() if k != "_modules"}
        model.__dict__.update(pytree.tree_map(lambda leaf: leaf, attributes))
        del attributes
        gc.collect()
        junk = [bytearray(64) for _ in range(1000)]
        assert torch.equal(model(x), wanted)
        del junk


def test_hooks_in_another_dict() -> None:
    model, x = model_of(), torch.randn(4, 16)
    model(x)
    calls = []
    model[0]._forward_hooks = OrderedDict()
    model(x)
    model[0].register_forward_hook(lambda *args: calls.append("forward"))
    model(x)
    assert calls == ["forward"]


def test_another_forward() -> None:
    model, x = model_of(), torch.randn(4, 16)
    wanted = model(x)
    model[1].forward = lambda x: x * 0  # type: ignore[method-assign]
    assert not model(x).any()
    del model[1].forward
    assert torch.equal(model(x), wanted)
    assert len(model._module_groups) == 1


@pytest.mark.parametrize("refers", ["hook", "attribute", "nothing"])
def test_a_container_is_collected(refers: str) -> None:
    """Also where what it watches refers to it."""
    model, x = model_of(), torch.randn(4, 16)
    if refers == "hook":
        model[0].register_forward_hook(lambda *args, model=model: None)
    elif refers == "attribute":
        model[0].__dict__["parent"] = model
    model(x)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_fuser_is_collected() -> None:
    fuser = ops.OperationFuser([ops.Linear(16, 16)])
    fuser(torch.randn(4, 16))
    fuser.itself = fuser  # type: ignore[attr-defined]
    gone = weakref.ref(fuser)
    del fuser
    gc.collect()
    assert gone() is None


def test_a_fuser_keeps_its_modules() -> None:
    linear = ops.Linear(16, 16)
    x = torch.randn(4, 16)
    wanted = linear(x)
    fuser = ops.OperationFuser([linear])
    fuser._kept = []
    del linear
    gc.collect()
    assert torch.equal(fuser(x), wanted)


def test_an_operation_without_its_object() -> None:
    """Whoever holds the C++ part alone is told so."""

    class Own(ops.BasicOperation):
        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
            return input_

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output, ()

    op = Own()
    handle = op._op
    del op
    gc.collect()
    with pytest.raises(RuntimeError, match=r"\[Own\] has no Python object"):
        handle.basic_op_objects()


class Loss:
    """A compiled function of a model that only it knows."""

    def __init__(self, make: Any, x: Tensor, backend: str, recipe: Any = None) -> None:
        model = make()
        twin = copy.deepcopy(model)  # backward moves delayed scaling on
        self.gone = weakref.ref(model)
        self.parameters = list(model.parameters())
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            self.wanted = torch.autograd.grad(twin(x).sum(), [x, *twin.parameters()])
            self.loss = compiled(x).sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", [None, "current", "delayed"])
def test_a_compiled_loss_outlives_its_model(backend: str, recipe: Any) -> None:
    recipes = {"current": te.recipe.Float8CurrentScaling(), "delayed": te.recipe.DelayedScaling()}
    x = torch.randn(16, 16, requires_grad=True)
    made = Loss(model_of, x, backend, recipes.get(recipe))
    torch._dynamo.reset()
    gc.collect()
    assert made.gone() is None
    model_of()(x)  # another one
    torch.compile(model_of(), fullgraph=True, backend="aot_eager")(x)
    got = torch.autograd.grad(made.loss, [x, *made.parameters])
    for a, b in zip(got, made.wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_of_a_model_is_known_when_all_is_gone() -> None:
    x = torch.randn(16, 16, requires_grad=True)
    model = model_of()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(x).sum()
    number = int(model._groups[0].traced.number)
    assert te._C.is_known(number)
    torch._dynamo.reset()
    del model, compiled
    gc.collect()
    assert te._C.is_known(number), "the loss needs it"
    del loss
    gc.collect()
    assert not te._C.is_known(number)


def test_operations_in_python_must_live() -> None:
    class Own(ops.BasicOperation):
        def op_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
            return input_ * 2, ()

        def op_forward_save_ctx(self, ctx: Any, *args: Any, **unused: Any) -> None: ...

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output * 2, ()

    x = torch.randn(16, 16, requires_grad=True)
    made = Loss(lambda: model_of(Own()), x, "aot_eager")
    torch._dynamo.reset()
    gc.collect()
    assert made.gone() is None
    with pytest.raises(RuntimeError, match=r"\[Own\] its Python object is gone"):
        made.loss.backward()
