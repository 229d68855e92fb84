"""Mistakes in operations written in Python are told, where they are and what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import make_input

import ligature as te

Basic, Fused = te.ops.BasicOperation, te.ops.FusedOperation


def method(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError


# -- when the class is defined


@pytest.mark.parametrize("base", [Basic, Fused])
@pytest.mark.parametrize("kind", ["op", "fuser"])
def test_forms_of_a_class(base: type, kind: str) -> None:
    classic, compute, save = (f"{kind}_forward{end}" for end in ("", "_compute", "_save_ctx"))
    for wrong, message in [
        ([classic, compute, save], f"Mine defines both {classic} and {compute}"),
        ([classic, compute], f"Mine defines both {classic} and {compute}"),
        ([classic, save], f"Mine defines both {classic} and {save}"),
        ([compute], f"Mine defines {compute} without {save}"),
        ([save], f"Mine defines {save} without {compute}"),
    ]:
        with pytest.raises(TypeError, match=message):
            type("Mine", (base,), dict.fromkeys(wrong, method))
    for right in ([classic], [compute, save], []):
        type("Mine", (base,), dict.fromkeys(right, method))


def test_half_of_the_split_form_may_be_inherited() -> None:
    both = {"op_forward_compute": method, "op_forward_save_ctx": method}
    parent = type("Parent", (Basic,), both)
    type("Child", (parent,), {"op_forward_save_ctx": method})
    with pytest.raises(TypeError, match="Child defines both"):
        type("Child", (parent,), {"op_forward": method, **both})
    type("Child", (te.ops.GELU,), {"op_forward_compute": method})
    type("Child", (te.ops.GELU,), {"op_forward": method})


def test_the_form_of_a_child_replaces_its_parents() -> None:
    class Parent(Basic):
        def op_forward(self, ctx, input_, **unused):
            return input_ * 2

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    class Child(Parent):
        def op_forward_compute(self, input_, **unused):
            return input_ * 3, ()

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
            pass

    class Grandchild(Child):
        def op_forward(self, ctx, input_, **unused):
            return input_ * 4

    x = torch.ones(3, 8)
    assert [op(x)[0, 0].item() for op in (Parent(), Child(), Grandchild())] == [2, 3, 4]


# -- what a forward returns


def operation(returned: Any, form: str = "split", **attributes: Any) -> Basic:
    """An operation whose forward returns ``returned(self, x)``."""

    def compute(self, input_, *args, **unused):
        return returned(self, input_)

    def classic(self, ctx, input_, **unused):
        return returned(self, input_)

    def save(self, ctx, input_, tensors_to_save, **unused):
        pass

    methods: dict[str, Any] = {
        "split": {"op_forward_compute": compute, "op_forward_save_ctx": save},
        "classic": {"op_forward": classic},
        "fuser": {"fuser_forward": classic},
        "fuser split": {"fuser_forward_compute": compute, "fuser_forward_save_ctx": save},
    }[form]
    if form.startswith("fuser"):
        methods["fuser_backward"] = lambda self, ctxs, dy, **unused: (dy, [()], [()])
    else:
        methods["op_backward"] = lambda self, ctx, dy: (dy, ())
    return type("Mine", (Basic,), methods | attributes)()


@pytest.mark.parametrize(
    ("returned", "form", "error", "message"),
    [
        (lambda s, x: x * 1, "split", TypeError, "op_forward_compute must return a tuple, got"),
        (lambda s, x: (x * 1,), "split", ValueError, "must return 2 or 3 results, got 1"),
        (lambda s, x: (x, (), {}, 1), "split", ValueError, "must return 2 or 3 results, got 4"),
        (lambda s, x: (None, ()), "split", RuntimeError, "its forward returned no output"),
        (lambda s, x: (3, ()), "split", TypeError, "the output must be a tensor, got"),
        (lambda s, x: (x * 1, (3,)), "split", TypeError, "a tensor to save must be a tensor"),
        (lambda s, x: (x * 1, x * 1), "split", TypeError, "must be a sequence of tensors, got"),
        (lambda s, x: None, "classic", RuntimeError, "its forward returned no output"),
        (lambda s, x: "x", "classic", TypeError, "the output must be a tensor, got"),
        (lambda s, x: x * 1, "fuser", TypeError, "fuser_forward must return a tuple, got"),
        (lambda s, x: (x * 1, [], []), "fuser", ValueError, "must return 2 results, got 3"),
        (lambda s, x: (x * 1, []), "fuser", ValueError, "extra outputs must be a list with 1"),
        (lambda s, x: (x * 1, [(x,)]), "fuser", RuntimeError, "must give 0 extra outputs, got 1"),
        (lambda s, x: (x * 1, [()]), "fuser split", ValueError, "must return 3 or 4 results"),
        (lambda s, x: (x * 1, [()], []), "fuser split", ValueError, "tensors to save must be a"),
        (lambda s, x: (x * 1, [()], [()], []), "fuser split", ValueError, "state to keep must be"),
    ],
)
def test_wrong_results_of_a_forward(returned, form: str, error: type, message: str) -> None:
    op = operation(returned, form)
    with pytest.raises(error, match=rf"\[Mine\].*{message}"):
        op(make_input(3, 8))


@pytest.mark.parametrize(
    "kept",
    [
        lambda self, x: x,
        lambda self, x: x[1:],
        lambda self, x: x.view(-1),
        lambda self, x: x.detach(),
        lambda self, x: self.scale,
        lambda self, x: self.scale.data,
    ],
)
def test_the_compute_half_may_not_return_an_argument(kept) -> None:
    op = operation(lambda self, x: (self.scale * x, (kept(self, x),)))
    op.scale = torch.nn.Parameter(torch.ones(8))
    message = r"\[Mine\] the compute half of its forward returned an input \(or a view of one\)"
    with pytest.raises(RuntimeError, match=message):
        op(make_input(3, 8))
    fine = operation(lambda self, x: (2 * x, (x.clone(), None)))
    fine(make_input(3, 8))


def test_the_compute_half_may_not_return_an_extra_input() -> None:
    def compute(self, input_, *, basic_op_extra_inputs, **unused):
        return input_ * 2, [()], [(basic_op_extra_inputs[0][0],)]

    methods = {"fuser_forward_compute": compute, "fuser_forward_save_ctx": method}
    op = type("Mine", (Basic,), {**methods, "num_extra_inputs": 1})()
    with pytest.raises(RuntimeError, match="returned an input"):
        op(make_input(3, 8), make_input(3, 8))


@pytest.mark.parametrize("value", [object(), {"a": 1}, torch.ones(2), [0.5], lambda: 0, 2**70])
def test_state_must_be_plain(value: Any) -> None:
    op = operation(lambda self, x: (x * 1, (), {"mine": value}))
    with pytest.raises((TypeError, ValueError), match="state to keep 'mine' must be plain"):
        op(make_input(3, 8))


def test_an_operation_with_extra_inputs_needs_the_fuser_form() -> None:
    """The other forms have no argument for them; they must not be ignored."""
    for form, returned in [("classic", lambda s, x: x * 1), ("split", lambda s, x: (x * 1, ()))]:
        op = operation(returned, form, num_extra_inputs=1)
        with pytest.raises((RuntimeError, TypeError), match=r"\[Mine\] has 1 extra inputs"):
            op(make_input(3, 8), make_input(3, 8))
        op = operation(returned, form, num_extra_outputs=1)
        with pytest.raises((RuntimeError, TypeError), match=r"\[Mine\].* extra outputs"):
            op(make_input(3, 8))


def test_no_forward_or_no_backward() -> None:
    nothing = type("Mine", (Basic,), {})()
    with pytest.raises(RuntimeError, match=r"\[Mine\] has no forward pass"):
        nothing(make_input(3, 8))
    half = type("Mine", (Basic,), {"op_forward": lambda self, ctx, x, **unused: x * 1})()
    with torch.no_grad():
        half(make_input(3, 8))
    with pytest.raises((RuntimeError, AttributeError), match=r"Mine.*backward"):
        half(make_input(3, 8)).sum().backward()


# -- what a backward returns


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda dy: dy, TypeError, "op_backward must return a tuple, got"),
        (lambda dy: (dy,), ValueError, "op_backward must return 2 results, got 1"),
        (lambda dy: (dy, (), ()), ValueError, "op_backward must return 2 results, got 3"),
        (lambda dy: (dy, dy), TypeError, "must be a sequence of tensors, got"),
        (lambda dy: (dy, (dy, dy)), RuntimeError, "must return 1 parameter gradients, got 2"),
        (lambda dy: (dy, ()), RuntimeError, "must return 1 parameter gradients, got 0"),
        (lambda dy: (dy, (3.0,)), TypeError, "a gradient must be a tensor, got"),
        (lambda dy: (2.0, (None,)), TypeError, "a gradient must be a tensor, got"),
    ],
)
def test_wrong_results_of_a_backward(returned, error: type, message: str) -> None:
    class Mine(Basic):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))

        def op_forward(self, ctx, input_, **unused):
            return self.scale * input_

        def op_backward(self, ctx, grad_output):
            return returned(grad_output)

    y = te.ops.Sequential(te.ops.SiLU(), Mine(), te.ops.GELU())(make_input(3, 8))
    with pytest.raises(error, match=rf"\[Mine\].*{message}"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda dy: (dy, [()]), ValueError, "fuser_backward must return 3 results, got 2"),
        (lambda dy: (dy, [], [()]), ValueError, "parameter gradients must be a list with 1"),
        (lambda dy: (dy, [()], []), ValueError, "extra input gradients must be a list with 1"),
        (lambda dy: (dy, [()], [(dy, dy)]), RuntimeError, "return 1 extra input gradients, got 2"),
    ],
)
def test_wrong_results_of_a_fuser_backward(returned, error: type, message: str) -> None:
    class Mine(Basic):
        num_extra_inputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            return input_ + basic_op_extra_inputs[0][0], [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return returned(grad_output)

    y = Mine()(make_input(3, 8), make_input(3, 8))
    with pytest.raises(error, match=rf"\[Mine\].*{message}"):
        y.sum().backward()


def test_gradients_of_another_shape() -> None:
    op = type(
        "Mine",
        (Basic,),
        {
            "op_forward": lambda self, ctx, x, **unused: x * 1,
            "op_backward": lambda self, ctx, dy: (dy[:1, :5], ()),
        },
    )()
    with pytest.raises(RuntimeError, match=r"shape|size"):
        op(make_input(3, 8)).sum().backward()


# -- exceptions of the user


class OwnError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Fragile(Basic):
    """Raises where it is told to."""

    where = ""

    def op_forward(self, ctx, input_, **unused):
        if self.where == "forward":
            raise OwnError(7)
        ctx.save_for_backward(input_)
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        if self.where == "backward":
            raise OwnError(8)
        return 2 * grad_output, ()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_keep_their_type(where: str, alone: bool) -> None:
    op = Fragile()
    model = op if alone else te.ops.Sequential(te.ops.SiLU(), op, te.ops.Linear(8, 8))
    op.where = where
    for _ in range(2):
        with pytest.raises(OwnError, match="code") as error:
            model(make_input(3, 8)).sum().backward()
        assert error.value.code == {"forward": 7, "backward": 8}[where]
        functions = [entry.name for entry in error.traceback]
        assert f"op_{where}" in functions
    assert torch.is_grad_enabled()
    op.where = ""
    x = make_input(3, 8)
    y = model(x)
    y.sum().backward()
    assert x.grad.isfinite().all()
    if alone:
        assert (x.grad == 2).all()


def test_a_failed_backward_may_be_repeated() -> None:
    op, x = Fragile(), make_input(3, 8)
    y = te.ops.Sequential(te.ops.ConstantScale(3.0), op)(x)
    op.where = "backward"
    with pytest.raises(OwnError):
        y.sum().backward(retain_graph=True)
    op.where = ""
    y.sum().backward()
    assert (x.grad == 6).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration, SystemExit])
def test_exceptions_that_are_no_errors(error: type) -> None:
    def fail(self, ctx, input_, **unused):
        raise error

    op = type("Mine", (Basic,), {"op_forward": fail})()
    with pytest.raises(error):
        op(make_input(3, 8))
