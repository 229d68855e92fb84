"""ligature.testing.check_operation with operations written in Python, right ones and wrong ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import ligature as te
from ligature.testing import Report, check_operation

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor
SHAPES = [(5, 8), (2, 3, 8)]


class Scale(te.ops.BasicOperation):
    """``x * scale``, element by element, in the classic form."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_, self.scale)
        return input_ * self.scale

    def op_backward(self, ctx, grad_output):
        return self.gradients(ctx, grad_output, *ctx.saved_tensors)

    def gradients(self, ctx: Any, dy: Tensor, x: Tensor, scale: Tensor) -> tuple[Any, Any]:
        dx = dy * scale if ctx.input_requires_grad else None
        ds = (dy * x).flatten(0, -2).sum(0) if ctx.params_requires_grad & 1 else None
        return dx, (ds,)


class SplitScale(Scale):
    """The same in two halves."""

    def op_forward_compute(self, input_, **unused):
        return input_ * self.scale, (), {"factor": 2}

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
        ctx.save_for_backward(input_, self.scale)


def scaled(x: Tensor, *, scale: Tensor) -> Tensor:
    return x * scale


def fails(cls: Any, message: str, reference: Any = scaled, **options: Any) -> str:
    with pytest.raises(AssertionError, match=re.escape(message)) as error:
        check_operation(cls, reference, SHAPES, **options)
    return str(error.value)


@pytest.mark.parametrize("cls", [Scale, SplitScale])
def test_right_ones(cls: type) -> None:
    report = check_operation(cls, scaled, SHAPES)
    assert isinstance(report, Report)
    assert report.runs > 40
    op = cls()
    check_operation(op, scaled, (5, 8), dtypes=[torch.float16])
    assert op.scale.dtype == torch.float32
    check_operation(lambda **kwargs: cls().to(**kwargs), scaled, SHAPES, max_patterns=2)


class Sum(te.ops.BasicOperation):
    """``x * factor + bias``: one extra input, the input's mean as an extra output."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        ((factor,),) = basic_op_extra_inputs
        basic_op_ctxs[0].save_for_backward(input_, factor)
        return input_ * factor, [(input_.mean(-1),)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, factor = basic_op_ctxs[0].saved_tensors
        ((grad_mean,),) = basic_op_grad_extra_outputs
        dx = grad_output * factor + grad_mean.unsqueeze(-1) / x.shape[-1]
        ctx = basic_op_ctxs[0]
        df = grad_output * x if ctx.extra_inputs_requires_grad & 1 else None
        return dx if ctx.input_requires_grad else None, [()], [(df,)]


def with_mean(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return x * factor, x.mean(-1)


def test_extra_inputs_and_outputs() -> None:
    extra = [[(5, 8)], [(2, 3, 8)]]
    assert check_operation(Sum, with_mean, SHAPES, extra_shapes=extra)
    message = "the shape of its extra input 0 cannot be told from an input of [5, 8]"
    fails(Sum, message, with_mean)

    class Half(Sum):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            dx, params, extras = super().fuser_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs
            )
            ((df,),) = extras
            return dx, params, [(None if df is None else df / 2,)]

    message = "gradient of extra input of Half is off by"
    fails(Half, message, with_mean, extra_shapes=extra)

    class NoMean(Sum):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            zeros = [(torch.zeros_like(basic_op_grad_extra_outputs[0][0]),)]
            return super().fuser_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=zeros
            )

    fails(NoMean, "gradient of input is off by", with_mean, extra_shapes=extra)

    class WrongMean(Sum):
        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            y, ((mean,),) = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
            return y, [(mean + 1,)]

    message = "extra output of WrongMean is off by 1 (allowed "
    fails(WrongMean, message, with_mean, extra_shapes=extra)


# -- wrong ones


def test_wrong_output_and_gradients() -> None:
    class Output(Scale):
        def op_forward(self, ctx, input_, **unused):
            return super().op_forward(ctx, input_) + 0.25

    fails(Output, "Output, float64 [5, 8], nothing needs gradients: output is off by 0.25 (allowed")

    class Input(Scale):
        def gradients(self, ctx, dy, x, scale):
            dx, grads = super().gradients(ctx, dy, x, scale)
            return None if dx is None else 1.25 * dx, grads

    text = fails(Input, "input needs a gradient: gradient of input is off by ", max_patterns=4)
    assert "by differences it is" in text

    class Parameter(Scale):
        def gradients(self, ctx, dy, x, scale):
            dx, (ds,) = super().gradients(ctx, dy, x, scale)
            if ds is not None and ds.dtype == torch.bfloat16:
                ds = 2 * ds
            return dx, (ds,)

    text = fails(Parameter, "Parameter.scale needs a gradient: gradient of Parameter.scale is off")
    assert "float64" not in text
    assert "float32" not in text
    assert check_operation(Parameter, scaled, SHAPES, dtypes=[torch.float64, torch.float32])


def test_wrong_backward_that_only_differences_show() -> None:
    class Detached(Scale):
        def gradients(self, ctx, dy, x, scale):
            dx, grads = super().gradients(ctx, dy, x, scale)
            return None if dx is None else dx + dy, grads

    def reference(x: Tensor, *, scale: Tensor) -> Tensor:
        return x * scale + x - x.detach()

    text = fails(Detached, "Detached, float64 [5, 8]: gradient of input is ", reference)
    assert ", by differences it is " in text
    assert check_operation(Detached, reference, SHAPES, numeric=False)


def test_kinds_of_gradients() -> None:
    class Dtype(Scale):
        def gradients(self, ctx, dy, x, scale):
            dx, (ds,) = super().gradients(ctx, dy, x, scale)
            return dx, (None if ds is None else ds.float(),)

    fails(Dtype, "gradient of Dtype.scale has dtype float32, wanted bfloat16")
    # Torch promotes: its output and its gradient are those of parameters in float64.
    mixed = [(torch.float32, torch.float64)]
    message = "gradient of input has dtype float64, wanted float32"
    fails(Scale, message, dtypes=mixed, may_change_dtype=True)

    class Missing(Scale):
        def gradients(self, ctx, dy, x, scale):
            dx, (ds,) = super().gradients(ctx, dy, x, scale)
            return dx, (ds if ctx.input_requires_grad else None,)

    fails(Missing, "Missing.scale needs a gradient: gradient of Missing.scale is missing")

    class Needless(Scale):
        def gradients(self, ctx, dy, x, scale):
            return dy * scale, ((dy * x).flatten(0, -2).sum(0),)

    text = fails(Needless, "gradient of Needless.scale is given, though none is needed")
    assert "(may_give_unneeded=True allows" in text
    assert check_operation(Needless, scaled, SHAPES, may_give_unneeded=True)


def test_memory() -> None:
    class Alias(Scale):
        def op_forward(self, ctx, input_, **unused):
            super().op_forward(ctx, input_)
            return input_

    fails(Alias, "output shares memory with input", randomize_parameters=False)

    class Changes(Scale):
        def op_forward(self, ctx, input_, **unused):
            y = super().op_forward(ctx, input_)
            input_.add_(1)
            return y

    fails(Changes, "input was changed")

    class Spoils(Scale):
        def gradients(self, ctx, dy, x, scale):
            grads = super().gradients(ctx, dy, x, scale)
            x.add_(1)
            return grads

    fails(Spoils, "backward changed saved tensor 0 of Spoils")

    class Keeps(SplitScale):
        def op_forward_compute(self, input_, **unused):
            return input_ * self.scale, (input_,)

    fails(Keeps, "the compute half of its forward returned an input (or a view of one)")

    class Gradient(Scale):
        def gradients(self, ctx, dy, x, scale):
            grads = super().gradients(ctx, dy, x, scale)
            if dy.stride(-1) > 0:
                dy.mul_(2)
            return grads

    fails(Gradient, "the gradient given for the output was changed")
    assert check_operation(Gradient, scaled, SHAPES, may_change_gradients=True)


def test_state_and_forgotten_tensors() -> None:
    class Stateful(Scale):
        def op_forward(self, ctx, input_, **unused):
            self.__dict__["kept"] = input_, self.scale.detach().clone()
            return input_ * self.scale

        def op_backward(self, ctx, grad_output):
            return self.gradients(ctx, grad_output, *self.kept)

    fails(Stateful, "backward of the first of two forwards: ")

    class Forgets(Scale):
        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_)
            return input_ * self.scale

        def op_backward(self, ctx, grad_output):
            return self.gradients(ctx, grad_output, *ctx.saved_tensors, self.scale)

    fails(Forgets, "Forgets.scale edited between forward and backward: gradient of input is off by")

    class Nothing(Scale):
        def op_forward(self, ctx, input_, **unused):
            return input_ * self.scale

    fails(Nothing, "missing 2 required positional arguments")


def test_own_samples_and_submodules() -> None:
    class Log(te.ops.BasicOperation):
        """``log(x)``, and a parameter of a submodule as a factor."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(1, 1, bias=False)

        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_, self.inner.weight)
            return input_.log() * self.inner.weight

        def op_backward(self, ctx, grad_output):
            x, w = ctx.saved_tensors
            return grad_output * w / x, ((grad_output * x.log()).sum().reshape(1, 1),)

    def reference(x: Tensor, *, inner_weight: Tensor) -> Tensor:
        return x.log() * inner_weight

    seen = []

    def sample(shape: tuple[int, ...]) -> Tensor:
        seen.append(shape)
        return 1 + torch.rand(shape)

    options: dict[str, Any] = {"may_give_unneeded": True, "sample": sample}
    assert check_operation(Log, reference, SHAPES, **options)
    assert (5, 8) in seen
    # The logarithm of a negative number: NaN on both sides, and no differences to be had.
    assert check_operation(Log, reference, SHAPES, may_give_unneeded=True, numeric=False)


def test_bad_references() -> None:
    message = "the reference fails: the output of the reference must be a tensor, got"
    fails(Scale, message, lambda x, scale: 3)
    fails(Scale, "unexpected keyword argument 'scale'", lambda x: x)
    fails(Scale, "gives 2 outputs, wanted 1", lambda x, scale: (x, x))
    with pytest.raises(TypeError, match="a check is of fusible operations"):
        check_operation(torch.nn.GELU, lambda x: x, SHAPES)
