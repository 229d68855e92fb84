"""What operations written in Python are told: keyword arguments, quantizers, hooks; subclasses."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from fusion_support import backward_names, forward_names
from reference import assert_close, gelu, make_input

import ligature as te


class Recorder(te.ops.BasicOperation):
    """Remembers the keyword arguments of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def op_forward(self, ctx, input_, **kwargs):
        self.calls.append(kwargs)
        return input_ * kwargs.get("factor", 1)

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


QUANTIZERS = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}


# -- keyword arguments


def test_keyword_arguments_of_an_operation_alone() -> None:
    op = Recorder()
    x = torch.randn(3, 8)
    torch.testing.assert_close(op(x, factor=3, label="a"), 3 * x)
    assert op.calls == [{**QUANTIZERS, "factor": 3, "label": "a"}]
    op(x)
    assert op.calls[-1] == QUANTIZERS


@pytest.mark.parametrize("by", ["operation", "index", "negative index"])
def test_keyword_arguments_in_a_sequential(by: str) -> None:
    first, second = Recorder(), Recorder()
    model = te.ops.Sequential(first, te.ops.Identity(), second)
    key = {"operation": second, "index": 2, "negative index": -1}[by]
    thing = object()
    x = torch.randn(3, 8)
    y = model(x, op_kwargs={key: {"factor": 2, "thing": thing}})
    torch.testing.assert_close(y, 2 * x)
    assert first.calls == [QUANTIZERS]
    assert second.calls == [{**QUANTIZERS, "factor": 2, "thing": thing}]
    assert torch.equal(model(x), x)
    model(x, op_kwargs={})
    assert second.calls[-1] == QUANTIZERS


def test_keyword_arguments_beside_other_modules() -> None:
    class Shift(torch.nn.Module):
        def forward(self, x, by=0.0):
            return x + by

    first, second = Recorder(), Recorder()
    inner = te.ops.Sequential(second)
    model = te.ops.Sequential(first, Shift(), inner)
    x = torch.randn(3, 8)
    kwargs = {0: {"factor": 2}, 1: {"by": 1.0}, inner: {"op_kwargs": {0: {"factor": 3}}}}
    torch.testing.assert_close(model(x, op_kwargs=kwargs), (2 * x + 1) * 3)


def test_keyword_arguments_of_a_fuser() -> None:
    first, second = Recorder(), Recorder()
    fuser = te.ops.OperationFuser([first, te.ops.GELU(), second])
    fuser(torch.randn(3, 8), basic_op_kwargs=[{"a": 1}, {}, {"b": 2}])
    assert first.calls == [{**QUANTIZERS, "a": 1}]
    assert second.calls == [{**QUANTIZERS, "b": 2}]


@pytest.mark.parametrize("form", ["split", "fuser", "fuser split"])
def test_keyword_arguments_in_the_other_forms(form: str) -> None:
    seen = []

    class Split(te.ops.BasicOperation):
        def op_forward_compute(self, input_, *, requires_grad, **kwargs):
            seen.append(kwargs["a"])
            return 2 * input_, ()

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, requires_grad, **kwargs):
            seen.append(kwargs["a"])

    class Fuser(te.ops.BasicOperation):
        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_kwargs, **unused):
            seen.extend([basic_op_kwargs[0]["a"]] * 2)
            return 2 * input_, [()]

    class FuserSplit(te.ops.BasicOperation):
        def fuser_forward_compute(self, input_, *, requires_grad, basic_op_kwargs, **unused):
            seen.append(basic_op_kwargs[0]["a"])
            return 2 * input_, [()], [()]

        def fuser_forward_save_ctx(
            self,
            basic_op_ctxs,
            input_,
            tensors_to_save,
            *,
            requires_grad,
            basic_op_kwargs,
            **unused,
        ):
            seen.append(basic_op_kwargs[0]["a"])

    op = {"split": Split, "fuser": Fuser, "fuser split": FuserSplit}[form]()
    x = make_input(3, 8)
    torch.testing.assert_close(op(x, a=7), 2 * x)
    assert seen == [7, 7]


# -- quantizers of neighbours


class Quantized(Recorder):
    """Has a quantizer of its input and one of its output's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.quantizers = {"forward": object(), "backward": object()}

    def num_quantizers(self, mode):
        return 1

    def get_quantizer(self, mode, index):
        assert index == 0
        return self.quantizers[mode]


def test_neighbours_see_each_others_quantizers() -> None:
    first, second, third = Recorder(), Quantized(), Recorder()
    te.ops.Sequential(first, second, third)(make_input(3, 8))
    assert first.calls[0]["next_op_input_quantizer"] is second.quantizers["forward"]
    assert first.calls[0]["prev_op_grad_output_quantizer"] is None
    assert third.calls[0]["prev_op_grad_output_quantizer"] is second.quantizers["backward"]
    assert third.calls[0]["next_op_input_quantizer"] is None
    assert second.calls[0] == QUANTIZERS


def test_quantizer_methods_may_be_overridden_directly() -> None:
    marker = object()

    class Direct(Recorder):
        def get_input_quantizer(self):
            return marker

    first = Recorder()
    te.ops.Sequential(first, Direct())(make_input(3, 8))
    assert first.calls[0]["next_op_input_quantizer"] is marker


def test_quantizers_are_not_seen_across_other_operations() -> None:
    first = Recorder()
    te.ops.Sequential(first, te.ops.GELU(), Quantized())(make_input(3, 8))
    assert first.calls[0]["next_op_input_quantizer"] is None
    te.ops.Sequential(first, te.ops.Sequential(Quantized()))(make_input(3, 8))
    assert first.calls[1]["next_op_input_quantizer"] is None


def test_quantizers_of_a_fused_operation() -> None:
    a, b = Quantized(), Quantized()

    class Both(te.ops.FusedOperation):
        def __init__(self, *ops):
            super().__init__(ops)

    both = Both(a, b)
    assert both.get_input_quantizer() is a.quantizers["forward"]
    assert both.get_grad_output_quantizer() is b.quantizers["backward"]
    assert te.ops.Linear(4, 4).get_input_quantizer() is None
    assert te.ops.GELU().num_quantizers("forward") == 0
    assert te.ops.GELU().get_quantizer("forward", 0) is None


def test_quantizers_stay_valid_when_other_plans_are_made() -> None:
    """In a process of its own: what went wrong here was memory that had been freed."""
    script = """
        import gc, torch, ligature as te

        class Op(te.ops.BasicOperation):
            seen = None
            def op_forward(self, ctx, input_, next_op_input_quantizer=None, **unused):
                self.seen = next_op_input_quantizer
                return input_ * 1
            def op_backward(self, ctx, grad_output):
                return grad_output, ()
            def get_input_quantizer(self):
                return {"a": "quantizer"}

        first, second = Op(), Op()
        fuser = te.ops.OperationFuser([first, second])
        x = torch.randn(3, 8)
        for _ in range(50):
            fuser(x)
            assert first.seen == {"a": "quantizer"}, first.seen
            second(x)
            fuser(x.bfloat16())
            second(x.double())
            junk = [bytearray(n) for n in range(8, 200, 8)]
            gc.collect()
            fuser(x)
            assert first.seen == {"a": "quantizer"}, first.seen
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


# -- hooks of the fuser


def test_pre_forward_hooks() -> None:
    calls = []

    class Op(Recorder):
        def pre_first_fuser_forward(self):
            calls.append("first")

        def pre_fuser_forward(self, *, requires_grad):
            calls.append(requires_grad)

    op = Op()
    model = te.ops.Sequential(te.ops.Linear(8, 8), op)
    model(make_input(3, 8))
    assert calls == ["first", True]
    with torch.no_grad():
        model(make_input(3, 8))
    assert calls == ["first", True, False]
    model(make_input(3, 8))
    assert calls == ["first", True, False, True]


def test_pre_forward_hooks_may_change_the_operation() -> None:
    """As te.ops does: parameters that are made when they are first needed."""

    class Lazy(te.ops.BasicOperation):
        def __init__(self):
            super().__init__()
            self.register_parameter("scale", None)

        def pre_first_fuser_forward(self):
            self.scale = torch.nn.Parameter(torch.full((), 2.0))

        def op_forward(self, ctx, input_, **unused):
            return self.scale * input_

        def op_backward(self, ctx, grad_output):
            return self.scale * grad_output, (None,)

    op, x = Lazy(), make_input(3, 8)
    y = op(x)
    torch.testing.assert_close(y, 2 * x)
    y.sum().backward()
    assert (x.grad == 2).all()


# -- subclasses of built-in operations


class SlowGELU(te.ops.GELU):
    """Own backward, inherited forward."""

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = gelu(x)
        return torch.autograd.grad(y, x, 10 * grad_output)[0], ()


class DoubledGELU(te.ops.GELU):
    """Own forward in the split form, which uses the inherited one."""

    def op_forward_compute(self, input_, **kwargs):
        out, kept = super().op_forward_compute(input_, **kwargs)
        return 2 * out, kept

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **kwargs):
        super().op_forward_save_ctx(ctx, input_, tensors_to_save, **kwargs)


class ClassicGELU(te.ops.GELU):
    """Own forward in the classic form."""

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_)
        return 3 * gelu(input_)


@pytest.mark.parametrize(
    ("cls", "forward", "backward"), [(SlowGELU, 1, 10), (DoubledGELU, 2, 1), (ClassicGELU, 3, 1)]
)
def test_subclass_of_a_built_in_operation(cls: type, forward: int, backward: int) -> None:
    op, linear = cls(), te.ops.Linear(8, 8)
    model = te.ops.Sequential(linear, op)
    x = make_input(3, 8)
    y = model(x)
    y.backward(torch.ones_like(y))
    x2 = x.detach().requires_grad_()
    y2 = gelu(linear(x2))
    y2.backward(torch.ones_like(y2))
    assert_close(y, forward * y2.double(), torch.float32, scale=3)
    assert_close(x.grad, backward * x2.grad.double(), torch.float32, scale=3)
    # Its methods are its own, so no built-in fusion may pass them by.
    fuser = model._module_groups[0]
    assert forward_names(fuser) == ["ForwardLinearBiasActivation", cls.__name__]
    assert backward_names(fuser) == ["BasicLinear", "Bias", cls.__name__]
    assert repr(op).startswith(f"{cls.__name__}(")
    torch.testing.assert_close(copy.deepcopy(model)(x), y)


def test_subclass_that_changes_nothing_is_still_fused() -> None:
    class MyGELU(te.ops.GELU):
        """Only a name and an attribute."""

        colour = "green"

    fuser = te.ops.OperationFuser([te.ops.Linear(8, 8), MyGELU()])
    fuser(make_input(3, 8))
    assert forward_names(fuser) == ["ForwardLinearBiasActivation"]


def test_subclass_with_parameters() -> None:
    class LoudLinear(te.ops.BasicLinear):
        def op_forward_compute(self, input_, **kwargs):
            out, kept = super().op_forward_compute(input_, **kwargs)
            return out, kept

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **kwargs):
            super().op_forward_save_ctx(ctx, input_, tensors_to_save, **kwargs)
            ctx.loud = True

        def op_backward(self, ctx, grad_output):
            assert ctx.loud
            return super().op_backward(ctx, grad_output)

    op, x = LoudLinear(8, 4), make_input(3, 8)
    y = op(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, x @ op.weight.t())
    torch.testing.assert_close(x.grad, 2 * y @ op.weight)
    torch.testing.assert_close(op.weight.grad, 2 * y.t() @ x)


def test_subclass_of_an_operation_with_an_extra_input() -> None:
    class HalfAdd(te.ops.AddExtraInput):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            dx, params, (extras,) = super().fuser_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs
            )
            return dx, params, [(extras[0] / 2,)]

    x, extra = make_input(3, 8), make_input(3, 8)
    te.ops.Sequential(te.ops.SiLU(), HalfAdd())(x, extra).sum().backward()
    assert (extra.grad == 0.5).all()
