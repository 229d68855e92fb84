"""Nothing accumulates: plans, quantized weights, recipes and fused operations go when they are not
used any more."""

from __future__ import annotations

import ctypes
import gc
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_support import REGISTER

import ligature as te
from ligature.common import recipe as recipes
from ligature.quantization.scope import RECIPES

SIZE = 256


@pytest.fixture
def model() -> Any:
    return te.ops.Sequential(te.ops.Linear(SIZE, SIZE), te.ops.GELU(), te.ops.Linear(SIZE, SIZE))


def step(model: Any, recipe: Any, gradients: bool = True) -> None:
    x = torch.ones(16, SIZE)
    with te.autocast(recipe=recipe), torch.set_grad_enabled(gradients):
        y = model(x)
    if gradients:
        y.sum().backward()


class Function:
    """An algorithm of a recipe's, told apart from others like it."""

    def __call__(self, history: torch.Tensor) -> torch.Tensor:
        return history.max()


def alive(references: list[Any]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def plans_of(model: Any) -> int:
    return sum(fuser._num_plans for fuser in model._module_groups if hasattr(fuser, "_num_plans"))


# -- a recipe per step


def test_a_recipe_with_a_function_per_step(model: Any) -> None:
    references = []
    for _ in range(20):
        function = Function()
        step(model, recipes.DelayedScaling(amax_compute_algo=function))
        references.append(weakref.ref(function))
        del function
    model.zero_grad()
    assert plans_of(model) == 1
    # The plan's, that of the last step, and those that traced code may ask for.
    RECIPES.clear()
    assert alive(references) <= 2


def test_many_recipes_with_functions_are_not_known_for_ever() -> None:
    for _ in range(200):
        with te.autocast(recipe=recipes.DelayedScaling(amax_compute_algo=Function())):
            pass
    assert len(RECIPES) <= 64


FIELDS: dict[str, Callable[[int], Any]] = {
    "margin": lambda i: recipes.DelayedScaling(margin=i),
    "amax_history_len": lambda i: recipes.DelayedScaling(amax_history_len=i + 1),
    "a custom recipe": lambda i: recipes.CustomRecipe(
        lambda role: te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    ),
    "amax_epsilon": lambda i: with_epsilon(float(i)),
}


def with_epsilon(value: float) -> Any:
    recipe = recipes.Float8CurrentScaling()
    recipe.fp8_quant_fwd_weight = recipes.QParams(amax_epsilon=value)
    return recipe


@pytest.mark.parametrize("field", FIELDS)
def test_many_values_of_a_field(model: Any, field: str) -> None:
    for i in range(40):
        step(model, FIELDS[field](i), gradients=False)
    assert plans_of(model) <= 16


@pytest.mark.parametrize("field", FIELDS)
def test_quantized_weights_do_not_pile_up(device: str, field: str) -> None:
    """40 copies of the weights would be 120 MiB."""
    if device != "cpu":
        pytest.skip("counts the memory of the process")
    sizes = [te.ops.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(3)]
    model = te.ops.Sequential(*sizes)
    x = torch.ones(16, 1024, dtype=torch.bfloat16)

    def run(i: int) -> None:
        with te.autocast(recipe=FIELDS[field](i)), torch.no_grad():
            model(x)

    for i in range(4):
        run(i)
    before = resident()
    for i in range(4, 44):
        run(i)
    assert resident() - before < 20 * 2**20


def resident() -> int:
    """Bytes of memory that this process has, without what it has freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_recipes_in_turn_compute_right_whatever_was_dropped() -> None:
    """More than an operation remembers, twice: the second time as the first."""
    torch.manual_seed(0)
    linear = te.ops.BasicLinear(64, 64)
    x = torch.randn(8, 64)
    all_ = [with_epsilon(float(i)) for i in range(12)]
    all_ += [recipes.MXFP8BlockScaling(), recipes.Float8BlockScaling(), recipes.NVFP4BlockScaling()]

    def results() -> list[torch.Tensor]:
        out = []
        for recipe in all_:
            with te.autocast(recipe=recipe), torch.no_grad():
                out.append(linear(x))
        return out

    first = results()
    for a, b in zip(first, results(), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        linear.weight.data.neg_()
    for a, b in zip(first, results(), strict=True):
        assert torch.equal(a, -b)


# -- fusions that are gone


class Fused(te.ops.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return 2 * input_, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return 2 * grad_output, [()], [()]


@pytest.fixture
def made() -> list[Any]:
    """Weak references to the fused operations that a fusion has made."""
    return []


def fusion(made: list[Any]) -> Callable[..., Any]:
    def fuse(ops: list[Any], **unused: Any) -> list[Any]:
        fused = Fused(ops[:1])
        made.append(weakref.ref(fused))
        return [fused, *ops[1:]]

    return fuse


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_fused_operations_go_with_their_fusion(kind, declared, again, made) -> None:
    def make(op: Any) -> Any:
        fused = Fused([op])
        made.append(weakref.ref(fused))
        return fused

    model = te.ops.Sequential(te.ops.ConstantScale(2.0), te.ops.GELU())
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(5):
        given = te.ops.Fusion([te.ops.ConstantScale], make) if declared else fusion(made)
        with REGISTER[kind](given):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
            model(x.detach().bfloat16())
            assert alive(made) >= 1
        if again:
            model(x).sum().backward()
        del given
        assert alive(made) == 0
    assert len(made) >= 5


def test_the_function_of_a_fusion_goes_too() -> None:
    def fuse(ops: list[Any], **unused: Any) -> list[Any]:
        return [Fused(ops[:1]), *ops[1:]]

    model = te.ops.Sequential(te.ops.ConstantScale(2.0))
    with te.ops.register_forward_backward_fusion(fuse):
        model(torch.randn(3))
    reference = weakref.ref(fuse)
    del fuse
    assert alive([reference]) == 0


def test_what_the_last_call_did_is_still_told(made) -> None:
    model = te.ops.Sequential(te.ops.ConstantScale(2.0), te.ops.GELU())
    x = torch.randn(3, 4, requires_grad=True)
    with te.ops.register_forward_backward_fusion(fusion(made)):
        model(x).sum().backward()
        before = str(model.explain())
    assert "Fused" in before
    assert str(model.explain()) == before
    assert alive(made) == 0
    names = [type(op).__name__ for op, _ in model._module_groups[0]._forward_ops]
    assert len(names) == 2
    model(x)
    assert "Fused" not in str(model.explain())


def test_a_graph_keeps_what_it_needs(made) -> None:
    model = te.ops.Sequential(te.ops.ConstantScale(2.0))
    x = torch.randn(3, 4, requires_grad=True)
    with te.ops.register_forward_backward_fusion(fusion(made)):
        y = model(x)
    model(x.detach())
    assert alive(made) == 1
    y.sum().backward()
    assert (x.grad == 2).all()
    del y
    assert alive(made) == 0


def test_plans_that_are_dropped_take_their_fused_operations_along(made) -> None:
    """Each recipe has a plan of its own; only so many are kept."""
    model = te.ops.Sequential(te.ops.ConstantScale(2.0), te.ops.BasicLinear(64, 64))
    with te.ops.register_forward_backward_fusion(fusion(made)):
        for i in range(40):
            with te.autocast(recipe=recipes.DelayedScaling(margin=i)):
                model(torch.randn(8, 64)).sum().backward()
        assert len(made) == 40
        assert alive(made) <= 17
        model(torch.randn(8, 64))
    assert alive(made) == 0


def test_models_are_freed_with_fusions_registered(made) -> None:
    with te.ops.register_forward_backward_fusion(fusion(made)):
        model = te.ops.Sequential(te.ops.ConstantScale(2.0))
        model(torch.randn(3))
        reference = weakref.ref(model)
        del model
        assert alive([reference, *made]) == 0
