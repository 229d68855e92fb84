"""Built-in fusions under every recipe: fused is unfused, in results, gradients, what is saved, and
what delayed scaling remembers. Stochastic rounding is made equal by seeding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fusion_support import backward_names, forward_names, leaf, parameters_of
from quantized_reference import EVERY_RECIPE as RECIPES
from quantized_reference import SOME_RECIPES, Alpha, LinearRecipe, assert_product, distance
from reference import ACTIVATIONS, GLU_ACTIVATIONS

import ligature as te
from ligature.common.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
ops = te.ops

EVERY = pytest.mark.parametrize("name", RECIPES)
WIDE = 48  # hidden size of what follows


def branch(before: Sequence[Any], inside: Sequence[Any]) -> list[Any]:
    """A residual connection around ``inside``."""
    fork, join = ops.MakeExtraOutput(), ops.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join.set_extra_input_channel(0, "residual")
    return [*before, fork, *inside, join]


def mlp(dtype: torch.dtype, norm: str = "LayerNorm", activation: str = "SwiGLU") -> list[Any]:
    gated = activation in GLU_ACTIVATIONS
    first = getattr(ops, norm)(WIDE, dtype=dtype)
    for parameter in first.parameters():
        torch.nn.init.normal_(parameter, 0.5)
    return [
        first,
        ops.Linear(WIDE, 40 * (1 + gated), dtype=dtype),
        getattr(ops, activation)(),
        ops.Linear(40, WIDE, dtype=dtype),
    ]


def linear(dtype: torch.dtype, bias: bool = True, **options: Any) -> Any:
    return ops.Linear(WIDE, WIDE, bias=bias, dtype=dtype, **options)


Make = Callable[[torch.dtype], list[Any]]
SCALED = "BackwardLinearScale"
#: Operations, extra inputs, and the fused operations that their plans must have.
FUSIONS: dict[str, tuple[Make, int, set[str]]] = {
    "linear, bias": (lambda d: [linear(d)], 0, {"ForwardLinearBiasActivation"}),
    "linear, activation": (
        lambda d: [linear(d, bias=False), ops.GELU()],
        0,
        {"ForwardLinearBiasActivation"},
    ),
    "linear, bias, activation, linear": (
        lambda d: mlp(d)[1:],
        0,
        {"ForwardLinearBiasActivation", "BackwardActivationBias"},
    ),
    "cached input": (
        lambda d: [linear(d), ops.SwiGLU(cache_quantized_input=True), ops.Linear(24, 32, dtype=d)],
        0,
        {"ForwardLinearBiasActivation", "BackwardActivationBias"},
    ),
    "linear, bias, add": (
        lambda d: [linear(d), ops.AddExtraInput()],
        1,
        {"ForwardLinearBiasAdd"},
    ),
    "linear, scale, add": (
        lambda d: [linear(d, bias=False), ops.ConstantScale(-0.5), ops.AddExtraInput()],
        1,
        {"ForwardLinearScaleAdd", SCALED},
    ),
    # A power of two: the gradient has the same codes before and after it.
    "scale": (
        lambda d: [linear(d, bias=False), ops.ConstantScale(2.0), linear(d)],
        0,
        {SCALED},
    ),
    "fork, linear": (
        lambda d: [ops.SiLU(), ops.MakeExtraOutput(), linear(d, bias=False)],
        0,
        {"BackwardLinearAdd"},
    ),
    "fork, layer norm": (
        lambda d: branch([linear(d)], [ops.LayerNorm(WIDE, dtype=d), linear(d)]),
        0,
        {"BackwardAddLayerNorm", "ForwardLinearBiasAdd"},
    ),
    "fork, rms norm": (
        lambda d: branch([], [ops.RMSNorm(WIDE, dtype=d), linear(d)]),
        0,
        {"BackwardAddRMSNorm"},
    ),
}
#: With recompute="cheap".
BLOCKS: dict[str, Make] = {
    "mlp": lambda d: mlp(d),
    "rms mlp": lambda d: mlp(d, "RMSNorm", "GELU"),
    "residual": lambda d: branch([], mlp(d)),
    "residual after the norm": lambda d: branch(mlp(d)[:1], mlp(d)[1:]),
}


class Ran:
    """Outputs and gradients of a few steps, what was saved, and what factors came of it."""

    def __init__(
        self, make: Make, extras: int, recipe: Recipe, dtype: torch.dtype, **options: Any
    ) -> None:
        torch.manual_seed(3)
        self.modules = make(dtype)
        x = torch.randn(3, 11, WIDE).to(dtype).requires_grad_()
        width = WIDE
        inputs = [x, *(torch.randn(3, 11, width).to(dtype).requires_grad_() for _ in range(extras))]
        self.fuser = ops.OperationFuser(self.modules, **options)
        self.parameters = parameters_of(self.fuser)
        for step in range(2):
            leaves = [leaf(t) for t in inputs]
            for parameter in self.parameters:
                parameter.grad = None
            self.saved: list[Tensor] = []
            with (
                te.autocast(recipe=recipe),
                torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t),
            ):
                outputs = self.fuser(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.manual_seed(7 + step)
            grads = [torch.randn(y.shape).to(dtype) for y in outputs]
            torch.autograd.backward(outputs, grads)
        self.results = [y.detach() for y in outputs]
        self.results += [t.grad for t in leaves]
        self.results += [parameter.grad for parameter in self.parameters]

    def _keep(self, tensor: Tensor) -> Tensor:
        self.saved.append(tensor)
        return tensor

    @property
    def formats(self) -> Counter[tuple[torch.dtype, tuple[int, ...]]]:
        return Counter((t.dtype, tuple(t.shape)) for t in self.saved)

    @property
    def saved_bytes(self) -> int:
        known = {p.untyped_storage().data_ptr() for p in self.parameters}
        storages: dict[int, int] = {}
        for tensor in self.saved:
            storage = tensor.untyped_storage()
            # cuBLASLt may need a few rows more below a result than it has.
            size = tensor.nbytes if tensor.is_cuda else storage.nbytes()
            storages[storage.data_ptr()] = max(size, storages.get(storage.data_ptr(), 0))
        return sum(size for at, size in storages.items() if at not in known)

    @property
    def factors(self) -> list[Tensor]:
        """That of a gradient that is scaled in the products is of what comes before the scale."""
        found = []
        basic = self.fuser._basic_ops
        for op, after in zip(basic, [*basic[1:], None], strict=True):
            if isinstance(op, ops.BasicLinear):
                scaled = isinstance(after, ops.ConstantScale)
                for _, forward, backward in op._handle.recipe_states():
                    states = forward if scaled else (*forward, *backward)
                    found += [torch.cat(state) for state in states if state]
        return found


def compare(got: Ran, wanted: Ran, dtype: torch.dtype) -> None:
    """The same products of the same operands; only roundings in high precision may differ.

    In bfloat16 they carry values over the border of two codes, in float32 hardly ever.
    """
    limit = {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    for k, (a, b) in enumerate(zip(got.results, wanted.results, strict=True)):
        assert a.dtype == b.dtype
        assert distance(a, b) < limit, f"result {k} is off by {distance(a, b):.2g}"
    for a, b in zip(got.factors, wanted.factors, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=0.0)


@EVERY
@pytest.mark.parametrize("what", FUSIONS)
def test_fused_is_unfused(what: str, name: str) -> None:
    make, extras, expected = FUSIONS[what]
    for dtype in (torch.float32, torch.bfloat16):
        fused = Ran(make, extras, RECIPES[name](), dtype)
        plain = Ran(make, extras, RECIPES[name](), dtype, fuse=False)
        names = {*forward_names(fused.fuser), *backward_names(fused.fuser)}
        assert expected <= names
        assert not expected & {*forward_names(plain.fuser), *backward_names(plain.fuser)}
        compare(fused, plain, dtype)
        assert fused.formats == plain.formats
        assert fused.saved_bytes == plain.saved_bytes


@EVERY
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("scale", [3.0, -0.7, 0.0])
def test_a_scale_goes_into_the_products(scale: float, main_grad: bool, name: str) -> None:
    """Against float64: the gradient is quantized as it comes, and remembered so."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(5)
        recipe, module = RECIPES[name](), linear(dtype, False, accumulate_into_main_grad=main_grad)
        fuser = ops.OperationFuser([module, ops.ConstantScale(scale)])
        reference, alpha = LinearRecipe(recipe), Alpha()
        alpha.value = scale
        for step in range(3):
            x = (torch.randn(3, 11, WIDE) * 2**step).to(dtype).requires_grad_()
            dy = (torch.randn(3, 11, WIDE) * 0.1 * 4**step).to(dtype)
            module.weight.grad = None
            module.weight.main_grad = torch.ones_like(module.weight, dtype=torch.float32)
            with te.autocast(recipe=recipe):
                y = fuser(x)
            assert backward_names(fuser) == [SCALED]
            wide_x, w = x.detach().double().requires_grad_(), module.weight.detach().double()
            wanted = reference.product(wide_x, w.requires_grad_(), dtype, alpha)
            reference.update("input", "weight")
            for output, grad in ((y, dy), (wanted, dy.double())):
                torch.manual_seed(9)
                output.backward(grad)
            reference.update("grad_output")
            assert_product(y, scale * wanted, dtype, "y", recipe)
            assert_product(x.grad, wide_x.grad, dtype, "dx", recipe)
            if main_grad:
                got, added = module.weight.main_grad, 1 + w.grad
                assert_product(got, added, torch.float32, "dw", recipe)
            else:
                assert_product(module.weight.grad, w.grad, dtype, "dw", recipe)
            for state in fuser._basic_ops[0]._handle.recipe_states():
                assert float(state[2][0][0]) == float(reference.factors["grad_output"].scale)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputing_is_not_recomputing(name: str, dtype: torch.dtype) -> None:
    for what, make in BLOCKS.items():
        cheap = Ran(make, 0, RECIPES[name](), dtype, recompute="cheap")
        plain = Ran(make, 0, RECIPES[name](), dtype, fuse=False)
        fused = Ran(make, 0, RECIPES[name](), dtype)
        assert forward_names(cheap.fuser) == ["DenseMLP"], what
        compare(cheap, plain, dtype)
        compare(fused, plain, dtype)
        assert fused.formats == plain.formats, what
        assert cheap.saved_bytes < plain.saved_bytes, what


@pytest.mark.parametrize("name", SOME_RECIPES)
def test_every_activation(name: str) -> None:
    for activation in ACTIVATIONS:
        for norm in ("LayerNorm", "RMSNorm"):
            make = lambda d, n=norm, a=activation: mlp(d, n, a)  # noqa: E731
            plain = Ran(make, 0, RECIPES[name](), torch.float32, fuse=False)
            for recompute in ("none", "cheap"):
                fused = Ran(make, 0, RECIPES[name](), torch.float32, recompute=recompute)
                compare(fused, plain, torch.float32)
