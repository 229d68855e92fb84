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


# -- fusions see the list that te.ops would show them


class ForwardLinearSiLU(te.ops.FusedOperation):
    """Forward only; its contexts are filled by te.ops' conventions."""

    def __init__(self, *, linear: te.ops.BasicLinear, silu: te.ops.SiLU) -> None:
        super().__init__((linear, silu))

    def fuser_forward(
        self, basic_op_ctxs: list, input_: torch.Tensor, **unused
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        weight = self.basic_ops[0].weight
        y = torch.matmul(input_, weight.T)
        linear_ctx, silu_ctx = basic_op_ctxs
        if linear_ctx.requires_grad:
            linear_ctx.save_for_backward(input_, weight)
            linear_ctx.with_quantized_compute = False
            linear_ctx.input_quantizer = None
            linear_ctx.weight_quantizer = None
            linear_ctx.grad_output_quantizer = None
            linear_ctx.grad_input_quantizer = None
            linear_ctx.dtype = weight.dtype
            linear_ctx.input_requires_grad = linear_ctx.requires_grad
            linear_ctx.weight_requires_grad = weight.requires_grad
        if silu_ctx.requires_grad:
            silu_ctx.save_for_backward(y)
            silu_ctx.dtype = weight.dtype
            silu_ctx.prev_op_grad_output_quantizer = None
        return torch.nn.functional.silu(y), [() for _ in range(2)]


def test_forward_fusion_fires_without_prepend() -> None:
    """It looks at the first two operations; in te.ops nothing has fused them before."""

    def fuse_ops(ops, **unused):
        if isinstance(ops[0], te.ops.BasicLinear) and isinstance(ops[1], te.ops.SiLU):
            return [ForwardLinearSiLU(linear=ops[0], silu=ops[1]), *ops[2:]]
        return ops

    model = te.ops.Sequential(te.ops.Linear(HIDDEN, FFN, bias=False), te.ops.SiLU())
    x = torch.randn(BATCH, HIDDEN, requires_grad=True)
    with te.ops.register_forward_fusion(fuse_ops):
        y = model(x)
        y.sum().backward()
        forward_ops = model._module_groups[0]._forward_ops
        assert [type(op) for op, _ in forward_ops] == [ForwardLinearSiLU]
    leaf, w = (t.detach().clone().requires_grad_() for t in (x, model[0].weight))
    z = torch.nn.functional.silu(leaf @ w.T)
    z.sum().backward()
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(x.grad, leaf.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model[0].weight.grad, w.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prepend", [False, True])
def test_pattern_of_linear_and_activation_fires(dtype: torch.dtype, prepend: bool) -> None:
    class Fused(te.ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            linear, bias, _ = self.basic_ops
            y = torch.nn.functional.linear(input_, linear.weight, bias.bias)
            basic_op_ctxs[0].save_for_backward(input_, linear.weight)
            basic_op_ctxs[2].save_for_backward(y)
            return torch.nn.functional.silu(y), [(), (), ()]

    fusion = te.ops.Fusion([te.ops.Linear, te.ops.SiLU], lambda linear, silu: Fused([linear, silu]))
    model = te.ops.Sequential(te.ops.Linear(HIDDEN, FFN, dtype=dtype), te.ops.SiLU())
    x = torch.randn(BATCH, HIDDEN, dtype=dtype, requires_grad=True)
    with te.ops.register_forward_fusion(fusion, prepend=prepend):
        model(x).sum().backward()
        assert [type(op) for op, _ in model._module_groups[0]._forward_ops] == [Fused]
    assert x.grad is not None


def seen_by(register, ops, *inputs: torch.Tensor, recipe=None) -> list[str]:
    """The operations that a function registered without more ado is shown."""
    seen: list[str] = []

    def look(given, **unused):
        seen.extend(type(op).__name__ for op in given)
        return given

    model = te.ops.Sequential(*ops)
    with register(look), te.autocast(enabled=recipe is not None, recipe=recipe):
        model(*inputs)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_functions_see_what_te_ops_would_show(dtype: torch.dtype) -> None:
    x, extra = (torch.randn(BATCH, HIDDEN, dtype=dtype) for _ in range(2))
    linear = te.ops.Linear(HIDDEN, HIDDEN, dtype=dtype)
    basic = te.ops.BasicLinear(HIDDEN, HIDDEN, dtype=dtype)

    def seen(*ops, extras=()):
        return seen_by(te.ops.register_forward_fusion, ops, x, *extras)

    assert seen(linear, te.ops.SiLU()) == ["BasicLinear", "Bias", "SiLU"]
    assert seen(linear) == ["BasicLinear", "Bias"]
    assert seen(te.ops.Bias(HIDDEN, dtype=dtype), te.ops.GELU()) == ["Bias", "GELU"]
    add = te.ops.AddExtraInput
    assert seen(linear, add(), extras=[extra]) == ["BasicLinear", "Bias", "AddExtraInput"]
    assert seen(linear, add(in_place=True), extras=[extra]) == ["ForwardLinearBiasAdd"]
    scale = te.ops.ConstantScale(0.5)
    assert seen(basic, scale, add(in_place=True), extras=[extra]) == ["ForwardLinearScaleAdd"]
    names = ["BasicLinear", "ConstantScale", "AddExtraInput"]
    assert seen(basic, scale, add(), extras=[extra]) == names


@pytest.mark.parametrize("quantized", [False, True])
def test_backward_functions_see_what_te_ops_would_show(quantized: bool) -> None:
    recipe = te.recipe.Float8CurrentScaling() if quantized else None
    x = torch.randn(BATCH, HIDDEN, requires_grad=True)

    def seen(*ops):
        return seen_by(te.ops.register_backward_fusion, ops, x, recipe=recipe)

    linear, basic = te.ops.Linear(HIDDEN, HIDDEN), te.ops.BasicLinear(HIDDEN, HIDDEN)
    bias_gelu = ["BackwardActivationBias"] if quantized else ["Bias", "GELU"]
    assert seen(linear, te.ops.GELU()) == ["BasicLinear", *bias_gelu]
    assert seen(linear, te.ops.SiLU()) == ["BasicLinear", "Bias", "SiLU"]
    assert seen(linear) == ["BasicLinear", "Bias"]
    assert seen(te.ops.GELU(), basic) == ["GELU", "BasicLinear"]
    fork = te.ops.MakeExtraOutput
    assert seen(fork(in_place=True), basic) == ["BackwardLinearAdd"]
    assert seen(fork(), basic) == ["MakeExtraOutput", "BasicLinear"]
    assert seen(fork(), te.ops.RMSNorm(HIDDEN)) == ["BackwardAddRMSNorm"]
    assert seen(fork(in_place=True), te.ops.RMSNorm(HIDDEN)) == ["MakeExtraOutput", "RMSNorm"]
    assert seen(fork(), te.ops.LayerNorm(HIDDEN)) == ["MakeExtraOutput", "LayerNorm"]
    if not quantized:
        assert seen(basic, te.ops.ConstantScale(0.5)) == ["BackwardLinearScale"]


def test_joint_functions_see_basic_operations() -> None:
    ops = [te.ops.LayerNorm(HIDDEN), te.ops.Linear(HIDDEN, FFN), te.ops.SwiGLU()]
    ops.append(te.ops.Linear(FFN // 2, HIDDEN))
    x = torch.randn(BATCH, HIDDEN, requires_grad=True)
    seen = seen_by(te.ops.register_forward_backward_fusion, ops, x)
    assert seen == ["LayerNorm", "BasicLinear", "Bias", "SwiGLU", "BasicLinear", "Bias"]


def test_what_a_function_leaves_is_fused_as_before() -> None:
    """And what it does not take is explained as before."""
    ops = [te.ops.Linear(HIDDEN, HIDDEN), te.ops.SiLU(), te.ops.Linear(HIDDEN, HIDDEN)]
    model = te.ops.Sequential(*ops, te.ops.AddExtraInput())
    inputs = [torch.randn(BATCH, HIDDEN, requires_grad=True) for _ in range(2)]
    model(*inputs).sum().backward()
    before = model.explain()
    same = lambda ops, **unused: ops  # noqa: E731
    with te.ops.register_forward_fusion(same), te.ops.register_backward_fusion(same):
        model(*inputs).sum().backward()
        after = model.explain()
    assert after.fusions == before.fusions
    assert "ForwardLinearBiasAdd" in after.fusions
    assert "it left the operations as they are" in str(after)
