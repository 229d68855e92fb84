"""What Python operations are given says whether it needs a gradient, and what None means."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from reference import make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

Tensor = torch.Tensor


def fork(name: str = "r", *, to_caller: bool = False) -> te.ops.MakeExtraOutput:
    op = te.ops.MakeExtraOutput()
    op.set_extra_output_channel(0, name, output_to_caller=to_caller)
    return op


class Times(te.ops.BasicOperation):
    """``x e``, as a script of te.ops writes it: it asks the tensors what is needed."""

    num_extra_inputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        ((extra,),), (ctx,) = basic_op_extra_inputs, basic_op_ctxs
        self.seen.append((input_.requires_grad, extra.requires_grad))
        ctx.extra_needed, ctx.input_needed = extra.requires_grad, input_.requires_grad
        ctx.save_for_backward(
            input_ if extra.requires_grad else None, extra if input_.requires_grad else None
        )
        return input_ * extra, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (ctx,) = basic_op_ctxs
        x, extra = ctx.saved_tensors
        dx = grad_output * extra if ctx.input_needed else None
        return dx, [()], [(grad_output * x if ctx.extra_needed else None,)]


class SplitTimes(Times):
    """The same in two halves."""

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, **unused):
        ((extra,),) = basic_op_extra_inputs
        self.seen.append((input_.requires_grad, extra.requires_grad))
        return input_ * extra, [()], [()], [{"rows": len(input_)}]

    def fuser_forward_save_ctx(
        self, basic_op_ctxs, input_, tensors_to_save, *, basic_op_extra_inputs, **unused
    ):
        ((extra,),), (ctx,) = basic_op_extra_inputs, basic_op_ctxs
        assert self.seen[-1] == (input_.requires_grad, extra.requires_grad)
        ctx.extra_needed, ctx.input_needed = extra.requires_grad, input_.requires_grad
        ctx.save_for_backward(input_, extra)


FORMS = [Times, SplitTimes]


@pytest.mark.parametrize("cls", FORMS)
def test_extra_input_of_a_channel(cls: type) -> None:
    times = cls()
    times.set_extra_input_channel(0, "r")
    model = te.ops.Sequential(te.ops.ConstantScale(2.0), fork(), te.ops.SiLU(), times)
    x = make_input(3, 8)
    model(x).sum().backward()
    assert times.seen == [(True, True)]
    leaf = x.detach().requires_grad_()
    (torch.nn.functional.silu(2 * leaf) * 2 * leaf).sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad)


@pytest.mark.parametrize("cls", FORMS)
def test_flags_are_those_of_the_call(cls: type) -> None:
    for x_grad, weight, extra_grad in product([True, False], repeat=3):
        times, linear = cls(), te.ops.Linear(8, 8).requires_grad_(weight)
        fuser = te.ops.OperationFuser([linear, times])
        x, extra = (
            make_input(3, 8, requires_grad=x_grad),
            make_input(3, 8, requires_grad=extra_grad),
        )
        y = fuser(x, extra)
        assert times.seen == [(x_grad or weight, extra_grad)]
        assert (x.requires_grad, extra.requires_grad) == (x_grad, extra_grad)
        assert y.requires_grad == (x_grad or weight or extra_grad)
        if not y.requires_grad:
            continue
        y.sum().backward()
        leaf, extra2 = x.detach().requires_grad_(), extra.detach().requires_grad_()
        (torch.nn.functional.linear(leaf, linear.weight, linear.bias) * extra2).sum().backward()
        for given, wanted in ((x, leaf.grad), (extra, extra2.grad)):
            assert (given.grad is not None) == given.requires_grad
            if given.grad is not None:
                torch.testing.assert_close(given.grad, wanted)


@pytest.mark.parametrize("form", ["op_forward", "op_forward_compute"])
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_input_of_an_operation_behind_another(form: str, mode: str) -> None:
    seen = []

    class Classic(te.ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            seen.append((input_.requires_grad, torch.is_grad_enabled()))
            ctx.save_for_backward(input_)
            return input_ * input_

        def op_backward(self, ctx, grad_output):
            (x,) = ctx.saved_tensors
            return 2 * x * grad_output, ()

    class Split(Classic):
        def op_forward_compute(self, input_, **unused):
            seen.append((input_.requires_grad, torch.is_grad_enabled()))
            return input_ * input_, ()

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
            ctx.save_for_backward(input_)

    op = Classic() if form == "op_forward" else Split()
    model = te.ops.Sequential(te.ops.ConstantScale(3.0), op)
    x = make_input(3, 8)
    scope = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with scope[mode]():
        y = model(x)
    assert seen == [(mode == "grad", False)]
    assert y.requires_grad == (mode == "grad")
    torch.testing.assert_close(y, 9 * x.detach() ** 2)
    if mode == "grad":
        y.sum().backward()
        torch.testing.assert_close(x.grad, 18 * x.detach())


def test_what_has_no_gradient_does_not_say_so() -> None:
    """Integers on a channel cannot carry the flag."""
    seen = []

    class Index(te.ops.BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return 2 * input_, [(input_.argmax(-1),)]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return 2 * grad_output, [()], [()]

    class Take(te.ops.BasicOperation):
        num_extra_inputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            ((index,),) = basic_op_extra_inputs
            seen.append(index.requires_grad)
            return input_ + index.unsqueeze(-1), [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return grad_output, [()], [(None,)]

    index, take = Index(), Take()
    index.set_extra_output_channel(0, "index", output_to_caller=False)
    take.set_extra_input_channel(0, "index")
    x = make_input(3, 8)
    te.ops.Sequential(index, take)(x).sum().backward()
    assert seen == [False]
    assert (x.grad == 2).all()


def test_fused_operations_see_the_flags_too(registered: Any) -> None:
    seen = []

    class AddSiLU(te.ops.FusedOperation):
        def __init__(self, *ops: te.ops.FusibleOperation) -> None:
            super().__init__(ops)

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            (extra,), () = basic_op_extra_inputs
            seen.append((input_.requires_grad, extra.requires_grad))
            y = input_ + extra
            basic_op_ctxs[1].save_for_backward(y)
            return torch.nn.functional.silu(y), [(), ()]

    registered("forward", te.ops.Fusion([te.ops.AddExtraInput, te.ops.SiLU], AddSiLU))
    add = te.ops.AddExtraInput()
    add.set_extra_input_channel(0, "r")
    model = te.ops.Sequential(te.ops.GELU(), fork(), te.ops.ConstantScale(2.0), add, te.ops.SiLU())
    x = make_input(3, 8)
    model(x).sum().backward()
    assert seen == [(True, True)]
    leaf = x.detach().requires_grad_()
    h = torch.nn.functional.gelu(leaf, approximate="tanh")
    torch.nn.functional.silu(3 * h).sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad)


# -- what is handed out is the tensor itself in all other ways


@pytest.mark.parametrize("returned", ["input", "extra"])
def test_what_is_handed_out_may_be_returned_and_saved(returned: str) -> None:
    class Pass(te.ops.BasicOperation):
        num_extra_inputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            ((extra,),) = basic_op_extra_inputs
            basic_op_ctxs[0].save_for_backward(input_, extra)
            return (input_ if returned == "input" else extra), [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            zeros = torch.zeros_like(grad_output)
            grads = (grad_output, zeros) if returned == "input" else (zeros, grad_output)
            return grads[0], [()], [(grads[1],)]

    packed: list[Tensor] = []
    op = Pass()
    op.set_extra_input_channel(0, "r")
    model = te.ops.Sequential(te.ops.SiLU(), fork(to_caller=True), te.ops.ConstantScale(2.0), op)
    x = make_input(3, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y, extra = model(x)
    # The input of SiLU, that of the operation and the extra output: each once.
    assert len(packed) == 3
    assert y.requires_grad
    assert not y.is_leaf
    torch.testing.assert_close(y, (2 if returned == "input" else 1) * extra)
    y.sum().backward()
    leaf = x.detach().requires_grad_()
    scale = 2 if returned == "input" else 1
    (scale * torch.nn.functional.silu(leaf)).sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad)


def test_versions_are_shared() -> None:
    """An edit of what the operation saved is seen, whoever made it."""

    class Square(te.ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_)
            return input_ * input_

        def op_backward(self, ctx, grad_output):
            (x,) = ctx.saved_tensors
            return 2 * x * grad_output, ()

    model = te.ops.Sequential(te.ops.SiLU(), te.ops.MakeExtraOutput(), Square())
    y, extra = model(make_input(3, 8))
    with torch.no_grad():
        extra.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_graph_is_recorded() -> None:
    graphs = []

    class Own(te.ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            with torch.enable_grad():
                inner = input_.detach().requires_grad_()
                y = inner.sin()
            ctx.inner, ctx.y = inner, y
            graphs.append((input_.grad_fn, input_.is_leaf))
            return y.detach()

        def op_backward(self, ctx, grad_output):
            return torch.autograd.grad(ctx.y, ctx.inner, grad_output)[0], ()

    x = make_input(3, 8)
    y = te.ops.Sequential(te.ops.ConstantScale(2.0), Own())(x)
    assert graphs == [(None, True)]
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).cos())


def test_in_place_addition_by_a_fusion(registered: Any) -> None:
    """The extra input that a fusion overwrites is the caller's, not something beside it."""

    class Axpy(te.ops.FusedOperation):
        def __init__(self, *ops: te.ops.FusibleOperation) -> None:
            super().__init__(ops)

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            (), (extra,) = basic_op_extra_inputs
            return extra.add_(input_, alpha=self.basic_ops[0].scale), [(), ()]

    pattern = [te.ops.ConstantScale, te.ops.AddExtraInput]
    registered("forward", te.ops.Fusion(pattern, Axpy))
    model = te.ops.Sequential(te.ops.ConstantScale(3.0), te.ops.AddExtraInput(in_place=True))
    for first in ([], [te.ops.Identity()]):
        model = te.ops.Sequential(
            *first, te.ops.ConstantScale(3.0), te.ops.AddExtraInput(in_place=True)
        )
        x, base = make_input(3, 8), make_input(3, 8)
        extra = base * 1
        y = model(x, extra)
        assert y.data_ptr() == extra.data_ptr()
        torch.testing.assert_close(extra, base + 3 * x)
        y.sum().backward()
        assert (x.grad == 3).all()
        assert (base.grad == 1).all()


# -- None for a gradient


class Cut(te.ops.BasicOperation):
    """``sin(x)`` and its parameter, without any gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def op_forward(self, ctx, input_, **unused):
        return self.weight * input_.sin()

    def op_backward(self, ctx, grad_output):
        return None, (None,)


class CutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return weight * x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


def test_none_is_no_gradient_as_in_torch() -> None:
    """Nothing in front of it gets one, and what is behind it is not disturbed."""
    before, cut, after = te.ops.Linear(8, 8), Cut(), te.ops.Linear(8, 8)
    model = te.ops.Sequential(te.ops.LayerNorm(8), before, te.ops.GELU(), cut, after)
    x = make_input(3, 8)
    model(x).sum().backward()

    leaf = x.detach().requires_grad_()
    weights = [w.detach().clone().requires_grad_() for w in (before.weight, cut.weight)]
    h = CutFunction.apply(torch.nn.functional.linear(leaf, weights[0]), weights[1])
    torch.nn.functional.linear(h, after.weight.detach().requires_grad_()).sum().backward()
    assert [leaf.grad, *(w.grad for w in weights)] == [None, None, None]
    assert [x.grad, before.weight.grad, cut.weight.grad, model[0].weight.grad] == [None] * 4
    assert after.weight.grad is not None
    assert after.bias.grad is not None


def test_none_beside_other_gradients() -> None:
    """A branch in front of it still has the gradient of its other end."""
    for to_caller in (True, False):
        cut, join = Cut(), te.ops.AddExtraInput()
        join.set_extra_input_channel(0, "r")
        linear = te.ops.Linear(8, 8)
        model = te.ops.Sequential(te.ops.SiLU(), fork(to_caller=to_caller), linear, cut, join)
        x = make_input(3, 8)
        result = model(x)
        loss = result[0].sum() + 3 * result[1].sum() if to_caller else result.sum()
        loss.backward()
        leaf = x.detach().requires_grad_()
        ((4 if to_caller else 1) * torch.nn.functional.silu(leaf)).sum().backward()
        torch.testing.assert_close(x.grad, leaf.grad)
        assert linear.weight.grad is None or not linear.weight.grad.any()


def test_none_for_an_extra_input_of_a_channel() -> None:
    class Drop(te.ops.BasicOperation):
        num_extra_inputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            return input_ + basic_op_extra_inputs[0][0], [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return grad_output, [()], [(None,)]

    drop = Drop()
    drop.set_extra_input_channel(0, "r")
    x = make_input(3, 8)
    te.ops.Sequential(fork(), te.ops.ConstantScale(2.0), drop)(x).sum().backward()
    assert (x.grad == 2).all()


def test_none_in_front_of_a_python_operation_with_an_extra_output() -> None:
    """It is given zeros for the output that has no gradient."""
    seen = []

    class Fork(te.ops.BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_[:, :4] * 1, [(input_ * 2,)]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            seen.append(grad_output)
            wide = torch.nn.functional.pad(grad_output, (0, 4))
            return wide + 2 * basic_op_grad_extra_outputs[0][0], [()], [()]

    class Cut4(Cut):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

    x = make_input(3, 8)
    y, extra = te.ops.Sequential(Fork(), Cut4())(x)
    (y.sum() + extra.sum()).backward()
    assert seen[0].shape == (3, 4)
    assert not seen[0].any()
    assert (x.grad == 2).all()
