"""Operations with more than 64 parameters or extra inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ligature as te

ops = te.ops
COUNT = 200


class Many(ops.BasicOperation):
    """The input times the sum of its parameters, and of its extra inputs if it has any."""

    def __init__(self, count: int, extra: int = 0) -> None:
        super().__init__()
        self.num_extra_inputs = extra
        for i in range(count):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(())))
        self.seen: list[tuple[int, int]] = []

    def _sum(self, extras: Any) -> torch.Tensor:
        return torch.stack([*self.parameters(), *extras]).sum()

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: torch.Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        basic_op_ctxs[0].save_for_backward(input_, *basic_op_extra_inputs[0])
        return input_ * self._sum(basic_op_extra_inputs[0]), [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **unused: Any) -> Any:
        ctx = basic_op_ctxs[0]
        x, *extras = ctx.saved_tensors
        self.seen.append((ctx.params_requires_grad, ctx.extra_inputs_requires_grad))
        grad = (grad_output * x).sum()
        grads = tuple(grad.clone() for _ in self.parameters())
        return grad_output * self._sum(extras), [grads], [tuple(grad.clone() for _ in extras)]


@pytest.mark.parametrize("extra", [0, 1, 130])
def test_gradients_of_all(extra: int) -> None:
    op = Many(COUNT, extra)
    model = ops.Sequential(op, ops.GELU())
    frozen = {3, 63, 64, 70, 128, COUNT - 1}
    for i, parameter in enumerate(op.parameters()):
        parameter.requires_grad_(i not in frozen)
    x = torch.randn(4, requires_grad=True)
    extras = [torch.randn((), requires_grad=i % 3 != 0) for i in range(extra)]
    model(x, *extras).sum().backward()
    got = [x.grad, *(p.grad for p in op.parameters()), *(e.grad for e in extras)]
    leaves = [x.detach().double(), *(p.detach().double() for p in op.parameters())]
    leaves += [e.detach().double() for e in extras]
    for leaf in leaves:
        leaf.requires_grad_()
    total = torch.stack(leaves[1:]).sum()
    torch.nn.functional.gelu(leaves[0] * total, approximate="tanh").sum().backward()
    needs = [True, *(i not in frozen for i in range(COUNT)), *(i % 3 != 0 for i in range(extra))]
    for g, leaf, needed in zip(got, leaves, needs, strict=True):
        assert (g is not None) is needed
        if g is not None:
            torch.testing.assert_close(g.double(), leaf.grad, rtol=1e-4, atol=1e-5)
    wanted = sum(1 << i for i in range(COUNT) if i not in frozen)
    assert op.seen == [(wanted, sum(1 << i for i in range(extra) if i % 3 != 0))]


def test_only_the_last_needs_a_gradient() -> None:
    """An operation takes part in backward for any of them."""
    op = Many(COUNT)
    for parameter in op.parameters():
        parameter.requires_grad_(False)
    last = list(op.parameters())[-1]
    last.requires_grad_()
    x = torch.randn(4)
    y = ops.Sequential(ops.GELU(), op)(x)
    assert y.requires_grad
    y.sum().backward()
    wanted = torch.nn.functional.gelu(x, approximate="tanh").sum()
    torch.testing.assert_close(last.grad, wanted)


def test_only_some_are_asked_for() -> None:
    op = Many(COUNT)
    parameters = list(op.parameters())
    x = torch.randn(4, requires_grad=True)
    (grad,) = torch.autograd.grad(op(x).sum(), [parameters[150]])
    torch.testing.assert_close(grad, x.sum().detach())
    assert op.seen == [(1 << 150, 0)]


def test_checked() -> None:
    """By check_operation too, which had a limit of its own."""

    class Split(ops.BasicOperation):
        def __init__(self) -> None:
            super().__init__()
            for i in range(80):
                self.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(8)))

        def op_forward_compute(self, input_: Any, *, requires_grad: bool, **unused: Any) -> Any:
            return input_ + sum(self.parameters()), ()

        def op_forward_save_ctx(self, ctx: Any, *args: Any, **kwargs: Any) -> None:
            pass

        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            grad = grad_output.reshape(-1, 8).sum(0)
            return grad_output, tuple(grad.clone() for _ in range(80))

    te.testing.check_operation(
        Split,
        lambda x, **params: x + sum(params.values()),
        [(4, 8)],
        dtypes=[torch.float64],
        may_give_unneeded=True,
    )


def test_compiled() -> None:
    class Split(ops.BasicOperation):
        def __init__(self) -> None:
            super().__init__()
            for i in range(70):
                self.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(8)))

        def op_forward_compute(self, input_: Any, *, requires_grad: bool, **unused: Any) -> Any:
            return input_ + torch.stack(list(self.parameters())).sum(0), ()

        def op_forward_save_ctx(self, ctx: Any, *args: Any, **kwargs: Any) -> None:
            pass

        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            return grad_output, tuple(grad_output.sum(0) for _ in range(70))

    op = Split()
    x = torch.randn(4, 8)
    y = torch.compile(op, fullgraph=True)(x)
    y.sum().backward()
    assert all(torch.equal(p.grad, torch.full((8,), 4.0)) for p in op.parameters())
