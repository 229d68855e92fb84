"""Python operations with extra inputs and outputs, in the classic and in the split form."""

from __future__ import annotations

import pytest
import torch
from reference import make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")


class ClassicMulAdd(te.ops.BasicOperation):
    """``w x a + b``, where a and b are extra inputs; also gives ``x a`` and the sum of x."""

    num_extra_inputs = 2
    num_extra_outputs = 2

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((8,), 1.5))

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        ((a, b),) = basic_op_extra_inputs
        (ctx,) = basic_op_ctxs
        ctx.save_for_backward(input_, a, self.w)
        product = input_ * a
        return self.w * product + b, [(product, input_.sum())]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        ((grad_product, grad_sum),) = basic_op_grad_extra_outputs
        x, a, w = basic_op_ctxs[0].saved_tensors
        dp = w * grad_output + grad_product
        dw = (grad_output * x * a).sum(0)
        return dp * a + grad_sum, [(dw,)], [(dp * x, grad_output)]


class SplitMulAdd(ClassicMulAdd):
    """The same in two halves."""

    def fuser_forward_compute(self, input_, *, requires_grad, basic_op_extra_inputs, **unused):
        ((a, b),) = basic_op_extra_inputs
        product = input_ * a
        return self.w * product + b, [(product, input_.sum())], [()]

    def fuser_forward_save_ctx(
        self, basic_op_ctxs, input_, tensors_to_save, *, basic_op_extra_inputs, **unused
    ):
        assert tensors_to_save == [()]
        ((a, _),) = basic_op_extra_inputs
        basic_op_ctxs[0].save_for_backward(input_, a, self.w)


class StateMulAdd(ClassicMulAdd):
    """The same, which also keeps fresh tensors and plain state."""

    def fuser_forward_compute(self, input_, *, requires_grad, basic_op_extra_inputs, **unused):
        assert isinstance(requires_grad, list)
        ((a, b),) = basic_op_extra_inputs
        product = input_ * a
        kept = [(input_.clone(), a.clone(), self.w.detach().clone())]
        return self.w * product + b, [(product, input_.sum())], kept, [{"rows": len(input_)}]

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        basic_op_ctxs[0].save_for_backward(*tensors_to_save[0])

    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        assert basic_op_ctxs[0].rows == len(grad_output)
        return super().fuser_backward(basic_op_ctxs, grad_output, **kwargs)


FORMS = [ClassicMulAdd, SplitMulAdd, StateMulAdd]


def reference(op: ClassicMulAdd, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple:
    return op.w * x * a + b, x * a, x.sum()


def loss(outputs: tuple, used: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
    return sum(((k + 2) * outputs[k].square()).sum() for k in used)


def check(op, model, plain, inputs, used=(0, 1, 2)) -> None:
    """Compares the outputs and all gradients to those of autograd."""
    results = []
    for function in (model, plain):
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        op.zero_grad()
        outputs = function(*leaves)
        loss(outputs, used).backward()
        grads = [x.grad for x in leaves] + [op.w.grad]
        # A branch without a gradient gives zeros or nothing.
        grads = [torch.zeros(()) if g is None or not g.any() else g.clone() for g in grads]
        results.append([*outputs, *grads])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("cls", FORMS)
@pytest.mark.parametrize("used", [(0, 1, 2), (0,), (1,), (2,), (1, 2)])
def test_alone(cls: type, used: tuple[int, ...]) -> None:
    op = cls()
    inputs = [make_input(3, 8) for _ in range(3)]
    assert len(op(*inputs)) == 3
    check(op, op, lambda *i: reference(op, *i), inputs, used)


@pytest.mark.parametrize("cls", FORMS)
def test_partly_frozen(cls: type) -> None:
    for flags in [(True, False, False), (False, True, False), (False, False, True)]:
        op = cls()
        inputs = [make_input(3, 8, requires_grad=flag) for flag in flags]
        check(op, op, lambda *i, op=op: reference(op, *i), inputs)
        op.w.requires_grad_(False)
        outputs = op(*inputs)
        assert all(y.requires_grad for y in outputs)


@pytest.mark.parametrize("cls", FORMS)
def test_among_built_in_operations(cls: type) -> None:
    op = cls()
    linear = te.ops.Linear(8, 8)
    model = te.ops.Sequential(linear, te.ops.MakeExtraOutput(), op, te.ops.GELU())
    inputs = [make_input(3, 8) for _ in range(3)]
    _, first, *others = model(*inputs)
    assert len(others) == 2

    def plain(x, a, b):
        h = torch.nn.functional.linear(x, linear.weight, linear.bias)
        out, second, third = reference(op, h, a, b)
        return torch.nn.functional.gelu(out, approximate="tanh"), second, third

    torch.testing.assert_close(first, linear(inputs[0]))
    check(op, lambda *i: [model(*i)[k] for k in (0, 2, 3)], plain, inputs)


@pytest.mark.parametrize("cls", FORMS)
def test_through_channels(cls: type) -> None:
    op, fork, join = cls(), te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    fork.set_extra_output_channel(0, "x", output_to_caller=False)
    op.set_extra_input_channel(1, "x")
    op.set_extra_output_channel(0, "product", output_to_caller=True)
    join.set_extra_input_channel(0, "product")
    model = te.ops.Sequential(fork, te.ops.SiLU(), op, join)
    inputs = [make_input(3, 8), make_input(3, 8)]

    def plain(x, a):
        out, product, total = reference(op, torch.nn.functional.silu(x), a, x)
        return out + product, product, total

    check(op, model, plain, inputs)


@pytest.mark.parametrize("cls", FORMS)
def test_without_gradients(cls: type) -> None:
    op = cls()
    inputs = [torch.randn(3, 8) for _ in range(3)]
    with torch.no_grad():
        outputs = op(*inputs)
    assert not any(y.requires_grad for y in outputs)
    for got, wanted in zip(outputs, reference(op, *inputs), strict=True):
        torch.testing.assert_close(got, wanted)


def test_numbers_may_be_set_by_the_constructor() -> None:
    class Sum(te.ops.BasicOperation):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.num_extra_inputs = count

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            return sum(basic_op_extra_inputs[0], input_), [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return grad_output, [()], [(grad_output,) * self.num_extra_inputs]

    x = make_input(3, 8)
    for count in (1, 3):
        model = te.ops.Sequential(te.ops.Identity(), Sum(count))
        extras = [make_input(3, 8) for _ in range(count)]
        y = model(x, *extras)
        torch.testing.assert_close(y, sum(extras, x))
        y.sum().backward()
        assert all((e.grad == 1).all() for e in extras)


def test_gradients_of_unused_extra_outputs_are_zeros_in_python() -> None:
    """A Python backward need not ask whether a gradient is there."""
    seen = []

    class Fork(te.ops.BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_ * 1, [(input_[:, :2] * 1,)]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            seen.append(basic_op_grad_extra_outputs[0][0])
            return grad_output, [()], [()]

    y, _ = Fork()(make_input(3, 8))
    y.sum().backward()
    assert seen[0].shape == (3, 2)
    assert not seen[0].any()


def test_an_extra_output_that_is_the_input() -> None:
    class Fork(te.ops.BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_, [(input_,)]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            return grad_output + 2 * basic_op_grad_extra_outputs[0][0], [()], [()]

    x = make_input(3, 8)
    y, extra = Fork()(x)
    (y.sum() + extra.sum()).backward()
    assert (x.grad == 3).all()
