"""Operations and fused operations as users write them in Python, right ones, in every form."""

from __future__ import annotations

import torch
from reference import silu

import ligature as te

LINEAR_SILU = [te.ops.BasicLinear, te.ops.SiLU]


class ClassicScale(te.ops.BasicOperation):
    """Times a learnt number: everything in one method."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_parameter("scale", torch.nn.Parameter(torch.full((), 1.5, dtype=dtype)))

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(self.scale, input_)
        return self.scale * input_

    def op_backward(self, ctx, grad_output):
        scale, input_ = ctx.saved_tensors
        return scale * grad_output, ((input_ * grad_output).sum(),)


class SplitScale(ClassicScale):
    """The same in two halves."""

    def op_forward_compute(self, input_, *, requires_grad, **unused):
        return self.scale * input_, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, requires_grad, **unused):
        assert requires_grad
        assert tensors_to_save == ()
        ctx.save_for_backward(self.scale, input_)


def silu_grad(y: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    s = y.sigmoid()
    return grad * s * (1 + y * (1 - s))


class Base(te.ops.FusedOperation):
    def __init__(self, *ops: te.ops.FusibleOperation) -> None:
        super().__init__(ops)


class FilledForward(Base):
    """Forward only, as te.ops code does it: fills the contexts that the C++ backward reads."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        linear_ctx, silu_ctx = basic_op_ctxs
        weight = self.basic_ops[0].weight
        y = torch.nn.functional.linear(input_, weight)
        linear_ctx.save_for_backward(input_, weight)
        silu_ctx.save_for_backward(y)
        return torch.nn.functional.silu(y), [(), ()]


class SplitForward(Base):
    """The same in two halves; the activation's input is a fresh tensor, the rest is named."""

    def fuser_forward_compute(self, input_, *, requires_grad, **unused):
        assert len(requires_grad) == 2
        y = torch.nn.functional.linear(input_, self.basic_ops[0].weight)
        return torch.nn.functional.silu(y), [(), ()], [(), (y,)]

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        linear_ctx, silu_ctx = basic_op_ctxs
        linear_ctx.save_for_backward(input_, self.basic_ops[0].weight)
        silu_ctx.save_for_backward(*tensors_to_save[1])


class PiecesForward(Base):
    """Runs the halves of its basic operations."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x = input_
        for op, ctx in zip(self.basic_ops, basic_op_ctxs, strict=True):
            out, kept = op.op_forward_compute(x, requires_grad=ctx.requires_grad)
            if ctx.requires_grad:
                op.op_forward_save_ctx(ctx, x, kept, requires_grad=True)
            x = out
        return x, [() for _ in self.basic_ops]


class ReadingBackward(Base):
    """Backward only: reads what the C++ forward saved."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        assert list(basic_op_grad_extra_outputs) == [(), ()]
        linear_ctx, silu_ctx = basic_op_ctxs
        x, w = linear_ctx.saved_tensors
        (y,) = silu_ctx.saved_tensors
        dy = silu_grad(y, grad_output)
        dx = None if w is None else dy @ w
        dw = None if x is None else dy.flatten(0, -2).t() @ x.flatten(0, -2)
        return dx, [(dw,), ()], [(), ()]


class PiecesBackward(Base):
    """Runs the backwards of its basic operations."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        grads, dy = [], grad_output
        for op, ctx in reversed(list(zip(self.basic_ops, basic_op_ctxs, strict=True))):
            dy, params = op.op_backward(ctx, dy)
            grads.append(params)
        return dy, grads[::-1], [() for _ in grads]


class Joint(Base):
    """Both directions: saves input and weight only, and computes the linear's output again."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        weight = self.basic_ops[0].weight
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(input_, weight)
            basic_op_ctxs[1].note = "recompute"
        return silu(torch.nn.functional.linear(input_, weight)), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        assert basic_op_ctxs[1].note == "recompute"
        x, w = basic_op_ctxs[1].saved_tensors
        dy = silu_grad(x @ w.t(), grad_output)
        return dy @ w, [(dy.flatten(0, -2).t() @ x.flatten(0, -2),), ()], [(), ()]
