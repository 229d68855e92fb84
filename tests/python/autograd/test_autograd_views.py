"""Outputs that share memory with an argument count versions with it, as torch's own views do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from reference import make_input

import ligature as te
import ligature.ops as ops


class ViewInPython(ops.BasicOperation):
    """An operation in Python that returns a view."""

    def op_forward(self, ctx, input_, **unused):
        return input_.view(-1)

    def op_backward(self, ctx, grad_output):
        return grad_output.view(4, 8), ()


class SplitViewInPython(ops.BasicOperation):
    """The same in the split form."""

    def op_forward_compute(self, input_, **unused):
        return input_.view(-1), ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
        pass

    def op_backward(self, ctx, grad_output):
        return grad_output.view(4, 8), ()


VIEWS: dict[str, Callable[[], torch.nn.Module]] = {
    "Reshape": lambda: ops.Reshape((-1,)),
    "two": lambda: ops.Sequential(ops.Reshape((2, 16)), ops.Reshape((8, 4))),
    "Identity, Reshape": lambda: ops.Sequential(ops.Identity(), ops.Reshape((-1,))),
    "Dropout, Reshape": lambda: ops.Sequential(ops.Dropout(0.5), ops.Reshape((-1,))).eval(),
    "fork": lambda: ops.Sequential(ops.MakeExtraOutput(), ops.Reshape((-1,))),
    "frozen": lambda: ops.Sequential(ops.Reshape((-1,)), torch.nn.Identity()),
    "Identity": ops.Identity,
    "Dropout": lambda: ops.Dropout(0.5).eval(),
    "Python": ViewInPython,
    "split": SplitViewInPython,
}

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "none needed": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_into_a_view_is_noticed_by_who_saved_the_input(device, view, mode):
    weight = make_input(4, 8)
    x = make_input(4, 8, requires_grad=mode == "no_grad")
    loss = (weight * x).sum()  # saves x
    model = VIEWS[view]()
    with MODES[mode]():
        y = first(model(x))
        assert y.data_ptr() == x.data_ptr()
        y.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("view", VIEWS)
def test_a_write_into_a_view_with_a_gradient_is_noticed(device, view):
    weight = make_input(4, 8)
    x = make_input(4, 8) * 1
    loss = (weight * x).sum()
    y = first(VIEWS[view]()(x))
    assert y.requires_grad
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("view", VIEWS)
def test_a_write_into_the_input_is_noticed_behind_a_view(device, view):
    model = ops.Sequential(*[m for m in [VIEWS[view]()] if not isinstance(m, ops.Sequential)])
    if len(model) == 0:
        model = ops.Sequential(*VIEWS[view]())
    model.eval()
    model.append(ops.SiLU())
    x = make_input(4, 8) * 1
    y = first(model(x))
    with torch.no_grad():
        x.mul_(3)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_outputs_in_one_memory_count_together(device):
    model = ops.Sequential(ops.Linear(8, 8), ops.MakeExtraOutput(), ops.Reshape((-1,)))
    with torch.no_grad():
        y, extra = model(make_input(4, 8))
    assert y.data_ptr() == extra.data_ptr()
    weight = make_input(4, 8)
    loss = (weight * extra).sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_a_quantized_input_that_is_returned_is_the_input(device):
    q = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=device)(make_input(32, 32))
    q = q.detach()
    for model in (ops.Identity(), ops.Dropout(0.5).eval()):
        with torch.no_grad():
            assert model(q) is q


def test_values_do_not_change(device):
    x = make_input(4, 8)
    y = ops.Sequential(ops.Reshape((-1,)), ops.Reshape((8, 4)))(x)
    assert torch.equal(y, x.reshape(8, 4))
    y.backward(torch.arange(32.0).view(8, 4))
    assert torch.equal(x.grad, torch.arange(32.0).view(4, 8))
