"""Operations under every recipe: results and gradients against float64 products of the operands
that the formats leave (quantized_reference), alone and next to norms and activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import quantized_reference
import torch
from pipeline_reference import Rounding
from quantized_reference import (
    EVERY_RECIPE as RECIPES,
)
from quantized_reference import (
    SOME_RECIPES,
    LinearRecipe,
    RecipeReference,
    assert_product,
    distance,
    flips,
    is_stochastic,
)
from reference import ACTIVATIONS, GLU_ACTIVATIONS

import ligature as te
from ligature.common.recipe import Float8CurrentScaling, Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
ops = te.ops

EVERY = pytest.mark.parametrize("name", RECIPES)
SOME = pytest.mark.parametrize("name", SOME_RECIPES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Rows, inputs, outputs: whole blocks of every format, and of none.
SIZES = [((128,), 128, 256), ((48,), 160, 32), ((2, 5), 33, 19), ((), 48, 20), ((0,), 16, 32)]
SCALED = ("ScaledSwiGLU", "ScaledSReLU", "ScaledClampedQGeGLU", "ScaledSiTUGLU")


def begin_anew(recipe: Recipe, *modules: torch.nn.Module) -> None:
    for module in modules:
        for part in getattr(module, "basic_ops", (module,)):
            part.reset_recipe_state(recipe=recipe)


def backward(seed: int, outputs: Any, grads: Any, **kwargs: Any) -> None:
    """With the random numbers of this seed."""
    torch.manual_seed(seed)
    torch.autograd.backward(outputs, grads, **kwargs)


def check_linear(
    recipe: Recipe, dtype: torch.dtype, rows: tuple[int, ...], k: int, n: int, bias: bool = True
) -> None:
    """Two steps, so that delayed scaling has a factor in the second."""
    linear = ops.Linear(k, n, dtype=dtype) if bias else ops.BasicLinear(k, n, dtype=dtype)
    wanted = LinearRecipe(recipe)
    for step in range(2):
        x = (torch.randn(*rows, k) * (1 + step)).to(dtype).requires_grad_()
        dy = torch.randn(*rows, n).to(dtype)
        linear.zero_grad()
        with te.autocast(recipe=recipe):
            y = linear(x)
        backward(step, y, dy)
        x64 = x.detach().double().requires_grad_()
        w64 = linear.weight.detach().double().requires_grad_()
        y64 = wanted.product(x64, w64, dtype)
        wanted.update("input", "weight")
        backward(step, y64, dy.double())
        wanted.update("grad_output")
        if bias:
            y64 = y64 + linear.bias.double()
            assert_product(linear.bias.grad, dy.double().reshape(-1, n).sum(0), dtype, "db")
        assert_product(y, y64, dtype, f"y of step {step}", recipe)
        assert_product(x.grad, x64.grad, dtype, f"dx of step {step}", recipe)
        assert_product(linear.weight.grad, w64.grad, dtype, f"dw of step {step}", recipe)


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear(name: str, dtype: torch.dtype) -> None:
    for k, (rows, inputs, outputs) in enumerate(SIZES):
        check_linear(RECIPES[name](), dtype, rows, inputs, outputs, bias=k % 2 == 0)


WRONG: dict[str, tuple[str, Callable[..., Tensor]]] = {
    # Row-wise blocks where column-wise ones belong, a transform left out, rounding to nearest.
    "blocks": ("block f32", lambda x, f, *a, **kw: quantized_reference.rowwise(x, f).t()),
    "transform": ("nvfp4 nearest", lambda x, f, *a, **kw: columnwise(x, {**f, "hadamard": False})),
    "rounding": (
        "nvfp4 no rht",
        lambda x, f, *a, **kw: columnwise(x, {**f, "stochastic_rounding": False}),
    ),
    "seed": ("nvfp4", lambda x, f, scale=1.0, seed=0: columnwise(x, f, scale, seed + 1)),
    "factor": ("delayed", lambda x, f, scale=1.0, seed=0: columnwise(x, f, 1.01 * scale, seed)),
}
columnwise = quantized_reference.columnwise


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_operand_would_be_seen(what: str, monkeypatch: Any) -> None:
    """The reference is changed, which is as good as a change of what it is compared to."""
    name, wrong = WRONG[what]
    for dtype in DTYPES:
        check_linear(RECIPES[name](), dtype, (48,), 160, 32)
        with monkeypatch.context() as patch:
            patch.setattr(quantized_reference, "columnwise", wrong)
            with pytest.raises(AssertionError, match=r"^d[xw] of"):
                check_linear(RECIPES[name](), dtype, (48,), 160, 32)


# -- what needs no gradient


@EVERY
def test_frozen_and_without_gradients(name: str) -> None:
    recipe = RECIPES[name]()
    linear = ops.Linear(48, 40, dtype=torch.bfloat16)
    x = torch.randn(24, 48, dtype=torch.bfloat16)
    dy = torch.randn(24, 40, dtype=torch.bfloat16)

    def run(x_grad: bool, w_grad: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        begin_anew(recipe, linear)
        leaf = x.clone().requires_grad_(x_grad)
        linear.weight.requires_grad_(w_grad)
        linear.zero_grad()
        with te.autocast(recipe=recipe):
            y = linear(leaf)
        backward(3, y, dy)
        return y.detach(), leaf.grad, linear.weight.grad

    with te.autocast(recipe=recipe):
        linear(x)  # a state to reset
        y, dx, dw = run(True, True)
        assert dx is not None
        assert dw is not None
        for x_grad, w_grad in ((True, False), (False, True), (False, False)):
            got = run(x_grad, w_grad)
            assert torch.equal(got[0], y)
            for flag, a, b in ((x_grad, got[1], dx), (w_grad, got[2], dw)):
                assert a is None if not flag else torch.equal(a, b)
        for mode in (torch.no_grad, torch.inference_mode):
            begin_anew(recipe, linear)
            with mode(), te.autocast(recipe=recipe):
                got = linear(x)
            assert torch.equal(got, y)
            assert not got.requires_grad


# -- next to norms and activations


def neighbours(hidden: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Modules that give [.., hidden] for [.., hidden] or [.., 2 hidden], and can stand anywhere."""
    made: dict[str, Callable[[], Any]] = {
        "LayerNorm": lambda: ops.LayerNorm(hidden, dtype=dtype),
        "RMSNorm": lambda: ops.RMSNorm(hidden, dtype=dtype, zero_centered_gamma=True),
        "L2Normalization": lambda: ops.L2Normalization(),
        "Bias": lambda: ops.Bias(hidden, dtype=dtype),
        "ConstantScale": lambda: ops.ConstantScale(0.75),
    }
    made |= {name: getattr(ops, name) for name in (*ACTIVATIONS, *SCALED)}
    return made


def chain(name: str, dtype: torch.dtype) -> tuple[Any, list[tuple[int, ...]]]:
    """A linear, the operation, a linear; and the shapes of the inputs."""
    hidden = 40
    gated = name in GLU_ACTIVATIONS or (name in SCALED and name != "ScaledSReLU")
    module = neighbours(hidden, dtype)[name]()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.5)
    model = ops.Sequential(
        ops.Linear(32, hidden * (1 + gated), dtype=dtype),
        module,
        ops.Linear(hidden, 24, bias=False, dtype=dtype),
    )
    return model, [(3, 11, 32), *([(3, 11)] if name in SCALED else [])]


def gradient_for(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The same for a shape, whatever the device."""
    generator = torch.Generator("cpu").manual_seed(9)
    return torch.randn(y.shape, generator=generator, device="cpu").to(y.device, dtype)


def run_steps(
    recipe: Recipe, model: Any, call: Callable[..., Tensor], inputs: list[Tensor], steps: int = 2
) -> list[Tensor]:
    """The last step's output and gradients."""
    for step in range(steps):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        model.zero_grad()
        with te.autocast(recipe=recipe):
            y = call(*leaves)
        backward(step, y, gradient_for(y, y.dtype))
    return [y.detach(), *(x.grad for x in leaves), *(p.grad for p in model.parameters())]


def reference_steps(
    recipe: Recipe,
    model: Any,
    inputs: list[Tensor],
    dtype: torch.dtype,
    disturbed: Callable[[Tensor], Tensor] = lambda x: x,
    steps: int = 2,
) -> list[Tensor]:
    wanted = RecipeReference(model, recipe, dtype, disturbed)
    for step in range(steps):
        leaves = [x.detach().double().requires_grad_() for x in inputs]
        for parameter in wanted.parameters.values():
            parameter.grad = None
        y = wanted(*leaves)
        wanted.end_forward()
        backward(step, y, gradient_for(y, dtype).double())
        wanted.end_backward()
    grads = [p.grad for p in wanted.parameters.values()]
    return [y.detach(), *(x.grad for x in leaves), *grads]


def label(k: int, model: Any, inputs: list[Tensor]) -> str:
    names = ["y", *(f"gradient of input {i}" for i in range(len(inputs)))]
    return [*names, *(n for n, _ in model.named_parameters())][k]


def compare_to_reference(recipe: Recipe, model: Any, inputs: list[Tensor], what: str) -> None:
    """In float32, where values on the border of two codes are rare.

    Where something is off all the same, it has to be off by no more than the reference is when it
    is disturbed a little.
    """
    got = run_steps(recipe, model, model, inputs)
    wanted = reference_steps(recipe, model, inputs, torch.float32)
    if all(distance(a, b) < 1e-5 for a, b in zip(got, wanted, strict=True)):
        return
    width = flips(recipe, inputs[0].device)
    roundings = [Rounding(seed, None, width) for seed in range(8)]
    others = [
        reference_steps(recipe, model, inputs, torch.float32, lambda x, r=r: r(x, torch.float32))
        for r in roundings
    ]
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        limit = 1e-5 + 2 * max(distance(other[k], b) for other in others)
        off = distance(a, b)
        assert limit < 0.2
        assert off < limit, (
            f"{what}: {label(k, model, inputs)} is off by {off:.2g}, not {limit:.2g}"
        )


# With four over six and scales to 448, differences in the last bits turn the choice of a block
# about, which moves all of it, and more rarely than a few disturbed runs show:
# test_linears_take_what_neighbours_give compares with what each linear was given.
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4 4/6 to 448"])
def test_neighbours_in_float32(name: str) -> None:
    for kind in neighbours(8, torch.float32):
        recipe = RECIPES[name]()
        model, shapes = chain(kind, torch.float32)
        inputs = [torch.randn(shape) for shape in shapes]
        compare_to_reference(recipe, model, inputs, kind)


def apart(first: Any, second: Any, third: Any, x: Tensor, *extra: Tensor) -> Tensor:
    return third(second(first(x), *extra))


def assert_linear(recipe: Recipe, linear: Any, x: Tensor, y: Tensor, what: str) -> None:
    """That a linear which ran computed output and gradients from just these operands."""
    assert y.grad is not None
    assert x.grad is not None
    given = x.detach().double().requires_grad_()
    weight = linear.weight.detach().double().requires_grad_()
    wanted = LinearRecipe(recipe).product(given, weight, torch.float32)
    wanted.backward(y.grad.double())
    if linear.bias is not None:
        wanted = wanted + linear.bias.detach().double()
    assert distance(y.detach(), wanted.detach()) < 1e-5, f"{what}: output"
    assert distance(x.grad, given.grad) < 1e-5, f"{what}: gradient of the input"
    assert distance(linear.weight.grad, weight.grad) < 1e-5, f"{what}: gradient of the weight"


@pytest.mark.parametrize("name", ["nvfp4 1d", "nvfp4 4/6 mse", "nvfp4 4/6 to 448"])
def test_linears_take_what_neighbours_give(name: str) -> None:
    """A chain has the bits of its operations alone, and each linear is right for its operands."""
    for kind in neighbours(8, torch.float32):
        recipe = RECIPES[name]()
        model, shapes = chain(kind, torch.float32)
        inputs = [torch.randn(shape) for shape in shapes]
        together = run_steps(recipe, model, model, inputs)
        model.zero_grad()
        x, *extra = (v.detach().clone().requires_grad_() for v in inputs)
        with te.autocast(recipe=recipe):
            h = model[0](x)
            m = model[1](h, *extra)
            y = model[2](m)
        for value in (h, m, y):
            value.retain_grad()
        y.backward(gradient_for(y, y.dtype))
        alone = [y.detach(), x.grad, *(v.grad for v in extra)]
        alone += [p.grad for p in model.parameters()]
        for k, (a, b) in enumerate(zip(together, alone, strict=True)):
            assert distance(a, b) < 1e-6, f"{kind}: {label(k, model, inputs)}"
        assert_linear(recipe, model[0], x, h, f"{kind}: the first linear")
        assert_linear(recipe, model[2], m, y, f"{kind}: the last linear")


@EVERY
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_neighbours_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """Whether a neighbour writes the format or the next linear rounds does not matter."""
    for kind in neighbours(8, dtype):
        recipe = RECIPES[name]()
        model, shapes = chain(kind, dtype)
        inputs = [torch.randn(shape).to(dtype) for shape in shapes]
        together = run_steps(recipe, model, model, inputs)
        begin_anew(recipe, *model)
        alone = run_steps(recipe, model, functools.partial(apart, *model), inputs)
        for k, (a, b) in enumerate(zip(together, alone, strict=True)):
            what = label(k, model, inputs)
            # A sum for a bias that comes with an activation is of what was not rounded yet.
            limit = torch.finfo(dtype).eps if what == "0.bias" else 0.0
            assert distance(a, b) <= limit, f"{kind}: {what} {distance(a, b):.2g}"


# -- activations that keep their input in FP8


@pytest.mark.parametrize("name", [None, *SOME_RECIPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cached_inputs(name: str | None, dtype: torch.dtype) -> None:
    for kind in ACTIVATIONS:
        recipe = RECIPES[name]() if name else Float8CurrentScaling()
        activation = getattr(ops, kind)(cache_quantized_input=True)
        plain = getattr(ops, kind)()
        width = 32 * (1 + (kind in GLU_ACTIVATIONS))
        x, dy = torch.randn(9, width).to(dtype), torch.randn(9, 32).to(dtype)
        leaf, other = x.clone().requires_grad_(), x.double().requires_grad_()
        with te.autocast(enabled=name is not None, recipe=recipe):
            y = activation(leaf)
            assert torch.equal(y, plain(x))
        y.backward(dy)
        wanted = RecipeReference(activation, recipe, dtype)(other)
        wanted.backward(dy.double())
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
        assert distance(y, wanted) < tolerance, kind
        assert distance(leaf.grad, other.grad) < tolerance, kind
        unrounded = x.double().requires_grad_()
        ACTIVATIONS[kind](unrounded).backward(dy.double())
        assert distance(leaf.grad, unrounded.grad) > 2e-3 or kind in ("ReLU",), kind


@EVERY
def test_cached_inputs_between_linears(name: str) -> None:
    recipe = RECIPES[name]()
    model = ops.Sequential(
        ops.Linear(32, 64), ops.SwiGLU(cache_quantized_input=True), ops.Linear(32, 24)
    )
    inputs = [torch.randn(17, 32)]
    compare_to_reference(recipe, model, inputs, "SwiGLU")


# -- Quantize


#: Behind a Quantize there is nothing left of the input in high precision.
TAKE_QUANTIZED = [n for n in RECIPES if RECIPES[n]().backward_override != "high_precision"]


@pytest.mark.parametrize("name", TAKE_QUANTIZED)
def test_quantize_before_a_linear_changes_nothing(name: str) -> None:
    """Across containers too; with backward=True the gradient is rounded once more or the same."""
    recipe = RECIPES[name]()
    norm, linear = ops.LayerNorm(48), ops.Linear(48, 40)
    inputs = [torch.randn(20, 48)]
    models = [
        ops.Sequential(norm, linear),
        ops.Sequential(norm, ops.Quantize(), linear),
        torch.nn.Sequential(ops.Sequential(norm, ops.Quantize()), ops.Sequential(linear)),
    ]
    results = []
    for model in models:
        begin_anew(recipe, linear)
        results.append(run_steps(recipe, model, model, inputs))
    for got in results[1:]:
        for k, (a, b) in enumerate(zip(got, results[0], strict=True)):
            assert torch.equal(a, b), label(k, models[0], inputs)


@EVERY
def test_quantize_alone_and_in_backward(name: str) -> None:
    recipe = RECIPES[name]()
    state = LinearRecipe(recipe)
    formats = state.formats
    x = torch.randn(33, 48).requires_grad_()
    dy = torch.randn(33, 48)
    both = ops.Sequential(ops.Quantize(forward=True, backward=True))
    with te.autocast(recipe=recipe):
        y = both(x)
    assert isinstance(y, te.QuantizedTensor)
    wanted = quantized_reference.rowwise(x.detach(), formats["input"])
    assert torch.equal(y.dequantize().double(), wanted)
    torch.manual_seed(4)
    y.backward(dy)
    torch.manual_seed(4)
    seed = quantized_reference.next_seed() if is_stochastic(recipe) else 0
    wanted = quantized_reference.rowwise(dy, formats["grad_output"], seed=seed)
    if recipe.backward_override is not None:
        wanted = dy.double()
    assert torch.equal(x.grad.double(), wanted)


@SOME
def test_quantize_outside_any_context_is_the_identity(name: str) -> None:
    model = ops.Sequential(ops.Linear(32, 32), ops.Quantize(backward=True), ops.GELU())
    plain = ops.Sequential(model[0], model[2])
    x = torch.randn(8, 32)
    assert torch.equal(model(x), plain(x))
    with te.autocast(recipe=RECIPES[name]()):
        assert not torch.equal(model(x), plain(x))
