"""Fusions where dtypes meet, where gradients go into main_grad, and where options change."""

from __future__ import annotations

import pytest
import torch
from fusion_support import backward_names, check_equal_to_unfused, forward_names
from reference import make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

BF16, FP32 = torch.bfloat16, torch.float32
Linear, Fork, Add = te.ops.Linear, te.ops.MakeExtraOutput, te.ops.AddExtraInput


@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, FP32)])
@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        (
            lambda d: [Linear(24, 16, dtype=d), te.ops.SwiGLU()],
            "ForwardLinearBiasActivation",
            "BackwardActivationBias",
        ),
        (lambda d: [Fork(), Linear(24, 16, dtype=d)], "MakeExtraOutput", "BackwardLinearAdd"),
        (
            lambda d: [te.ops.BasicLinear(24, 16, dtype=d), te.ops.ConstantScale(0.5)],
            "BasicLinear",
            "BackwardLinearScale",
        ),
        (lambda d: [Fork(), te.ops.LayerNorm(24, dtype=d)], "LayerNorm", "BackwardAddLayerNorm"),
        (lambda d: [Fork(), te.ops.RMSNorm(24, dtype=d)], "RMSNorm", "BackwardAddRMSNorm"),
        (lambda d: [te.ops.Bias(24, dtype=d), te.ops.GELU()], "Bias", "BackwardActivationBias"),
    ],
)
def test_input_and_parameters_of_two_dtypes(make, forward: str, backward: str, dtypes) -> None:
    x, parameters = dtypes
    ops = make(parameters)
    fuser = check_equal_to_unfused(ops, make_input(5, 24, dtype=x), precision=BF16)
    if forward == "Bias" and torch.get_default_device().type == "cpu":
        forward = "ForwardBiasActivation"
    assert forward in forward_names(fuser)
    assert backward in backward_names(fuser)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtypes", [(BF16, BF16, FP32), (FP32, FP32, BF16), (FP32, BF16, FP32)])
@pytest.mark.parametrize("scaled", [False, True])
def test_addition_of_two_dtypes(dtypes, in_place: bool, scaled: bool) -> None:
    x, parameters, extra = dtypes
    ops = [Linear(24, 16, bias=not scaled, dtype=parameters)]
    ops += [te.ops.ConstantScale(0.5)] if scaled else []
    inputs = [
        make_input(5, 24, dtype=x),
        make_input(5, 16, dtype=extra, requires_grad=not in_place),
    ]
    fuser = check_equal_to_unfused([*ops, Add(in_place=in_place)], *inputs, precision=BF16)
    assert len(fuser._forward_ops) == 1


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "dtypes", [(FP32, FP32, BF16), (BF16, FP32, BF16), (FP32, BF16, BF16), (BF16, BF16, FP32)]
)
def test_dense_mlp_of_two_dtypes(dtypes, residual: bool) -> None:
    x, norm, linear = dtypes
    ops = [
        te.ops.LayerNorm(24, dtype=norm),
        Linear(24, 32, dtype=linear),
        te.ops.SwiGLU(),
        Linear(16, 24, dtype=linear),
    ]
    if residual:
        fork, join = Fork(), Add()
        fork.set_extra_output_channel(0, "r", output_to_caller=False)
        join.set_extra_input_channel(0, "r")
        ops = [fork, *ops, join]
    inputs = make_input(5, 24, dtype=x)
    fuser = check_equal_to_unfused(ops, inputs, recompute="cheap", precision=BF16)
    assert forward_names(fuser) == ["DenseMLP"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("case", ["activation", "add", "scale", "mlp"])
def test_main_grad(case: str, overwrite: bool) -> None:
    def linear(size_in: int, size_out: int) -> Linear:
        op = Linear(size_in, size_out, bias=case != "scale", accumulate_into_main_grad=True)
        op.weight.overwrite_main_grad = overwrite
        return op

    ops = {
        "activation": lambda: [linear(24, 16), te.ops.GELU()],
        "add": lambda: [te.ops.SiLU(), Fork(), linear(24, 16)],
        "scale": lambda: [linear(24, 16), te.ops.ConstantScale(-0.5)],
        "mlp": lambda: [te.ops.RMSNorm(24), linear(24, 32), te.ops.SwiGLU(), linear(16, 24)],
    }[case]()
    linears = [op for op in ops if isinstance(op, Linear)]
    x = make_input(5, 24)
    buffers = []
    for fuse in (True, False):
        for op in linears:
            op.weight.main_grad = torch.full_like(op.weight, 2.0)
        fuser = te.ops.OperationFuser(ops, recompute="cheap", fuse=fuse)
        outputs = fuser(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(y.square().sum() for y in outputs).backward()
        buffers.append([op.weight.main_grad for op in linears])
        assert all(op.weight.grad is None for op in linears)
        fused = [*forward_names(fuser), *backward_names(fuser)]
        assert any(name.startswith(("Forward", "Backward", "Dense")) for name in fused) == fuse
    for fused, plain in zip(*buffers, strict=True):
        assert not torch.equal(fused, torch.full_like(fused, 2.0))
        torch.testing.assert_close(fused, plain)


CHANGES = [
    (lambda: te.ops.ConstantScale(2.0), "scale", 5.0),
    (lambda: te.ops.Dropout(0.0), "p", 0.9),
    (lambda: te.ops.ClampedSwiGLU(limit=0.3), "limit", 7.0),
    (lambda: te.ops.SiTUGLU(beta1=0.3), "beta1", 4.0),
    (lambda: te.ops.SwiGLU(), "glu_interleave_size", 2),
    (lambda: te.ops.LayerNorm(24), "zero_centered_gamma", True),
    (lambda: te.ops.RMSNorm(24), "zero_centered_gamma", True),
]


@pytest.mark.parametrize(("make", "option", "value"), CHANGES)
def test_backward_uses_the_options_that_forward_used(make, option: str, value) -> None:
    op = make()
    x = make_input(5, 24)
    y = op(x)
    grad = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    setattr(op, option, value)
    (got,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(got, wanted)
    if option != "p":
        assert not torch.equal(op(x), y)


def test_options_may_change_between_calls() -> None:
    scale = te.ops.ConstantScale(2.0)
    linear = te.ops.BasicLinear(24, 16)
    fuser = te.ops.OperationFuser([linear, scale, Add()])
    x, extra = make_input(5, 24), make_input(5, 16)
    for value in (2.0, -1.0):
        scale.scale = value
        y = fuser(x, extra)
        torch.testing.assert_close(y, value * linear(x) + extra)
        (dx,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(dx, value * linear.weight.sum(0).expand(5, 24))
    assert forward_names(fuser) == ["ForwardLinearScaleAdd"]
