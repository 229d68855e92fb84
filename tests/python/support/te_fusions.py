"""Forward-only fusions as te.ops scripts write them: forwards in plain torch that fill the contexts
by te.ops' conventions, for the backward of the built-in operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import ligature as te

Tensor = torch.Tensor


def linear(op: Any, ctx: Any, x: Tensor) -> Tensor:
    w = op.weight
    if ctx.requires_grad:
        ctx.save_for_backward(x, w)
        ctx.with_quantized_compute = False
        ctx.input_quantizer = None
        ctx.weight_quantizer = None
        ctx.grad_output_quantizer = None
        ctx.grad_input_quantizer = None
        ctx.dtype = w.dtype
        ctx.input_requires_grad = ctx.requires_grad
        ctx.weight_requires_grad = ctx.requires_grad and w.requires_grad
    return F.linear(x.to(w.dtype), w)


def bias(op: Any, ctx: Any, x: Tensor) -> Tensor:
    if ctx.requires_grad:
        ctx.grad_input_quantizer = None
    return x + op.bias


def _gate(function: Any) -> Any:
    def gated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return function(a) * b

    return gated


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Any] = {
    "GELU": gelu,
    "GEGLU": _gate(gelu),
    "ReLU": F.relu,
    "ReGLU": _gate(F.relu),
    "SReLU": srelu,
    "SiLU": F.silu,
    "SwiGLU": _gate(F.silu),
}


def activation(op: Any, ctx: Any, x: Tensor) -> Tensor:
    x = x.contiguous()
    if ctx.requires_grad:
        ctx.save_for_backward(x)
        ctx.dtype = x.dtype
        ctx.prev_op_grad_output_quantizer = None
    return ACTIVATIONS[type(op).__name__](x)


def scaled_activation(op: Any, ctx: Any, x: Tensor, scales: Tensor) -> Tensor:
    if ctx.requires_grad:
        ctx.input_requires_grad = True
        ctx.extra_input_requires_grad = scales.requires_grad
        ctx.dtype = x.dtype
        ctx.save_for_backward(x, scales if ctx.input_requires_grad else None)
    formula = {"ScaledSwiGLU": _gate(F.silu), "ScaledSReLU": srelu}[type(op).__name__]
    return formula(x) * scales.unsqueeze(-1)


def layer_norm(op: Any, ctx: Any, x: Tensor) -> Tensor:
    n = op.weight.numel()
    rows = x.reshape(-1, n)
    mean = rows.float().mean(-1)
    rstd = torch.rsqrt(rows.float().var(-1, unbiased=False) + op.eps)
    if ctx.requires_grad:
        ctx.save_for_backward(rows, mean, rstd)
        ctx.dtype = x.dtype
    y = (rows - mean[:, None]) * rstd[:, None]
    return (y * op.weight.reshape(n) + op.bias.reshape(n)).to(x.dtype).view(x.shape)


def rms_norm(op: Any, ctx: Any, x: Tensor) -> Tensor:
    n = op.weight.numel()
    rows = x.reshape(-1, n)
    rstd = torch.rsqrt(rows.float().square().mean(-1) + op.eps)
    if ctx.requires_grad:
        ctx.save_for_backward(rows, rstd)
        ctx.dtype = x.dtype
    return (rows * rstd[:, None] * op.weight.reshape(n)).to(x.dtype).view(x.shape)


def l2_normalization(op: Any, ctx: Any, x: Tensor) -> Tensor:
    rsqrt_norm = torch.rsqrt(x.float().square().sum(-1, keepdim=True) + op.eps)
    if ctx.requires_grad:
        ctx.save_for_backward(x, rsqrt_norm)
    return (x * rsqrt_norm).to(x.dtype)


def dropout(op: Any, ctx: Any, x: Tensor) -> Tensor:
    impl, mask = "evaluation", None
    if op.training:
        impl = "unfused"
        keep = 1 - op.p
        mask = torch.empty_like(x).bernoulli_(keep) * (1 / keep)
    if ctx.requires_grad:
        ctx.save_for_backward(mask)
        ctx.impl = impl
        ctx.dropout_probability = op.p
        ctx.dtype = x.dtype
    return x if mask is None else x * mask


def reshape(op: Any, ctx: Any, x: Tensor) -> Tensor:
    if ctx.requires_grad:
        ctx.input_shape = x.size()
    return x.reshape(op.shape)


def quantize(op: Any, ctx: Any, x: Tensor) -> Tensor:
    if ctx.requires_grad:
        ctx.quantize_backward = False
    return x


FORWARDS: dict[type, Any] = {
    te.ops.BasicLinear: linear,
    te.ops.Bias: bias,
    te.ops.LayerNorm: layer_norm,
    te.ops.RMSNorm: rms_norm,
    te.ops.L2Normalization: l2_normalization,
    te.ops.Dropout: dropout,
    te.ops.Reshape: reshape,
    te.ops.Quantize: quantize,
    te.ops.ScaledSwiGLU: scaled_activation,
    te.ops.ScaledSReLU: scaled_activation,
    te.ops.Identity: lambda op, ctx, x: x,
    te.ops.ConstantScale: lambda op, ctx, x: x * op.scale,
    te.ops.AddExtraInput: lambda op, ctx, x, extra: x + extra,
    **{getattr(te.ops, name): activation for name in ACTIVATIONS},
}


class TeFilled(te.ops.FusedOperation):
    """Runs its basic operations in plain torch; its contexts are those that te.ops would leave."""

    calls = 0

    def __init__(self, *ops: te.ops.FusibleOperation) -> None:
        super().__init__(ops)

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        type(self).calls += 1
        x = input_
        for op, ctx, extra in zip(
            self.basic_ops, basic_op_ctxs, basic_op_extra_inputs, strict=True
        ):
            x = FORWARDS[type(op)](op, ctx, x, *extra)
        return x, [() for _ in self.basic_ops]
