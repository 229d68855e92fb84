"""Fusions of the forward pass: where they fire, where not, and that they change no result."""

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
from reference import ACTIVATIONS, FLOAT_DTYPES, GLU_ACTIVATIONS, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

Linear, GELU, Add = te.ops.Linear, te.ops.GELU, te.ops.AddExtraInput


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_bias_activation(activation: str, bias: bool, dtype: torch.dtype) -> None:
    ops = [Linear(24, 16, bias=bias, dtype=dtype), getattr(te.ops, activation)()]
    fuser = check_equal_to_unfused(ops, make_input(5, 24, dtype=dtype))
    assert forward_names(fuser) == ["ForwardLinearBiasActivation"]
    check_indices(fuser)


def test_bias_activation_options() -> None:
    for activation in (
        te.ops.SwiGLU(glu_interleave_size=4),
        te.ops.ClampedSwiGLU(limit=0.3, glu_interleave_size=2),
        te.ops.SiTUGLU(beta1=0.5),
    ):
        for shape in [(24,), (2, 3, 24), (0, 24)]:
            bias = te.ops.Bias(24)
            torch.nn.init.normal_(bias.bias)
            fuser = check_equal_to_unfused([bias, activation], make_input(*shape))
            fused = torch.get_default_device().type == "cpu"
            assert (forward_names(fuser) == ["ForwardBiasActivation"]) == fused


@pytest.mark.parametrize("activation", [GELU, te.ops.SwiGLU])
def test_bias_activation_without_gradients(activation: type) -> None:
    bias = te.ops.Bias(24)
    torch.nn.init.normal_(bias.bias)
    ops = [bias, activation()]
    fused, plain = te.ops.OperationFuser(ops), te.ops.OperationFuser(ops, fuse=False)
    x = make_input(5, 24)
    with torch.no_grad():
        assert torch.equal(fused(x), plain(x))
    with torch.autocast(x.device.type, torch.bfloat16):
        y = fused(x)
        assert y.dtype is torch.bfloat16
        assert torch.equal(y, plain(x))


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
def test_bias_activation_with_its_input_in_fp8(activation: str) -> None:
    ops = [te.ops.Bias(24), getattr(te.ops, activation)(cache_quantized_input=True)]
    check_equal_to_unfused(ops, make_input(5, 24))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
def test_linear_bias_activation_without_gradients(activation: str, bias: bool) -> None:
    ops = [Linear(24, 16, bias=bias), getattr(te.ops, activation)()]
    fused, plain = te.ops.OperationFuser(ops), te.ops.OperationFuser(ops, fuse=False)
    x = make_input(5, 24)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), plain(x))
    assert forward_names(fused) == ["ForwardLinearBiasActivation"]
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), plain(x))


def test_linear_bias_activation_shapes_and_options() -> None:
    for shape in [(24,), (2, 3, 24), (2, 1, 3, 24), (0, 24)]:
        fuser = check_equal_to_unfused([Linear(24, 16), te.ops.SwiGLU()], make_input(*shape))
        assert forward_names(fuser) == ["ForwardLinearBiasActivation"]
    for activation in (
        te.ops.SwiGLU(glu_interleave_size=4),
        te.ops.ClampedSwiGLU(limit=0.3, glu_interleave_size=2),
        te.ops.SiTUGLU(beta1=0.5),
    ):
        fuser = check_equal_to_unfused([Linear(24, 16), activation], make_input(5, 24))
        assert forward_names(fuser) == ["ForwardLinearBiasActivation"]
    strided = torch.randn(24, 5).t().requires_grad_()
    check_equal_to_unfused([Linear(24, 16), GELU()], strided)


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("activation", ["GELU", "GEGLU"])
def test_linear_bias_activation_frozen(activation: str, x_grad: bool) -> None:
    linear = Linear(24, 16)
    ops = [linear, getattr(te.ops, activation)()]
    for _ in freezing_patterns([linear.weight, linear.bias]):
        check_equal_to_unfused(ops, make_input(5, 24, requires_grad=x_grad))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_bias_add(bias: bool, in_place: bool, dtype: torch.dtype) -> None:
    ops = [Linear(24, 16, bias=bias, dtype=dtype), Add(in_place=in_place)]
    x = make_input(5, 24, dtype=dtype)
    extra = make_input(5, 16, dtype=dtype, requires_grad=not in_place)
    fuser = check_equal_to_unfused(ops, x, extra)
    assert forward_names(fuser) == ["ForwardLinearBiasAdd"]
    check_indices(fuser)


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("extra_grad", [True, False])
def test_linear_bias_add_frozen(x_grad: bool, extra_grad: bool) -> None:
    linear = Linear(24, 16)
    for _ in freezing_patterns([linear.weight, linear.bias]):
        x = make_input(5, 24, requires_grad=x_grad)
        check_equal_to_unfused([linear, Add()], x, make_input(5, 16, requires_grad=extra_grad))


def test_linear_bias_add_with_another_dtype() -> None:
    fuser = check_equal_to_unfused(
        [Linear(24, 16, dtype=torch.bfloat16), Add()],
        make_input(5, 24, dtype=torch.bfloat16),
        make_input(5, 16, dtype=torch.float32),
    )
    assert forward_names(fuser) == ["ForwardLinearBiasAdd"]
    strided = torch.randn(16, 5).t().requires_grad_()
    check_equal_to_unfused([Linear(24, 16), Add()], make_input(5, 24), strided)
    check_equal_to_unfused([Linear(24, 16), Add()], make_input(2, 0, 24), make_input(2, 0, 16))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("scale", [-1.5, 0.0])
def test_linear_scale_add(scale: float, in_place: bool, dtype: torch.dtype) -> None:
    ops = [
        Linear(24, 16, bias=False, dtype=dtype),
        te.ops.ConstantScale(scale),
        Add(in_place=in_place),
    ]
    x = make_input(5, 24, dtype=dtype)
    extra = make_input(5, 16, dtype=dtype, requires_grad=not in_place)
    fuser = check_equal_to_unfused(ops, x, extra)
    assert forward_names(fuser) == ["ForwardLinearScaleAdd"]
    assert backward_names(fuser) == ["BackwardLinearScale", "AddExtraInput"]
    check_indices(fuser)


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("extra_grad", [True, False])
def test_linear_scale_add_frozen(x_grad: bool, extra_grad: bool) -> None:
    linear = te.ops.BasicLinear(24, 16)
    for _ in freezing_patterns([linear.weight]):
        check_equal_to_unfused(
            [linear, te.ops.ConstantScale(0.3), Add()],
            make_input(5, 24, requires_grad=x_grad),
            make_input(5, 16, requires_grad=extra_grad),
        )


def test_separate_basic_operations_fuse_like_the_composite() -> None:
    bias = te.ops.Bias(16)
    torch.nn.init.normal_(bias.bias)
    fuser = check_equal_to_unfused([te.ops.BasicLinear(24, 16), bias, GELU()], make_input(5, 24))
    assert forward_names(fuser) == ["ForwardLinearBiasActivation"]


def test_several_in_a_row() -> None:
    ops = [Linear(24, 32), te.ops.SwiGLU(), Linear(16, 24), Add(), Linear(24, 8), GELU()]
    fuser = check_equal_to_unfused(ops, make_input(5, 24), make_input(5, 24))
    assert forward_names(fuser) == [
        "ForwardLinearBiasActivation",
        "ForwardLinearBiasAdd",
        "ForwardLinearBiasActivation",
    ]
    check_indices(fuser)


@pytest.mark.parametrize(
    "ops",
    [
        lambda: [Linear(24, 24, bias=False), te.ops.Dropout(0.0), te.ops.Bias(24)],
        lambda: [GELU(), Linear(24, 24, bias=False)],
        lambda: [Linear(24, 24, bias=False), te.ops.ConstantScale(2.0)],
        lambda: [Linear(24, 24, bias=False), te.ops.Identity(), GELU()],
        lambda: [te.ops.LayerNorm(24), Linear(24, 24, bias=False)],
    ],
)
def test_nothing_to_fuse(ops) -> None:
    fuser = check_equal_to_unfused(ops(), make_input(5, 24))
    assert len(fuser._forward_ops) == fuser._num_basic_ops


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(
    "more",
    [
        lambda: [],
        lambda: [te.ops.Dropout(0.0), GELU()],
        lambda: [te.ops.Bias(16), GELU()],
        lambda: [te.ops.ConstantScale(2.0)],
    ],
)
def test_linear_and_bias_without_an_activation(more, dtype: torch.dtype) -> None:
    ops = [Linear(24, 16, dtype=dtype), *(op.to(dtype) for op in more())]
    fuser = check_equal_to_unfused(ops, make_input(5, 24, dtype=dtype))
    assert forward_names(fuser)[0] == "ForwardLinearBiasActivation"
    assert fuser._forward_ops[0][1] == [0, 1]
    check_indices(fuser)


def test_other_patterns_with_an_extra_input_are_left_alone() -> None:
    x, extra = make_input(5, 24), make_input(5, 24)
    fuser = check_equal_to_unfused([Linear(24, 24), te.ops.ConstantScale(2.0), Add()], x, extra)
    assert forward_names(fuser) == ["ForwardLinearBiasActivation", "ConstantScale", "AddExtraInput"]
    fuser = check_equal_to_unfused([Linear(24, 24), te.ops.ScaledSwiGLU()], x, make_input(5))
    assert forward_names(fuser) == ["ForwardLinearBiasActivation", "ScaledSwiGLU"]
    fuser = check_equal_to_unfused([Add(), Linear(24, 24)], x, extra)
    assert forward_names(fuser) == ["AddExtraInput", "ForwardLinearBiasActivation"]


def test_every_reason_is_told() -> None:
    fuser = te.ops.OperationFuser([Linear(24, 24), te.ops.Dropout(0.0), GELU()])
    fuser(make_input(5, 24))
    told = [row for row in fuser._considered if row[1] == "ForwardLinearBiasActivation"]
    assert told == [
        ("forward", "ForwardLinearBiasActivation", 0, "wanted an activation, found Dropout")
    ]
    fuser = te.ops.OperationFuser([Linear(24, 24), GELU()])
    fuser(make_input(5, 24))
    assert ("forward", "ForwardLinearBiasActivation", 0, "") in fuser._considered


def test_a_hook_on_an_operation_keeps_it_out_of_fusions() -> None:
    seen = []
    model = te.ops.Sequential(Linear(24, 16), GELU())
    x = make_input(5, 24)
    wanted = model(x)
    assert forward_names(model._module_groups[0]) == ["ForwardLinearBiasActivation"]
    handle = model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    got = model(x)
    assert len(seen) == 1
    torch.testing.assert_close(got, wanted)
    handle.remove()
    model(x)
    assert len(seen) == 1
    assert forward_names(model._module_groups[0]) == ["ForwardLinearBiasActivation"]


def test_all_activations_are_covered() -> None:
    """A new activation in the package must be in the tables of these tests."""
    known = {name for name in te.ops.__all__ if name.endswith(("LU", "GLU"))}
    assert {n for n in known if not n.startswith("Scaled")} == set(ACTIVATIONS)
    assert set(GLU_ACTIVATIONS) <= set(ACTIVATIONS)
