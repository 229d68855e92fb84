"""Fusions of the backward pass: where they fire, where not, and that they change no gradient."""

from __future__ import annotations

import pytest
import torch
from fusion_support import (
    backward_names,
    check_equal_to_unfused,
    check_indices,
    forward_names,
    freezing_patterns,
)
from reference import ACTIVATIONS, FLOAT_DTYPES, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

Linear, Fork = te.ops.Linear, te.ops.MakeExtraOutput


def random_norm(kind: str, dtype: torch.dtype = torch.float32, **options: bool) -> torch.nn.Module:
    norm = getattr(te.ops, kind)(24, dtype=dtype, **options)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_bias(activation: str, dtype: torch.dtype) -> None:
    bias = te.ops.Bias(24, dtype=dtype)
    torch.nn.init.normal_(bias.bias)
    ops = [bias, getattr(te.ops, activation)()]
    x = make_input(5, 24, dtype=dtype)
    fuser = check_equal_to_unfused(ops, x, scale=4)
    assert backward_names(fuser) == ["BackwardActivationBias"]
    fused = x.device.type == "cpu" and dtype != torch.float16
    assert forward_names(fuser) == (["ForwardBiasActivation"] if fused else ["Bias", activation])
    check_indices(fuser)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_bias_of_a_linear(activation: str) -> None:
    ops = [Linear(24, 16), getattr(te.ops, activation)()]
    fuser = check_equal_to_unfused(ops, make_input(2, 3, 24))
    assert backward_names(fuser) == ["BasicLinear", "BackwardActivationBias"]
    check_indices(fuser)


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("activation", ["SiLU", "SwiGLU"])
def test_activation_bias_frozen(activation: str, x_grad: bool) -> None:
    linear = Linear(24, 16)
    ops = [linear, getattr(te.ops, activation)()]
    for _ in freezing_patterns([linear.weight, linear.bias]):
        fuser = check_equal_to_unfused(ops, make_input(5, 24, requires_grad=x_grad))
        fires = x_grad or linear.weight.requires_grad or linear.bias.requires_grad
        assert ("BackwardActivationBias" in backward_names(fuser)) == fires


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_linear_add(in_place: bool, dtype: torch.dtype) -> None:
    ops = [te.ops.SiLU(), Fork(in_place=in_place), Linear(24, 16, dtype=dtype)]
    fuser = check_equal_to_unfused(ops, make_input(5, 24, dtype=dtype))
    assert backward_names(fuser) == ["SiLU", "BackwardLinearAdd", "Bias"]
    assert forward_names(fuser) == ["SiLU", "MakeExtraOutput", "ForwardLinearBiasActivation"]
    check_indices(fuser)


@pytest.mark.parametrize("x_grad", [True, False])
def test_linear_add_frozen(x_grad: bool) -> None:
    linear = Linear(24, 16)
    for _ in freezing_patterns([linear.weight, linear.bias]):
        check_equal_to_unfused([Fork(), linear], make_input(5, 24, requires_grad=x_grad))


@pytest.mark.parametrize("used", [0, 1])
def test_linear_add_with_one_gradient(used: int) -> None:
    linear = Linear(24, 16)
    results = []
    for fuse in (True, False):
        fuser = te.ops.OperationFuser([Fork(), linear], fuse=fuse)
        torch.manual_seed(0)
        x = make_input(5, 24)
        outputs = fuser(x)
        linear.zero_grad()
        outputs[used].square().sum().backward()
        results.append([outputs[used], x.grad, linear.weight.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(torch.zeros(16, 24) if a is None else a, b)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("scale", [-1.5, 0.0])
def test_linear_scale(scale: float, dtype: torch.dtype) -> None:
    ops = [Linear(24, 16, bias=False, dtype=dtype), te.ops.ConstantScale(scale)]
    fuser = check_equal_to_unfused(ops, make_input(5, 24, dtype=dtype))
    assert backward_names(fuser) == ["BackwardLinearScale"]
    check_indices(fuser)


@pytest.mark.parametrize("x_grad", [True, False])
def test_linear_scale_frozen(x_grad: bool) -> None:
    linear = te.ops.BasicLinear(24, 16)
    for _ in freezing_patterns([linear.weight]):
        ops = [linear, te.ops.ConstantScale(-0.5), te.ops.Linear(16, 4)]
        check_equal_to_unfused(ops, make_input(5, 24, requires_grad=x_grad))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_add_norm(kind: str, zero_centered_gamma: bool, dtype: torch.dtype) -> None:
    norm = random_norm(kind, dtype, zero_centered_gamma=zero_centered_gamma)
    fuser = check_equal_to_unfused([Fork(), norm], make_input(5, 24, dtype=dtype), scale=4)
    assert backward_names(fuser) == [f"BackwardAdd{kind}"]
    assert forward_names(fuser) == ["MakeExtraOutput", kind]
    check_indices(fuser)


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_add_norm_frozen(kind: str, x_grad: bool) -> None:
    first, norm = te.ops.Bias(24), random_norm(kind)
    for _ in freezing_patterns([first.bias, *norm.parameters()]):
        check_equal_to_unfused([first, Fork(), norm], make_input(5, 24, requires_grad=x_grad))


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_add_norm_with_one_gradient(kind: str, used: int) -> None:
    norm = random_norm(kind)
    grads = []
    for fuse in (True, False):
        fuser = te.ops.OperationFuser([Fork(), norm], fuse=fuse)
        torch.manual_seed(0)
        x = make_input(5, 24)
        fuser(x)[used].square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_shapes() -> None:
    norm = random_norm("LayerNorm")
    for shape in [(24,), (2, 3, 24), (2, 1, 3, 24), (0, 24)]:
        fuser = check_equal_to_unfused([Fork(), norm, Fork(), Linear(24, 8)], make_input(*shape))
        assert backward_names(fuser) == ["BackwardAddLayerNorm", "BackwardLinearAdd", "Bias"]


def test_only_what_runs_in_backward_is_fused() -> None:
    """A frozen beginning stays as it is and keeps its place."""
    frozen, trained = Linear(24, 24), Linear(24, 16)
    frozen.requires_grad_(False)
    ops = [frozen, te.ops.GELU(), trained, te.ops.SiLU()]
    fuser = check_equal_to_unfused(ops, make_input(5, 24, requires_grad=False))
    assert backward_names(fuser) == [
        "BasicLinear",
        "Bias",
        "GELU",
        "BasicLinear",
        "BackwardActivationBias",
    ]
    check_indices(fuser)


def test_nothing_is_fused_where_the_first_trained_operation_is_inside() -> None:
    """The bias is frozen with all before it: its activation runs alone."""
    linear = Linear(24, 16).requires_grad_(False)
    ops = [linear, te.ops.GELU(), Linear(16, 4)]
    fuser = check_equal_to_unfused(ops, make_input(5, 24, requires_grad=False))
    assert "BackwardActivationBias" not in backward_names(fuser)


@pytest.mark.parametrize(
    "ops",
    [
        lambda: [te.ops.GELU(), te.ops.Bias(24)],
        lambda: [te.ops.Bias(24), te.ops.Identity(), te.ops.GELU()],
        lambda: [Linear(24, 24), te.ops.ConstantScale(2.0)],
        lambda: [te.ops.ConstantScale(2.0), te.ops.BasicLinear(24, 24)],
        lambda: [te.ops.LayerNorm(24), te.ops.BasicLinear(24, 24)],
        lambda: [te.ops.LayerNorm(24), Fork()],
        lambda: [Fork(), te.ops.L2Normalization()],
        lambda: [Fork(), te.ops.ConstantScale(2.0), te.ops.LayerNorm(24)],
        lambda: [te.ops.BasicLinear(24, 24), Fork(), te.ops.ConstantScale(2.0)],
    ],
)
def test_nothing_to_fuse(ops) -> None:
    fuser = check_equal_to_unfused(ops(), make_input(5, 24))
    assert len(fuser._backward_ops) == fuser._num_basic_ops


def test_scaled_activations_are_left_alone() -> None:
    fuser = check_equal_to_unfused(
        [te.ops.Bias(24), te.ops.ScaledSwiGLU()], make_input(5, 24), make_input(5)
    )
    assert backward_names(fuser) == ["Bias", "ScaledSwiGLU"]
