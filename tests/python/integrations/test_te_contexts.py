"""Contexts that a forward-only fusion filled by te.ops' conventions reach the built-in backward."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import assert_close, make_input
from te_fusions import ACTIVATIONS, TeFilled

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

Ops = list[te.ops.FusibleOperation]


def basic(ops: Ops) -> Ops:
    return [part for op in ops for part in (op.basic_ops if op.is_fused_op else [op])]


def everything(ops: Ops, **unused: Any) -> Ops:
    """One fusion for the whole pipeline, as the function of a quick script does it."""
    return [TeFilled(*ops)]


def check(registered: Any, ops: Ops, *inputs: torch.Tensor, scale: float = 4.0) -> None:
    """Gradients behind the fusion are those of the operations run one by one."""
    plain = te.ops.OperationFuser(ops, fuse=False)
    registered("forward", everything)
    TeFilled.calls = 0
    fused = te.ops.OperationFuser(ops)
    parameters = [p for op in basic(ops) for p in op.parameters()]
    results = []
    for fuser in (fused, plain):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        wanted = [t for t in (*leaves, *parameters) if t.requires_grad]
        torch.manual_seed(7)
        y = fuser(*leaves)
        torch.manual_seed(8)
        results.append([y, *torch.autograd.grad(y, wanted, torch.randn(y.shape).to(y.dtype))])
    assert TeFilled.calls == 1
    assert type(fused._backward_ops[0][0]) is not TeFilled
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        assert_close(got, want, want.dtype, scale=scale)


PIPELINES: dict[str, Callable[[], tuple[Ops, list[torch.Tensor]]]] = {
    "linear": lambda: ([te.ops.BasicLinear(8, 6)], [make_input(2, 5, 8)]),
    "linear with bias": lambda: ([te.ops.Linear(8, 6)], [make_input(2, 5, 8)]),
    "linear, activation": lambda: ([te.ops.Linear(8, 6), te.ops.SiLU()], [make_input(5, 8)]),
    "layer norm": lambda: ([te.ops.LayerNorm(8)], [make_input(2, 5, 8)]),
    "layer norm of two dimensions": lambda: ([te.ops.LayerNorm((5, 8))], [make_input(2, 5, 8)]),
    "rms norm": lambda: ([te.ops.RMSNorm(8)], [make_input(2, 5, 8)]),
    "l2 normalization": lambda: ([te.ops.L2Normalization()], [make_input(2, 5, 8)]),
    "reshape": lambda: ([te.ops.Reshape((2, -1)), te.ops.SiLU()], [make_input(4, 8)]),
    "scale": lambda: ([te.ops.ConstantScale(0.5), te.ops.Identity()], [make_input(4, 8)]),
    "add": lambda: ([te.ops.AddExtraInput()], [make_input(4, 8), make_input(4, 8)]),
    "quantize": lambda: ([te.ops.Quantize(backward=True)], [make_input(4, 8)]),
    "scaled swiglu": lambda: ([te.ops.ScaledSwiGLU()], [make_input(4, 8), make_input(4)]),
    "scaled srelu": lambda: ([te.ops.ScaledSReLU()], [make_input(4, 8), make_input(4)]),
    "mlp": lambda: (
        [te.ops.LayerNorm(8), te.ops.Linear(8, 12), te.ops.SwiGLU(), te.ops.Linear(6, 8)],
        [make_input(2, 5, 8)],
    ),
    "mlp with a residual": lambda: (
        [te.ops.RMSNorm(8), te.ops.Linear(8, 8), te.ops.GELU(), te.ops.AddExtraInput()],
        [make_input(2, 5, 8), make_input(2, 5, 8)],
    ),
    "input without a gradient": lambda: (
        [te.ops.LayerNorm(8), te.ops.Linear(8, 6), te.ops.ReLU()],
        [make_input(2, 5, 8, requires_grad=False)],
    ),
    **{
        name: lambda name=name: ([getattr(te.ops, name)()], [make_input(3, 8)])
        for name in ACTIVATIONS
    },
}


@pytest.mark.parametrize("name", PIPELINES)
def test_backward_of_built_in_operations(name: str, registered: Any) -> None:
    torch.manual_seed(1)
    ops, inputs = PIPELINES[name]()
    for parameter in (p for op in ops for p in op.parameters()):
        torch.nn.init.normal_(parameter)
    check(registered, ops, *inputs)


@pytest.mark.parametrize("frozen", ["weight", "norm", "both"])
def test_frozen_parameters(frozen: str, registered: Any) -> None:
    norm, linear = te.ops.LayerNorm(8), te.ops.Linear(8, 6)
    linear.weight.requires_grad_(frozen == "norm")
    norm.requires_grad_(frozen == "weight")
    check(registered, [norm, linear, te.ops.GELU()], make_input(2, 5, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype, registered: Any) -> None:
    ops = [te.ops.RMSNorm(8, dtype=dtype), te.ops.Linear(8, 12, dtype=dtype), te.ops.SwiGLU()]
    check(registered, ops, make_input(5, 8, dtype=dtype), scale=1e6 if dtype.itemsize == 8 else 8)


@pytest.mark.parametrize("training", [True, False])
def test_dropout(training: bool, registered: Any) -> None:
    """The mask that the fusion drew is the one that backward uses."""
    op = te.ops.Dropout(0.4).train(training)
    registered("forward", everything)
    x = make_input(16, 8)
    y = te.ops.OperationFuser([op])(x)
    y.backward(torch.full_like(y, 3.0))
    torch.testing.assert_close(x.grad, 3 * y.detach() / x.detach())


def test_the_options_of_forward_count(registered: Any) -> None:
    """As with the operations' own contexts: a parameter replaced later changes nothing."""
    norm = te.ops.LayerNorm(8)
    torch.nn.init.normal_(norm.weight)
    registered("forward", everything)
    x = make_input(5, 8)
    y = te.ops.OperationFuser([norm])(x)
    other = copy.deepcopy(norm)
    norm.weight = torch.nn.Parameter(torch.zeros(8))
    y.square().sum().backward()
    leaf = x.detach().requires_grad_()
    other(leaf).square().sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad)


@pytest.mark.parametrize("quantized", [True, False])
def test_linear_in_quantized_compute(quantized: bool, registered: Any) -> None:
    """``with_quantized_compute`` says whether backward computes in low precision."""

    class Filled(te.ops.FusedOperation):
        def __init__(self, *ops: te.ops.FusibleOperation) -> None:
            super().__init__(ops)

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            (op,), (ctx,) = self.basic_ops, basic_op_ctxs
            x, w = input_, op.weight
            if quantized:
                x, w = op.get_quantizer("forward", 0)(x), op.get_quantizer("forward", 1)(w)
            ctx.save_for_backward(x, w)
            ctx.with_quantized_compute = quantized
            ctx.input_quantizer = op.get_quantizer("forward", 0)
            ctx.weight_quantizer = op.get_quantizer("forward", 1)
            ctx.grad_output_quantizer = op.get_quantizer("backward", 0)
            ctx.grad_input_quantizer = None
            ctx.dtype = op.weight.dtype
            ctx.input_requires_grad = ctx.weight_requires_grad = True
            return x.to(torch.float32) @ w.to(torch.float32).T, [()]

    linear = te.ops.BasicLinear(32, 64)
    x = make_input(32, 32)
    dy = torch.randn(32, 64)
    plain = te.ops.OperationFuser([linear], fuse=False)
    registered("forward", te.ops.Fusion([te.ops.BasicLinear], Filled))
    fused = te.ops.OperationFuser([linear])
    recipe = te.recipe.Float8CurrentScaling()
    with te.autocast(enabled=True, recipe=recipe):
        got = torch.autograd.grad(fused(x), [x, linear.weight], dy)
    with te.autocast(enabled=quantized, recipe=recipe):
        wanted = torch.autograd.grad(plain(x), [x, linear.weight], dy)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


# -- what cannot be used


def fill(*saved: int, **fields: Any) -> Any:
    """A fusion of one operation whose context holds these: 0 is the input, others are sizes."""

    class Wrong(te.ops.FusedOperation):
        def __init__(self, *ops: te.ops.FusibleOperation) -> None:
            super().__init__(ops)

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            tensors = [input_ if n == 0 else None if n < 0 else torch.ones(n) for n in saved]
            basic_op_ctxs[0].save_for_backward(*tensors)
            for name, value in fields.items():
                setattr(basic_op_ctxs[0], name, value)
            return input_ * 1, [()]

    return Wrong


WRONG: dict[str, tuple[Callable[[], te.ops.FusibleOperation], Any, str]] = {
    "linear, nothing": (
        lambda: te.ops.BasicLinear(8, 8),
        fill(),
        "save_for_backward(input, weight) is expected, got 0 tensors",
    ),
    "linear, no input": (
        lambda: te.ops.BasicLinear(8, 8),
        fill(-1, -1),
        "save_for_backward(input, weight) is expected, got None as input",
    ),
    "linear, other input": (
        lambda: te.ops.BasicLinear(8, 8),
        fill(3, -1),
        "save_for_backward(input, weight) is expected, got an input of [3], whose last dimension "
        "is not in_features=8",
    ),
    "activation": (
        te.ops.SiLU,
        fill(),
        "save_for_backward(input) is expected, got 0 tensors",
    ),
    "layer norm": (
        lambda: te.ops.LayerNorm(8),
        fill(0),
        "save_for_backward(input, mean, rstd) is expected, got 1 tensors",
    ),
    "layer norm, statistics": (
        lambda: te.ops.LayerNorm(8),
        fill(0, 3, 2),
        "save_for_backward(input, mean, rstd) is expected, got an rstd of [2] for 3 rows",
    ),
    "rms norm": (
        lambda: te.ops.RMSNorm(8),
        fill(),
        "save_for_backward(input, rstd) is expected, got 0 tensors",
    ),
    "l2 normalization": (
        te.ops.L2Normalization,
        fill(0),
        "save_for_backward(input, rsqrt_norm) is expected, got 1 tensors",
    ),
    "reshape": (
        lambda: te.ops.Reshape((3, 8)),
        fill(),
        "input_shape=input_.size() is expected, got none",
    ),
    "dropout": (
        lambda: te.ops.Dropout(0.5),
        fill(0),
        "impl='unfused' or 'evaluation' is expected, got none",
    ),
    "dropout of a kernel": (
        lambda: te.ops.Dropout(0.5),
        fill(3, impl="fused", dropout_probability=0.5),
        "impl='unfused' or 'evaluation' is expected, got 'fused'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_contexts_are_refused_by_name(name: str, registered: Any) -> None:
    make, fusion, message = WRONG[name]
    registered("forward", te.ops.Fusion([type(make())], fusion))
    x = make_input(3, 8)
    y = te.ops.OperationFuser([make()])(x)  # without backward nothing is wrong
    label = type(make()).__name__
    wanted = f"[{label}] its backward cannot use the context that Wrong filled: {message}"
    with pytest.raises(RuntimeError, match=re.escape(wanted)):
        y.sum().backward()
    assert x.grad is None


def test_what_backward_does_not_need_may_be_missing(registered: Any) -> None:
    linear = te.ops.BasicLinear(8, 8)
    linear.weight.requires_grad_(False)
    registered("forward", te.ops.Fusion([te.ops.BasicLinear], fill(-1, -1)))
    x = make_input(3, 8)
    y = te.ops.OperationFuser([linear])(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 8) @ linear.weight)


def test_joint_fusions_keep_what_they_like(registered: Any) -> None:
    """Their contexts are their own business."""

    class Joint(fill(0)):  # type: ignore[misc]
        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            (x,) = basic_op_ctxs[0].saved_tensors
            return grad_output * x, [(None, None)], [()]

    registered("joint", te.ops.Fusion([te.ops.LayerNorm], Joint))
    x = make_input(3, 8)
    te.ops.OperationFuser([te.ops.LayerNorm(8)])(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach())
