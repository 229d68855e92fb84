"""Residual blocks, and the in-place variants of the operations that branch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from fusion_support import (
    backward_names,
    check_equal_to_unfused,
    check_indices,
    forward_names,
    freezing_patterns,
)
from reference import FLOAT_DTYPES, assert_close, check_against_reference, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

Linear = te.ops.Linear


def channel(fork: te.ops.MakeExtraOutput, join: te.ops.AddExtraInput, name: str) -> None:
    fork.set_extra_output_channel(0, name, output_to_caller=False)
    join.set_extra_input_channel(0, name)


def residual_block(dtype: torch.dtype = torch.float32, norm: str = "RMSNorm") -> list:
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    channel(fork, join, "residual")
    return [
        fork,
        getattr(te.ops, norm)(24, dtype=dtype),
        Linear(24, 32, dtype=dtype),
        te.ops.SwiGLU(),
        Linear(16, 24, dtype=dtype),
        join,
    ]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm"])
def test_residual_block(norm: str, dtype: torch.dtype, device: str) -> None:
    x = make_input(5, 24, dtype=dtype)
    fuser = check_equal_to_unfused(residual_block(dtype, norm), x, scale=4)
    assert forward_names(fuser) == [
        "MakeExtraOutput",
        norm,
        "ForwardLinearBiasActivation",
        "ForwardLinearBiasAdd",
    ]
    in_the_product = device == "cuda" and dtype == torch.bfloat16
    assert backward_names(fuser) == [
        f"BackwardAdd{norm}",
        "BasicLinear",
        "BackwardActivationBias",
        *(["BackwardLinearBias"] if in_the_product else ["BasicLinear", "Bias"]),
        "AddExtraInput",
    ]
    check_indices(fuser)


@pytest.mark.parametrize("x_grad", [True, False])
def test_residual_block_frozen(x_grad: bool) -> None:
    ops = residual_block()
    parameters = [p for op in ops for p in op.parameters()]
    for _ in freezing_patterns(parameters):
        fuser = check_equal_to_unfused(ops, make_input(3, 24, requires_grad=x_grad))
        assert forward_names(fuser)[-1] == "ForwardLinearBiasAdd"


def test_residual_block_against_float64() -> None:
    model = te.ops.Sequential(*residual_block(), *residual_block(norm="LayerNorm")[1:5])
    check_against_reference(model, make_input(5, 24), scale=3)


def test_fork_at_a_linear() -> None:
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    channel(fork, join, "r")
    ops = [te.ops.LayerNorm(24), fork, Linear(24, 24), te.ops.GELU(), Linear(24, 24), join]
    fuser = check_equal_to_unfused(ops, make_input(5, 24))
    assert "BackwardLinearAdd" in backward_names(fuser)


def test_a_channel_inside_a_fusion_is_left_alone() -> None:
    """ForwardLinearBiasAdd may not cover both ends: the sum would be of what it has not made."""
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    channel(fork, join, "r")
    fuser = check_equal_to_unfused([fork, join], make_input(5, 24))
    assert forward_names(fuser) == ["MakeExtraOutput", "AddExtraInput"]
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    channel(fork, join, "r")
    fuser = check_equal_to_unfused([fork, te.ops.BasicLinear(24, 24), join], make_input(5, 24))
    assert forward_names(fuser) == ["MakeExtraOutput", "ForwardLinearBiasAdd"]
    assert backward_names(fuser) == ["BackwardLinearAdd", "AddExtraInput"]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("before", ["nothing", "BasicLinear", "Linear", "scaled"])
def test_add_in_place_writes_into_the_extra_input(before: str, dtype: torch.dtype) -> None:
    ops = {
        "nothing": [],
        "BasicLinear": [te.ops.BasicLinear(24, 24, dtype=dtype)],
        "Linear": [Linear(24, 24, dtype=dtype)],
        "scaled": [te.ops.BasicLinear(24, 24, dtype=dtype), te.ops.ConstantScale(0.5)],
    }[before]
    x, base = make_input(5, 24, dtype=dtype), make_input(5, 24, dtype=dtype)
    results = []
    for in_place in (False, True):
        extra = base.clone()  # no leaf, so it may be written to
        address, version = extra.data_ptr(), extra._version
        fuser = te.ops.OperationFuser([*ops, te.ops.AddExtraInput(in_place=in_place)])
        y = fuser(x, extra)
        assert (y.data_ptr() == address) == in_place
        assert (extra._version > version) == in_place
        grad_x, grad_base = torch.autograd.grad(y, [x, base], torch.ones_like(y))
        results.append((y.detach().clone(), grad_x, grad_base))
    for a, b in zip(*results, strict=True):
        assert_close(a, b, dtype)


def test_add_in_place_takes_the_dtype_of_the_extra_input() -> None:
    x, extra = make_input(5, 24, dtype=torch.bfloat16), torch.randn(5, 24)
    wanted = extra + x.float()
    y = te.ops.AddExtraInput(in_place=True)(x, extra)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, wanted)
    y.sum().backward()
    assert x.grad.dtype is torch.bfloat16
    linear = Linear(24, 24, dtype=torch.bfloat16)
    extra = torch.randn(5, 24)
    wanted = extra + linear(x).float()
    y = te.ops.Sequential(linear, te.ops.AddExtraInput(in_place=True))(x, extra)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, wanted, rtol=0.03, atol=0.03)  # the bias is rounded or not
    assert torch.equal(y, extra)


@pytest.mark.parametrize("with_linear", [True, False])
def test_add_in_place_into_a_strided_extra_input(with_linear: bool) -> None:
    ops = [Linear(24, 24)] if with_linear else []
    fuser = te.ops.OperationFuser([*ops, te.ops.AddExtraInput(in_place=True)])
    plain = te.ops.OperationFuser([*ops, te.ops.AddExtraInput()])
    x = make_input(5, 24)
    for make in (lambda: torch.randn(24, 5).t(), lambda: torch.randn(5, 48)[:, ::2]):
        torch.manual_seed(0)
        extra = make()
        wanted = plain(x, extra.clone())
        y = fuser(x, extra)
        torch.testing.assert_close(y, wanted)
        assert torch.equal(extra, y)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("after", ["nothing", "GELU", "MakeExtraOutput"])
@pytest.mark.parametrize("before", ["nothing", "Linear", "scaled"])
def test_add_in_place_into_a_leaf_that_needs_a_gradient(
    before: str, after: str, view: bool
) -> None:
    """Its values are overwritten, and its gradient is that of the values before."""
    ops = {
        "nothing": [],
        "Linear": [Linear(24, 24)],
        "scaled": [te.ops.BasicLinear(24, 24), te.ops.ConstantScale(0.5)],
    }[before]
    rest = [] if after == "nothing" else [getattr(te.ops, after)()]
    x, values = make_input(5, 24), torch.randn(10, 24)
    results = []
    for in_place in (False, True):
        leaf = values.clone().requires_grad_()
        extra = leaf[::2] if view else leaf
        before_call = extra.detach().clone()
        address, version = leaf.data_ptr(), leaf._version
        fuser = te.ops.OperationFuser([*ops, te.ops.AddExtraInput(in_place=in_place), *rest])
        inputs = [x[:5], extra] if view else [torch.cat([x, x]), extra]
        y = fuser(*inputs)
        outputs = y if isinstance(y, tuple) else (y,)
        assert (leaf._version > version) == in_place
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert leaf.data_ptr() == address
        assert all(out.requires_grad and not out.is_leaf for out in outputs)
        summed = extra.detach() if in_place else extra.detach() + fuser_sum(ops, inputs[0])
        torch.testing.assert_close(summed, before_call + fuser_sum(ops, inputs[0]))
        sum((k + 2) * out.square().sum() for k, out in enumerate(outputs)).backward()
        results.append([*(out.detach().clone() for out in outputs), x.grad, leaf.grad])
        x.grad = None
    for a, b in zip(*results, strict=True):
        assert_close(a, b, torch.float32)


def fuser_sum(ops: list, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return te.ops.OperationFuser(ops)(x) if ops else x


def test_add_in_place_into_a_leaf_without_gradients() -> None:
    fuser = te.ops.OperationFuser([te.ops.AddExtraInput(in_place=True)])
    x, leaf = make_input(5, 24), make_input(5, 24)
    before = leaf.detach().clone()
    with torch.no_grad():
        y = fuser(x, leaf)
    assert leaf.requires_grad
    torch.testing.assert_close(leaf.detach(), before + x.detach())
    torch.testing.assert_close(y, leaf)


def test_add_in_place_into_a_leaf_is_seen_by_version_counters() -> None:
    leaf = make_input(5, 24)
    loss = leaf.square().sum()
    y = te.ops.AddExtraInput(in_place=True)(torch.randn(5, 24), leaf)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    leaf.grad = None
    z = te.ops.Sequential(te.ops.AddExtraInput(in_place=True), te.ops.SiLU())(y.detach(), leaf)
    with torch.no_grad():
        leaf.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_an_optimizer_steps_a_leaf_that_was_overwritten() -> None:
    leaf = make_input(5, 24)
    optimizer = torch.optim.SGD([leaf], lr=0.5)
    y = te.ops.AddExtraInput(in_place=True)(torch.ones(5, 24), leaf)
    summed = leaf.detach().clone()
    y.sum().backward()
    assert (leaf.grad == 1).all()
    optimizer.step()
    torch.testing.assert_close(leaf.detach(), summed - 0.5)


def test_add_in_place_over_what_backward_needs() -> None:
    linear = Linear(24, 24)
    x = torch.randn(5, 24)
    before = x.clone()
    model = te.ops.Sequential(linear, te.ops.AddExtraInput(in_place=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x, x)
    assert torch.equal(x, before)
    linear.requires_grad_(False)
    torch.testing.assert_close(model(x, x), linear(before) + before)

    other = te.ops.OperationFuser([te.ops.SiLU(), te.ops.AddExtraInput(in_place=True)])
    y = torch.randn(5, 24, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other(y, y).sum().backward()


def test_add_in_place_invalidates_what_others_saved() -> None:
    extra = make_input(5, 24) * 1
    loss = extra.square().sum()
    te.ops.AddExtraInput(in_place=True)(torch.randn(5, 24), extra)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("after", ["Identity", "BasicLinear", "LayerNorm", "Linear"])
@pytest.mark.parametrize("in_place", [False, True])
def test_make_extra_output_in_place(after: str, in_place: bool) -> None:
    sizes = {"Identity": (), "BasicLinear": (24, 16), "LayerNorm": (24,), "Linear": (24, 16)}
    op = getattr(te.ops, after)(*sizes[after])
    fuser = te.ops.OperationFuser([te.ops.MakeExtraOutput(in_place=in_place), op])
    plain = te.ops.OperationFuser([te.ops.MakeExtraOutput(), op], fuse=False)
    x = make_input(5, 24)
    grads = []
    for run in (fuser, plain):
        y, extra = run(x)
        parameters = list(op.parameters())
        loss = (y * y.detach().cos()).sum() + (extra * extra.detach().sin()).sum()
        grads.append(torch.autograd.grad(loss, [x, *parameters]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_make_extra_output_in_place_adds_into_the_gradient() -> None:
    """That is what in_place means: the memory of the extra output's gradient is used."""
    for after, in_place in product([te.ops.Identity(), te.ops.BasicLinear(24, 24)], [True, False]):
        fuser = te.ops.OperationFuser([te.ops.MakeExtraOutput(in_place=in_place), after])
        y, extra = fuser(make_input(5, 24))
        grad = torch.ones(5, 24)
        torch.autograd.backward([y, extra], [torch.ones(5, 24), grad])
        assert torch.equal(grad, torch.ones(5, 24)) != in_place


def test_make_extra_output_in_place_leaves_shared_gradients() -> None:
    """An expanded gradient, or one that is the output's gradient too, has no memory of its own."""
    fuser = te.ops.OperationFuser([te.ops.MakeExtraOutput(in_place=True), te.ops.Identity()])
    x = make_input(5, 24)
    y, extra = fuser(x)
    (y.sum() + extra.sum()).backward()
    assert (x.grad == 2).all()
    shared = torch.ones(5, 24)
    x.grad = None
    torch.autograd.backward(list(fuser(x)), [shared, shared])
    assert (x.grad == 2).all()
    assert (shared == 1).all()
