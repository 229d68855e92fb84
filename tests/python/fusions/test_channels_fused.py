"""Fused operations of users that cover both ends of a channel, and what they may leave out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from reference import make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

MakeExtraOutput, AddExtraInput = te.ops.MakeExtraOutput, te.ops.AddExtraInput
PATTERN = [MakeExtraOutput, te.ops.ConstantScale, AddExtraInput]


class Residual(te.ops.FusedOperation):
    """``(1 + s) x``: nothing of the channel leaves it."""

    #: What it returns for the channel: None, the tensor, or nothing at all.
    given: Any = staticmethod(lambda x: (None,))

    def __init__(self, *ops: te.ops.FusibleOperation) -> None:
        super().__init__(ops)
        self.seen: list[Any] = []

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        self.seen.append(basic_op_extra_inputs)
        return (1 + self.basic_ops[1].scale) * input_, [self.given(input_), (), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        self.seen.append(basic_op_grad_extra_outputs)
        dx = (1 + self.basic_ops[1].scale) * grad_output
        if basic_op_grad_extra_outputs[0][0] is not None:
            dx = dx + basic_op_grad_extra_outputs[0][0]
        return dx, [(), (), ()], [(), (), (self.inner_grad(grad_output),)]

    inner_grad: Any = staticmethod(lambda grad: None)


def branch(*, to_caller: bool = False) -> tuple[Any, Any]:
    fork, join = MakeExtraOutput(), AddExtraInput()
    fork.set_extra_output_channel(0, "r", output_to_caller=to_caller)
    join.set_extra_input_channel(0, "r")
    return fork, join


def variant(**changes: Any) -> type[Residual]:
    static = {name: staticmethod(value) for name, value in changes.items()}
    return type("Residual", (Residual,), static)


@pytest.mark.parametrize("kind", ["joint", "forward", "backward"])
@pytest.mark.parametrize("as_function", [True, False])
@pytest.mark.parametrize("given", ["None", "tensor", "nothing"])
def test_covers_both_ends(kind: str, as_function: bool, given: str, registered: Any) -> None:
    """Without a word about it; in one direction or in both."""
    outputs = {"None": lambda x: (None,), "tensor": lambda x: (x,), "nothing": lambda x: ()}
    cls = variant(given=outputs[given])
    if as_function:
        registered(kind, lambda ops, **unused: [ops[0], cls(*ops[1:4]), *ops[4:]])
    else:
        registered(kind, te.ops.Fusion(PATTERN, cls))
    fork, join = branch()
    ops = [te.ops.SiLU(), fork, te.ops.ConstantScale(3.0), join, te.ops.SiLU()]
    fuser = te.ops.OperationFuser(ops)
    x = make_input(3, 8)
    y = fuser(x)
    y.sum().backward()
    forward = [op for op, _ in fuser._forward_ops if isinstance(op, cls)]
    backward = [op for op, _ in fuser._backward_ops if isinstance(op, cls)]
    assert (len(forward), len(backward)) == (kind != "backward", kind != "forward")
    assert isinstance(y, torch.Tensor)
    if forward:
        assert forward[0].seen[0] == [(), (), (None,)]
    silu = torch.nn.functional.silu
    leaf = x.detach().requires_grad_()
    wanted = silu(4 * silu(leaf))
    wanted.sum().backward()
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(x.grad, leaf.grad)


@pytest.mark.parametrize("kind", ["joint", "backward"])
def test_a_gradient_of_the_inner_end_is_its_own_business(kind: str, registered: Any) -> None:
    """It has been dealt with inside: what is returned for it is not added to anything."""
    registered(kind, te.ops.Fusion(PATTERN, variant(inner_grad=lambda grad: 100 * grad)))
    fork, join = branch()
    x = make_input(3, 8)
    te.ops.OperationFuser([fork, te.ops.ConstantScale(3.0), join])(x).sum().backward()
    assert (x.grad == 4).all()


@pytest.mark.parametrize("kind", ["joint", "forward"])
def test_public_output_must_be_there(kind: str, registered: Any) -> None:
    for given in (lambda x: (None,), lambda x: ()):
        handle = registered(kind, te.ops.Fusion(PATTERN, variant(given=given)))
        fork, join = branch(to_caller=True)
        fuser = te.ops.OperationFuser([fork, te.ops.ConstantScale(3.0), join])
        message = (
            "[Residual] returned None as extra output 0 of MakeExtraOutput (operation 0), which is "
            "public: it is returned to the caller"
        )
        with pytest.raises(RuntimeError, match=re.escape(message)):
            fuser(make_input(3, 8))
        handle.unregister()


@pytest.mark.parametrize("kind", ["joint", "forward"])
def test_output_for_others_must_be_there(kind: str, registered: Any) -> None:
    registered(kind, te.ops.Fusion(PATTERN, Residual))
    fork, join = branch()
    other = AddExtraInput()
    other.set_extra_input_channel(0, "r")
    fuser = te.ops.OperationFuser([fork, te.ops.ConstantScale(3.0), join, te.ops.SiLU(), other])
    message = (
        "[Residual] returned None as extra output 0 of MakeExtraOutput (operation 0), which is "
        "consumed outside its fusion, by AddExtraInput (operation 4)"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fuser(make_input(3, 8))


def test_output_for_others_and_for_itself(registered: Any) -> None:
    """The gradient of the other end arrives, and only that."""
    cls = variant(given=lambda x: (x * 1,))
    registered("joint", te.ops.Fusion(PATTERN, cls))
    fork, join = branch(to_caller=True)
    other = AddExtraInput()
    other.set_extra_input_channel(0, "r")
    fuser = te.ops.OperationFuser([fork, te.ops.ConstantScale(3.0), join, te.ops.SiLU(), other])
    x = make_input(3, 8)
    y, extra = fuser(x)
    (y.sum() + 5 * extra.sum()).backward()
    leaf = x.detach().requires_grad_()
    (torch.nn.functional.silu(4 * leaf) + leaf + 5 * leaf).sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad)


def test_one_that_declines(registered: Any) -> None:
    """It may say that it does not run a channel inside itself."""

    class Declines(Residual):
        handles_internal_channels = False

    registered("joint", te.ops.Fusion(PATTERN, Declines, name="mine"))
    fork, join = branch()
    fuser = te.ops.OperationFuser([fork, te.ops.ConstantScale(3.0), join])
    x = make_input(3, 8)
    torch.testing.assert_close(fuser(x), 4 * x)
    assert len(fuser._forward_ops) == 3
    assert "it does not run a channel inside itself" in str(fuser.explain())


def test_check_fusion_takes_it() -> None:
    fork, join = branch()
    te.testing.check_fusion(
        te.ops.Fusion(PATTERN, Residual),
        [fork, te.ops.ConstantScale(3.0), join],
        shapes=[(5, 8)],
        kind="joint",
    )


@pytest.mark.parametrize("shape", [1, 2])
def test_wrong_number_of_outputs(shape: int, registered: Any) -> None:
    """None stands for an output; a list of another length is wrong whatever the output is for."""
    registered("joint", te.ops.Fusion(PATTERN, variant(given=lambda x: (x,) * (shape + 1))))
    fork, join = branch()
    fuser = te.ops.OperationFuser([fork, te.ops.ConstantScale(3.0), join])
    with pytest.raises(RuntimeError, match=f"must give 1 extra outputs, got {shape + 1}"):
        fuser(make_input(3, 8))
