"""Scripts written for te.ops, of which only the import and the device are changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

import pytest
import torch

import ligature as te

HIDDEN, FFN, BATCH = 32, 64, 16


def layer_norm(x: torch.Tensor, norm: te.ops.LayerNorm) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (HIDDEN,), norm.weight, norm.bias)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.nn.functional.silu(a) * b


def test_mlp() -> None:
    mlp = te.ops.Sequential(
        te.ops.LayerNorm(HIDDEN),
        te.ops.Linear(HIDDEN, FFN),
        te.ops.SwiGLU(),
        te.ops.Linear(FFN // 2, HIDDEN),
    )
    x = torch.randn(BATCH, HIDDEN)
    y = mlp(x)
    assert y.shape == (BATCH, HIDDEN)
    linear = torch.nn.functional.linear
    h = swiglu(linear(layer_norm(x, mlp[0]), mlp[1].weight, mlp[1].bias))
    torch.testing.assert_close(y, linear(h, mlp[3].weight, mlp[3].bias))


def test_mlp_trains() -> None:
    mlp = te.ops.Sequential(
        te.ops.RMSNorm(HIDDEN),
        te.ops.Linear(HIDDEN, FFN),
        te.ops.GELU(),
        te.ops.Linear(FFN, HIDDEN),
    )
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-2)
    x, target = torch.randn(BATCH, HIDDEN), torch.randn(BATCH, HIDDEN)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(mlp(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_residual_in_two_sections() -> None:
    fc1 = te.ops.Sequential(
        te.ops.LayerNorm(HIDDEN),
        te.ops.MakeExtraOutput(),  # Output residual
        te.ops.Linear(HIDDEN, FFN),
        te.ops.SwiGLU(),
    )
    fc2 = te.ops.Sequential(
        te.ops.Linear(FFN // 2, HIDDEN),
        te.ops.AddExtraInput(),  # Add residual
    )
    x = torch.randn(BATCH, HIDDEN, requires_grad=True)
    y, residual = fc1(x)
    y = fc2(y, residual)
    y.square().sum().backward()
    got = x.grad.clone()

    x.grad = None
    linear = torch.nn.functional.linear
    h = layer_norm(x, fc1[0])
    z = linear(swiglu(linear(h, fc1[2].weight, fc1[2].bias)), fc2[0].weight, fc2[0].bias) + h
    z.square().sum().backward()
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(got, x.grad, rtol=1e-4, atol=1e-4)


class LearnableScale(te.ops.BasicOperation):
    def __init__(self) -> None:
        super().__init__()
        scale = torch.ones((), dtype=torch.float32)
        self.register_parameter("scale", torch.nn.Parameter(scale))

    def op_forward(self, ctx, input_: torch.Tensor, **unused) -> torch.Tensor:
        out = self.scale * input_
        ctx.save_for_backward(self.scale, input_)
        return out

    def op_backward(
        self,
        ctx,
        grad_output: torch.Tensor,
    ) -> tuple[torch.Tensor, Iterable[Optional[torch.Tensor]]]:  # noqa: UP045
        scale, input_ = ctx.saved_tensors
        grad_scale = torch.inner(input_.reshape(-1), grad_output.reshape(-1)).reshape(())
        grad_input = scale * grad_output
        return (
            grad_input,
            (grad_scale,),
        )


def test_custom_operation() -> None:
    scale = LearnableScale()
    model = te.ops.Sequential(te.ops.Linear(HIDDEN, HIDDEN), scale, te.ops.GELU())
    x = torch.randn(BATCH, HIDDEN, requires_grad=True)
    torch.nn.init.constant_(scale.scale, 2.0)
    y = model(x)
    y.sum().backward()
    got = scale.scale.grad.clone()
    scale.scale.grad = None
    h = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
    z = torch.nn.functional.gelu(scale.scale * h, approximate="tanh")
    z.sum().backward()
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(got, scale.scale.grad, rtol=1e-4, atol=1e-4)


class ForwardAxpy(te.ops.FusedOperation):
    calls = 0

    def __init__(self, scale: te.ops.ConstantScale, add: te.ops.AddExtraInput) -> None:
        super().__init__((scale, add))

    def fuser_forward(
        self,
        basic_op_ctxs: list,
        input_: torch.Tensor,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        **unused,
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
        ForwardAxpy.calls += 1
        scale_op, _ = self.basic_ops
        extra_input = basic_op_extra_inputs[1][0]
        out = scale_op.scale * input_ + extra_input
        return (
            out,
            [(), ()],
        )


def fuse_axpy_ops(
    ops: list[te.ops.FusibleOperation],
    **unused,
) -> list[te.ops.FusibleOperation]:
    out = []
    window, ops = ops[:2], ops[2:]
    while len(window) == 2:
        if isinstance(window[0], te.ops.ConstantScale) and isinstance(
            window[1], te.ops.AddExtraInput
        ):
            window = [ForwardAxpy(window[0], window[1])]
        else:
            out.append(window[0])
            window = window[1:]
        window, ops = window + ops[:1], ops[1:]
    out.extend(window + ops)
    return out


def test_fused_operation_and_registration() -> None:
    model = te.ops.Sequential(
        te.ops.SiLU(), te.ops.ConstantScale(3.0), te.ops.AddExtraInput(), te.ops.GELU()
    )
    x, extra = (torch.randn(BATCH, HIDDEN, requires_grad=True) for _ in range(2))
    handle = te.ops.register_forward_fusion(fuse_axpy_ops)
    try:
        ForwardAxpy.calls = 0
        y = model(x, extra)
        y.sum().backward()
        assert ForwardAxpy.calls == 1
        forward_ops = model._module_groups[0]._forward_ops
        backward_ops = model._module_groups[0]._backward_ops
        assert len(forward_ops) == 3
        assert isinstance(forward_ops[1][0], ForwardAxpy)
        assert forward_ops[1][1] == [1, 2]
        assert len(backward_ops) == 4
    finally:
        handle.unregister()
    got = [x.grad.clone(), extra.grad.clone()]
    x.grad = extra.grad = None
    z = torch.nn.functional.gelu(3 * torch.nn.functional.silu(x) + extra, approximate="tanh")
    z.sum().backward()
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(got, [x.grad, extra.grad], rtol=1e-4, atol=1e-5)


class JointLinearSiLU(te.ops.FusedOperation):
    """Saves less than its basic operations, since only its own backward reads it."""

    def __init__(self, *, linear: te.ops.BasicLinear, silu: te.ops.SiLU) -> None:
        super().__init__((linear, silu))

    def fuser_forward(
        self, basic_op_ctxs: list, input_: torch.Tensor, **unused
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        weight = self.basic_ops[0].weight
        dtype = weight.dtype
        y = torch.matmul(input_.double(), weight.double().T)
        out = torch.nn.functional.silu(y).to(dtype=dtype)
        linear_ctx = basic_op_ctxs[0]
        if linear_ctx.requires_grad:
            linear_ctx.save_for_backward(input_, weight)
            linear_ctx.dtype = dtype
        return out, [() for _ in range(2)]

    def fuser_backward(
        self, basic_op_ctxs: list, grad_output: torch.Tensor, **unused
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]], list[tuple[()]]]:
        linear_ctx = basic_op_ctxs[0]
        x, w = (t.double() for t in linear_ctx.saved_tensors)
        y = torch.matmul(x, w.T)
        s = torch.sigmoid(y)
        dy = grad_output.double() * s * (1 + y * (1 - s))
        dx = torch.matmul(dy, w).to(dtype=linear_ctx.dtype)
        dw = torch.matmul(dy.T, x).to(dtype=linear_ctx.dtype)
        return dx, [(dw,), ()], [(), ()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joint_fusion(dtype: torch.dtype) -> None:
    enabled = True

    def fuse_ops(ops, **unused):
        """Fuses the first time it is called, as a quick test may do it."""
        nonlocal enabled
        if enabled:
            enabled = False
            return [JointLinearSiLU(linear=ops[0], silu=ops[1]), *ops[2:]]
        return ops

    model = te.ops.Sequential(te.ops.Linear(HIDDEN, FFN, bias=False, dtype=dtype), te.ops.SiLU())
    x = torch.randn(BATCH, HIDDEN, dtype=dtype, requires_grad=True)
    with te.ops.register_forward_backward_fusion(fuse_ops):
        y = model(x)
        y.sum().backward()
        forward_ops = model._module_groups[0]._forward_ops
        backward_ops = model._module_groups[0]._backward_ops
        assert len(forward_ops) == 1
        assert len(backward_ops) == 1
        assert isinstance(forward_ops[0][0], JointLinearSiLU)
        assert forward_ops[0][0] is backward_ops[0][0]
    x64 = x.detach().double().requires_grad_()
    w64 = model[0].weight.detach().double().requires_grad_()
    z = torch.nn.functional.silu(x64 @ w64.t())
    z.sum().backward()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(y, z.to(dtype), **tolerance)
    torch.testing.assert_close(x.grad, x64.grad.to(dtype), **tolerance)
    torch.testing.assert_close(model[0].weight.grad, w64.grad.to(dtype), **tolerance)
