"""Basic operations written in Python, in all forms, alone and among built-in ones."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from custom_support import ClassicScale, SplitScale
from reference import FLOAT_DTYPES, assert_close, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")


class StateScale(ClassicScale):
    """The same, but what was saved is decided at run time and told by plain state."""

    def op_forward_compute(self, input_, *, requires_grad, **unused):
        out = self.scale * input_
        if input_.numel() % 2 == 0:
            return out, (input_.detach().clone(),), {"format": "input", "shape": input_.shape}
        return out, (out,), {"format": "output", "shape": input_.shape}

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
        ctx.save_for_backward(self.scale, *tensors_to_save)

    def op_backward(self, ctx, grad_output):
        scale, saved = ctx.saved_tensors
        assert ctx.shape == tuple(grad_output.shape)
        input_ = saved if ctx.format == "input" else saved / scale
        return scale * grad_output, ((input_ * grad_output).sum(),)


SCALES = [ClassicScale, SplitScale, StateScale]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("cls", SCALES)
def test_alone(cls: type, dtype: torch.dtype) -> None:
    for shape in [(3, 8), (3, 5), (2, 3, 4), (7,)]:
        op, x = cls(dtype), make_input(*shape, dtype=dtype)
        grad = torch.randn(shape, dtype=dtype)
        y = op(x)
        y.backward(grad)
        assert_close(y, 1.5 * x.double(), dtype)
        assert_close(x.grad, 1.5 * grad.double(), dtype)
        wanted = (x.double() * grad.double()).sum()
        assert_close(op.scale.grad, wanted, dtype, scale=10)


@pytest.mark.parametrize("cls", SCALES)
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_among_built_in_operations(cls: type, position: int) -> None:
    scale = cls()
    linear = te.ops.Linear(8, 8)
    ops: list[torch.nn.Module] = [te.ops.LayerNorm(8), linear, te.ops.SiLU()]
    ops.insert(position, scale)
    model = te.ops.Sequential(*ops)
    x = make_input(3, 8)
    y = model(x)
    y.square().sum().backward()
    got = [y, x.grad, scale.scale.grad, linear.weight.grad]

    x2 = x.detach().requires_grad_()
    model.zero_grad()
    y2 = x2
    for op in ops:
        y2 = op.scale * y2 if op is scale else op(y2)
    y2.square().sum().backward()
    for a, b in zip(got, [y2, x2.grad, scale.scale.grad, linear.weight.grad], strict=True):
        torch.testing.assert_close(a, b)
    assert len(model._module_groups) == 1


@pytest.mark.parametrize("cls", SCALES)
def test_frozen(cls: type) -> None:
    op = cls()
    op.scale.requires_grad_(False)
    x = make_input(3, 8)
    op(x).sum().backward()
    assert op.scale.grad is None
    assert (x.grad == 1.5).all()
    assert not op(torch.randn(3, 8)).requires_grad
    op.scale.requires_grad_(True)
    op(torch.randn(3, 8)).sum().backward()
    assert op.scale.grad is not None
    with torch.no_grad():
        assert not op(x).requires_grad


def test_what_is_saved_is_known_to_autograd() -> None:
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        model = te.ops.Sequential(ClassicScale(), SplitScale())
        model(make_input(3, 8))
        assert len(packed) == 4
        packed.clear()
        with torch.no_grad():
            model(make_input(3, 8))
        assert not packed
    x = make_input(3, 8) * 1
    y = ClassicScale()(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_split_form_saves_only_for_a_backward() -> None:
    calls = []

    class Op(te.ops.BasicOperation):
        def op_forward_compute(self, input_, *, requires_grad, **unused):
            calls.append(("compute", requires_grad))
            return 2 * input_, ()

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, requires_grad, **unused):
            calls.append(("save", requires_grad))

        def op_backward(self, ctx, grad_output):
            return 2 * grad_output, ()

    op = Op()
    op(make_input(3, 8))
    assert calls == [("compute", True), ("save", True)]
    calls.clear()
    op(torch.randn(3, 8))
    assert calls == [("compute", False)]


def test_plain_state_of_every_kind() -> None:
    class Format(enum.Enum):
        E4M3 = 1
        E5M2 = 2

    state = {
        "flag": True,
        "count": 3,
        "factor": 0.5,
        "name": "rowwise",
        "shape": (2, 3),
        "size": torch.Size([4]),
        "dtype": torch.bfloat16,
        "nothing": None,
        "kind": Format.E5M2,
    }
    seen: dict[str, Any] = {}

    class Op(te.ops.BasicOperation):
        def op_forward_compute(self, input_, **unused):
            return 2 * input_, (), state

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
            seen.update({name: getattr(ctx, name) for name in state})

        def op_backward(self, ctx, grad_output):
            assert {name: getattr(ctx, name) for name in state} == state
            assert type(ctx.flag) is bool
            return 2 * grad_output, ()

    Op()(make_input(3, 8)).sum().backward()
    assert seen == state


def test_any_attribute_of_the_context() -> None:
    class Op(te.ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            assert ctx.requires_grad
            assert not hasattr(ctx, "shape")
            ctx.shape = input_.shape
            ctx.function = lambda g: 3 * g
            ctx.things = {"a": [1, 2]}
            ctx.number = 2**70
            return 3 * input_

        def op_backward(self, ctx, grad_output):
            assert ctx.shape == grad_output.shape
            assert ctx.things == {"a": [1, 2]}
            assert ctx.number == 2**70
            with pytest.raises(AttributeError, match="missing"):
                _ = ctx.missing
            return ctx.function(grad_output), ()

    x = make_input(3, 8)
    Op()(x).sum().backward()
    assert (x.grad == 3).all()


def test_contexts_of_two_calls_are_apart() -> None:
    op = ClassicScale()
    a, b = make_input(3, 8), make_input(5, 8)
    y, z = op(a), op(b)
    (2 * y.sum() + z.sum()).backward()
    torch.testing.assert_close(op.scale.grad, 2 * a.sum() + b.sum())


def test_several_parameters_and_missing_gradients() -> None:
    class Affine(te.ops.BasicOperation):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8))
            self.unused = None
            self.register_parameter("none", None)
            self.bias = torch.nn.Parameter(torch.randn(8))

        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_)
            return self.weight * input_ + self.bias

        def op_backward(self, ctx, grad_output):
            (x,) = ctx.saved_tensors
            return None, ((x * grad_output).sum(0), None)

    op, x = Affine(), torch.randn(3, 8)
    op(x).sum().backward()
    torch.testing.assert_close(op.weight.grad, x.sum(0))
    assert op.bias.grad is None


def test_submodules_of_an_operation() -> None:
    """Parameters of modules inside count as the operation's, in their order."""

    class Gate(te.ops.BasicOperation):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
            self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())

        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_)
            return self.scale * self.inner(input_)

        def op_backward(self, ctx, grad_output):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                leaves = [x, self.scale, *self.inner.parameters()]
                y = self.scale * self.inner(x)
            dx, *grads = torch.autograd.grad(y, leaves, grad_output)
            return dx, grads

    op, x = Gate(), make_input(3, 8)
    assert {name for name, _ in op.named_parameters()} == {
        "scale",
        "inner.0.weight",
        "inner.0.bias",
    }
    model = te.ops.Sequential(te.ops.SiLU(), op)
    model(x).square().sum().backward()
    got = [x.grad, *(p.grad.clone() for p in op.parameters())]
    x2 = x.detach().requires_grad_()
    op.zero_grad()
    (op.scale * op.inner(torch.nn.functional.silu(x2))).square().sum().backward()
    for a, b in zip(got, [x2.grad, *(p.grad for p in op.parameters())], strict=True):
        torch.testing.assert_close(a, b)


def test_python_sees_the_mode() -> None:
    class Noise(te.ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            return input_ + 1 if self.training else input_.clone()

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    model = te.ops.Sequential(Noise(), te.ops.Identity())
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), x + 1)
    torch.testing.assert_close(model.eval()(x), x)


def test_methods_run_without_grad_mode() -> None:
    modes = []

    class Op(te.ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            modes.append(torch.is_grad_enabled())
            return 2 * input_

        def op_backward(self, ctx, grad_output):
            modes.append(torch.is_grad_enabled())
            return 2 * grad_output, ()

    y = Op()(make_input(3, 8))
    y.sum().backward()
    assert modes == [False, False]
    assert torch.is_grad_enabled()


def test_returning_the_input_itself() -> None:
    class Same(te.ops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            return input_

        def op_backward(self, ctx, grad_output):
            return 3 * grad_output, ()

    x = make_input(3, 8)
    y = te.ops.Sequential(Same(), Same())(x)
    assert y is not x
    y.sum().backward()
    assert (x.grad == 9).all()
