"""Operations written in Python, as autograd sees them."""

from __future__ import annotations

import weakref

import pytest
import torch
from reference import Reference, assert_close, float64_copy, make_input, make_mlp

import ligature.ops as ops


class Fragile(ops.BasicOperation):
    """A user's operation that fails on request."""

    fails_in = ""

    def op_forward(self, ctx, input_, **unused):
        if self.fails_in == "forward":
            raise LookupError("in forward")
        ctx.save_for_backward(input_)
        return input_.exp()

    def op_backward(self, ctx, grad_output):
        if self.fails_in == "backward":
            raise LookupError("in backward")
        (x,) = ctx.saved_tensors
        return grad_output * x.exp(), ()


def test_an_error_in_an_operation_is_passed_on_and_does_no_harm(device):
    model = ops.Sequential(ops.Linear(8, 8), Fragile(), ops.Linear(8, 8))
    x = make_input(6, 8)
    model[1].fails_in = "forward"
    with pytest.raises(LookupError, match="in forward"):
        model(x)
    model[1].fails_in = "backward"
    y = model(x)
    with pytest.raises(LookupError, match="in backward"):
        y.sum().backward(retain_graph=True)
    model[1].fails_in = ""
    model.zero_grad(set_to_none=True)
    y.sum().backward()
    x64, weights = float64_copy(x), [float64_copy(p) for p in model.parameters()]
    hidden = torch.nn.functional.linear(x64, *weights[:2]).exp()
    torch.nn.functional.linear(hidden, *weights[2:]).sum().backward()
    assert_close(x.grad, x64.grad, torch.float32, scale=4)
    for parameter, wanted in zip(model.parameters(), weights, strict=True):
        assert_close(parameter.grad, wanted.grad, torch.float32, scale=4)


class Exp(ops.BasicOperation):
    """Saves its output."""

    def op_forward(self, ctx, input_, **unused):
        out = input_.exp()
        ctx.save_for_backward(out)
        return out

    def op_backward(self, ctx, grad_output):
        (out,) = ctx.saved_tensors
        return grad_output * out, ()


@pytest.mark.parametrize("last", [True, False])
def test_a_saved_output(device, last):
    model = ops.Sequential(ops.Linear(8, 8), Exp(), *([] if last else [ops.Identity()]))
    x = make_input(6, 8)
    y = model(x)
    y.sum().backward(retain_graph=True)
    weights = [float64_copy(p) for p in model.parameters()]
    x64 = float64_copy(x)
    torch.nn.functional.linear(x64, *weights).exp().sum().backward()
    assert_close(x.grad, x64.grad, torch.float32, scale=4)
    for parameter, wanted in zip(model.parameters(), weights, strict=True):
        assert_close(parameter.grad, wanted.grad, torch.float32, scale=4)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_saved_output_does_not_keep_itself_alive(device):
    y = ops.Sequential(ops.Linear(8, 8), Exp())(make_input(6, 8))
    output = weakref.ref(y)
    del y
    assert output() is None


class Recomputed(ops.BasicOperation):
    """Runs another module again in backward, by autograd inside autograd."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_)
        return self.inner(input_)

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.inner(x)
        grad, *grads = torch.autograd.grad(y, [x, *self.inner.parameters()], grad_output)
        return grad, tuple(grads)


@pytest.mark.parametrize("kind", ["ligature", "torch"])
def test_autograd_inside_a_backward(device, kind):
    inner = make_mlp() if kind == "ligature" else torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = ops.Sequential(ops.Linear(8, 8), Recomputed(inner), ops.SiLU())
    plain = ops.Sequential(model[0], inner, model[2])
    x = make_input(6, 8)
    y = model(x)
    y.square().sum().backward()
    reference = Reference(plain)
    x64 = float64_copy(x)
    wanted = reference(x64)
    wanted.square().sum().backward()
    assert_close(y, wanted, torch.float32)
    assert_close(x.grad, x64.grad, torch.float32, scale=4)
    for name, parameter in plain.named_parameters():
        grad = reference.parameters[name].grad
        assert_close(parameter.grad, grad, torch.float32, scale=10, what=name)


def test_an_operation_sees_what_is_needed(device):
    seen = []

    class Watcher(ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            seen.append(("forward", ctx.requires_grad, torch.is_grad_enabled()))
            return input_.clone()

        def op_backward(self, ctx, grad_output):
            seen.append(("backward", ctx.requires_grad, torch.is_grad_enabled()))
            return grad_output.clone(), ()

    model = ops.Sequential(Watcher(), ops.Linear(8, 8), Watcher())
    model(make_input(4, 8, requires_grad=False)).sum().backward()
    assert seen == [
        ("forward", False, False),
        ("forward", True, False),
        ("backward", True, False),
    ]
