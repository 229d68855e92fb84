"""Fused operations written in Python: forward-only, backward-only and joint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from custom_support import (
    LINEAR_SILU,
    Base,
    FilledForward,
    Joint,
    PiecesBackward,
    PiecesForward,
    ReadingBackward,
    SplitForward,
    silu_grad,
)
from fusion_support import (
    backward_names,
    check_equal_to_unfused,
    check_indices,
    forward_names,
    freezing_patterns,
    saved_bytes,
)
from reference import FLOAT_DTYPES, assert_close, make_input, silu

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

KINDS: list[tuple[str, type]] = [
    ("forward", FilledForward),
    ("forward", SplitForward),
    ("forward", PiecesForward),
    ("backward", ReadingBackward),
    ("backward", PiecesBackward),
    ("joint", Joint),
]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("kind", "cls"), KINDS)
def test_instead_of_the_basic_operations(
    kind: str,
    cls: type,
    dtype: torch.dtype,
    registered: Any,
) -> None:
    registered(kind, te.ops.Fusion(LINEAR_SILU, cls), prepend=True)
    ops = [te.ops.GELU(), te.ops.Linear(8, 16, bias=False, dtype=dtype), te.ops.SiLU()]
    ops.append(te.ops.Linear(16, 4, dtype=dtype))
    fuser = check_equal_to_unfused(ops, make_input(5, 8, dtype=dtype), scale=4)
    assert (cls.__name__ in forward_names(fuser)) == (kind != "backward")
    assert (cls.__name__ in backward_names(fuser)) == (kind != "forward")
    check_indices(fuser)
    check_equal_to_unfused(ops, make_input(2, 3, 8, dtype=dtype), scale=4)
    with torch.no_grad():
        fuser(make_input(5, 8, dtype=dtype))


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize(("kind", "cls"), KINDS)
def test_frozen(kind: str, cls: type, x_grad: bool, registered: Any) -> None:
    registered(kind, te.ops.Fusion(LINEAR_SILU, cls), prepend=True)
    linear, after = te.ops.Linear(8, 16, bias=False), te.ops.Linear(16, 4)
    for _ in freezing_patterns([linear.weight, after.weight]):
        ops = [linear, te.ops.SiLU(), after]
        fuser = check_equal_to_unfused(ops, make_input(5, 8, requires_grad=x_grad))
        assert (cls.__name__ in forward_names(fuser)) == (kind != "backward")


@pytest.mark.parametrize("forward", [FilledForward, SplitForward, PiecesForward])
@pytest.mark.parametrize("backward", [ReadingBackward, PiecesBackward])
def test_two_independent_halves(forward: type, backward: type, registered: Any) -> None:
    registered("forward", te.ops.Fusion(LINEAR_SILU, forward), prepend=True)
    registered("backward", te.ops.Fusion(LINEAR_SILU, backward), prepend=True)
    ops = [te.ops.Linear(8, 16, bias=False), te.ops.SiLU()]
    fuser = check_equal_to_unfused(ops, make_input(5, 8))
    assert forward_names(fuser) == [forward.__name__]
    assert backward_names(fuser) == [backward.__name__]


def test_joint_fusion_used_planned_again_and_unregistered() -> None:
    linear = te.ops.Linear(8, 16, bias=False)
    model = te.ops.Sequential(linear, te.ops.SiLU())
    x = make_input(5, 8)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), x.grad.clone(), linear.weight.grad.clone()]

    wanted = step()
    plain_bytes = saved_bytes(model, x)
    with te.ops.register_forward_backward_fusion(te.ops.Fusion(LINEAR_SILU, Joint)):
        for _ in range(2):
            for a, b in zip(step(), wanted, strict=True):
                torch.testing.assert_close(a, b)
            fuser = model._module_groups[0]
            assert forward_names(fuser) == backward_names(fuser) == ["Joint"]
            assert fuser._forward_ops[0][0] is fuser._backward_ops[0][0]
            assert fuser._forward_ops[0][1] == fuser._backward_ops[0][1] == [0, 1]
            assert saved_bytes(model, x) == 0 < plain_bytes
            # Another registration makes all plans anew.
            with te.ops.register_forward_fusion(lambda ops, **unused: ops):
                step()
                assert forward_names(fuser) == ["Joint"]
        first = fuser._forward_ops[0][0]
        with torch.no_grad():
            model(x)
        assert fuser._forward_ops[0][0] is not first  # one instance per plan
    for a, b in zip(step(), wanted, strict=True):
        assert torch.equal(a, b)
    assert forward_names(model._module_groups[0]) == ["ForwardLinearBiasActivation"]


def test_with_extra_inputs_and_outputs(registered: Any) -> None:
    class ForkAdd(Base):
        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            assert basic_op_extra_inputs[0] == ()
            return input_ + basic_op_extra_inputs[1][0], [(input_,), ()]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            ((grad_fork,), ()) = basic_op_grad_extra_outputs
            return grad_output + grad_fork, [(), ()], [(), (grad_output,)]

    pattern = [te.ops.MakeExtraOutput, te.ops.AddExtraInput]
    registered("joint", te.ops.Fusion(pattern, ForkAdd))
    ops = [te.ops.SiLU(), te.ops.MakeExtraOutput(), te.ops.AddExtraInput(), te.ops.GELU()]
    fuser = check_equal_to_unfused(ops, make_input(5, 8), make_input(5, 8))
    assert forward_names(fuser) == backward_names(fuser) == ["SiLU", "ForkAdd", "GELU"]


def test_plain_state_of_a_fused_operation(registered: Any) -> None:
    class Stated(Base):
        def fuser_forward_compute(self, input_, **unused):
            return silu(2 * input_), [(), ()], [(), (2 * input_,)], [{"factor": 2.0}, {"n": 3}]

        def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
            assert basic_op_ctxs[0].factor == 2.0
            basic_op_ctxs[1].save_for_backward(*tensors_to_save[1])

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            (y,) = basic_op_ctxs[1].saved_tensors
            assert basic_op_ctxs[1].n == 3
            return basic_op_ctxs[0].factor * silu_grad(y, grad_output), [(), ()], [(), ()]

    registered("joint", te.ops.Fusion([te.ops.ConstantScale, te.ops.SiLU], Stated))
    fuser = check_equal_to_unfused([te.ops.ConstantScale(2.0), te.ops.SiLU()], make_input(5, 8))
    assert forward_names(fuser) == ["Stated"]


def test_missing_direction(registered: Any) -> None:
    """A fused operation in a pass that it does not implement."""
    handle = registered("backward", te.ops.Fusion(LINEAR_SILU, FilledForward), prepend=True)
    ops = [te.ops.Linear(8, 16, bias=False), te.ops.SiLU()]
    with pytest.raises((RuntimeError, AttributeError), match=r"FilledForward.*backward"):
        te.ops.OperationFuser(ops)(make_input(5, 8)).sum().backward()
    handle.unregister()
    registered("forward", te.ops.Fusion(LINEAR_SILU, ReadingBackward), prepend=True)
    with pytest.raises(RuntimeError, match=r"\[ReadingBackward\] has no forward pass"):
        te.ops.OperationFuser(ops)(make_input(5, 8))


def test_what_it_stands_for() -> None:
    linear, act = te.ops.Linear(8, 16), te.ops.SiLU()
    fused = Base(linear, act)
    assert list(fused.basic_ops) == [*linear.basic_ops, act]
    assert fused.is_fused_op
    assert list(Base(fused, te.ops.GELU()).basic_ops)[:3] == list(fused.basic_ops)
    with pytest.raises(ValueError, match=r"\[Base\] a fused operation stands for at least one"):
        Base()
    with pytest.raises(TypeError, match=r"\[Base\] basic_ops must be operations, got GELU"):
        Base(torch.nn.GELU())


def test_called_by_itself() -> None:
    """It runs its basic operations, fused as the registry says."""
    linear, act = te.ops.Linear(8, 16), te.ops.SiLU()
    fused = FilledForward(linear, act)
    x = make_input(5, 8)
    torch.testing.assert_close(fused(x), te.ops.Sequential(linear, act)(x))
    model = te.ops.Sequential(te.ops.GELU(), fused)
    torch.testing.assert_close(model(x), te.ops.Sequential(te.ops.GELU(), linear, act)(x))


def test_built_in_fused_classes_made_in_python(registered: Any) -> None:
    fused = te.ops.fused
    linear, act = te.ops.Linear(8, 16), te.ops.GELU()
    made = fused.ForwardLinearBiasActivation(linear, act)
    assert list(made.basic_ops) == [*linear.basic_ops, act]

    def fuse(ops, **unused):
        if [type(op) for op in ops[:2]] == [te.ops.Bias, te.ops.GELU]:
            return [fused.BackwardActivationBias(*ops[:2]), *ops[2:]]
        return ops

    registered("backward", fuse, prepend=True)
    bias = te.ops.Bias(8)
    fuser = check_equal_to_unfused([bias, te.ops.GELU()], make_input(5, 8))
    assert backward_names(fuser) == ["BackwardActivationBias"]
    with pytest.raises(ValueError, match=r"\[BackwardLinearScale\] cannot stand for \[GELU\]"):
        fused.BackwardLinearScale(te.ops.GELU())


def test_direct_calls_of_built_in_pieces() -> None:
    """Outside any fuser, with a context of one's own."""
    op, x = te.ops.LayerNorm(8), torch.randn(5, 8)
    torch.nn.init.normal_(op.weight)
    ctx = te.ops.OperationContext()
    out, kept = op.op_forward_compute(x, requires_grad=True)
    op.op_forward_save_ctx(ctx, x, kept, requires_grad=True)
    grad = torch.randn(5, 8)
    dx, (dw, db) = op.op_backward(ctx, grad)
    leaf = x.clone().requires_grad_()
    y = op(leaf)
    y.backward(grad)
    for got, wanted in [(out, y), (dx, leaf.grad), (dw, op.weight.grad), (db, op.bias.grad)]:
        assert_close(got, wanted, torch.float32)
    assert not out.requires_grad
