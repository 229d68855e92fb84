"""Named channels between an extra output and later extra inputs of one fuser."""

from __future__ import annotations

import copy
import re
from itertools import product

import pytest
import torch
from reference import FLOAT_DTYPES, check_against_reference, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

Linear, Sequential = te.ops.Linear, te.ops.Sequential


def fork(name: str = "", *, output_to_caller: bool = False) -> te.ops.MakeExtraOutput:
    op = te.ops.MakeExtraOutput()
    if name:
        op.set_extra_output_channel(0, name, output_to_caller=output_to_caller)
    return op


def join(name: str = "") -> te.ops.AddExtraInput:
    op = te.ops.AddExtraInput()
    if name:
        op.set_extra_input_channel(0, name)
    return op


# -- what they compute


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_residual(dtype: torch.dtype) -> None:
    model = Sequential(fork("r"), Linear(8, 16, dtype=dtype), te.ops.SwiGLU(), join("r"))
    y = model(torch.randn(3, 8, dtype=dtype))
    assert isinstance(y, torch.Tensor)
    check_against_reference(model, make_input(3, 8, dtype=dtype), scale=3)


@pytest.mark.parametrize("output_to_caller", [True, False])
def test_output_to_caller(output_to_caller: bool) -> None:
    model = Sequential(
        te.ops.SiLU(), fork("r", output_to_caller=output_to_caller), Linear(8, 8), join("r")
    )
    result = model(torch.randn(3, 8))
    assert isinstance(result, tuple) == output_to_caller
    check_against_reference(model, make_input(3, 8))


def test_output_to_caller_is_the_default() -> None:
    op = te.ops.MakeExtraOutput()
    op.set_extra_output_channel(0, "r")
    x = torch.randn(3, 8)
    y, extra = Sequential(op, te.ops.ConstantScale(2.0), join("r"))(x)
    torch.testing.assert_close(y, 3 * x)
    assert torch.equal(extra, x)


@pytest.mark.parametrize("used", ["output", "extra", "both"])
@pytest.mark.parametrize("fuse", [True, False])
def test_gradients_by_the_channel_and_by_the_caller(used: str, fuse: bool) -> None:
    ops = [fork("r", output_to_caller=True), te.ops.ConstantScale(2.0), join("r")]
    fuser = te.ops.OperationFuser(ops, fuse=fuse)
    x = make_input(3, 8)
    y, extra = fuser(x)
    loss = {"output": y.sum(), "extra": 10 * extra.sum(), "both": y.sum() + 10 * extra.sum()}
    loss[used].backward()
    assert (x.grad == {"output": 3, "extra": 10, "both": 13}[used]).all()


@pytest.mark.parametrize("fuse", [True, False])
def test_fan_out_sums_gradients(fuse: bool) -> None:
    scale = te.ops.ConstantScale
    ops = [fork("r"), scale(2.0), join("r"), scale(3.0), join("r"), scale(5.0), join("r")]
    fuser = te.ops.OperationFuser(ops, fuse=fuse)
    x = make_input(3, 8)
    y = fuser(x)
    wanted = ((2 + 1) * 3 + 1) * 5 + 1
    torch.testing.assert_close(y, wanted * x)
    y.sum().backward()
    assert (x.grad == wanted).all()
    model = Sequential(fork("r"), Linear(8, 8), join("r"), Linear(8, 8), te.ops.GELU(), join("r"))
    check_against_reference(model, make_input(3, 8), scale=3)


def test_two_channels_that_cross() -> None:
    model = Sequential(
        fork("a"),
        Linear(8, 8),
        fork("b", output_to_caller=True),
        te.ops.GELU(),
        join("a"),
        te.ops.LayerNorm(8),
        join("b"),
    )
    check_against_reference(model, make_input(3, 8), scale=3)


def test_channels_beside_plain_extra_inputs_and_outputs() -> None:
    model = Sequential(fork(), join(), fork("a"), join(), Linear(8, 8), fork(), join("a"))
    x, first, second = (make_input(3, 8) for _ in range(3))
    assert model.num_extra_inputs == 2
    results = model(x, first, second)
    assert len(results) == 3
    assert torch.equal(results[1], x)
    check_against_reference(model, x, first, second)
    with pytest.raises(ValueError, match="take 2 extra inputs, got 3"):
        model(x, first, second, second)


def test_scales_from_a_channel() -> None:
    """An extra output need not have the input's shape."""

    class RowNorms(te.ops.BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            basic_op_ctxs[0].save_for_backward(input_)
            return input_, [(input_.square().sum(-1),)]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            (x,) = basic_op_ctxs[0].saved_tensors
            (grad_norms,) = basic_op_grad_extra_outputs[0]
            return grad_output + 2 * x * grad_norms.unsqueeze(-1), [()], [()]

    norms, act = RowNorms(), te.ops.ScaledSwiGLU()
    norms.set_extra_output_channel(0, "scales", output_to_caller=False)
    act.set_extra_input_channel(0, "scales")
    model = Sequential(norms, Linear(8, 8), act)
    x = make_input(3, 8)
    y = model(x)
    y.sum().backward()
    x2 = x.detach().requires_grad_()
    a, b = model[1](x2).chunk(2, -1)
    wanted = torch.nn.functional.silu(a) * b * x2.square().sum(-1, keepdim=True)
    wanted.sum().backward()
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(x.grad, x2.grad)


def test_integers_through_a_channel() -> None:
    """What has no gradient travels too: the index of the largest value picks a row of a table."""

    class Argmax(te.ops.BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return 2 * input_, [(input_.argmax(-1),)]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return 2 * grad_output, [()], [()]

    class AddRow(te.ops.BasicOperation):
        num_extra_inputs = 1

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(8, 8))

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            ((index,),) = basic_op_extra_inputs
            assert not index.is_floating_point()
            basic_op_ctxs[0].save_for_backward(index)
            return input_ + self.table[index], [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            (index,) = basic_op_ctxs[0].saved_tensors
            grad_table = torch.zeros_like(self.table).index_add_(0, index, grad_output)
            return grad_output, [(grad_table,)], [(None,)]

    for to_caller in (False, True):
        argmax, add = Argmax(), AddRow()
        argmax.set_extra_output_channel(0, "index", output_to_caller=to_caller)
        add.set_extra_input_channel(0, "index")
        model = Sequential(argmax, te.ops.ConstantScale(3.0), add)
        x = make_input(3, 8)
        result = model(x)
        y = result[0] if to_caller else result
        if to_caller:
            assert torch.equal(result[1], x.argmax(-1))
            assert not result[1].requires_grad
        torch.testing.assert_close(y, 6 * x + add.table[x.argmax(-1)])
        y.sum().backward()
        assert (x.grad == 6).all()
        wanted = torch.zeros(8, 8).index_add_(0, x.argmax(-1), torch.ones(3, 8))
        torch.testing.assert_close(add.table.grad, wanted)


@pytest.mark.parametrize("fuse", [True, False])
def test_what_needs_a_gradient_is_told(fuse: bool) -> None:
    """A channel needs a gradient when its producer runs in backward, whatever the tensor says."""
    for x_grad, before, after in product([True, False], repeat=3):
        first, second = Linear(8, 8).requires_grad_(before), Linear(8, 8).requires_grad_(after)
        ops = [first, fork("r", output_to_caller=True), second, join("r")]
        fuser = te.ops.OperationFuser(ops, fuse=fuse)
        x = make_input(3, 8, requires_grad=x_grad)
        y, extra = fuser(x)
        assert y.requires_grad == (x_grad or before or after)
        assert extra.requires_grad == (x_grad or before)
        if y.requires_grad:
            y.sum().backward()
        assert (first.weight.grad is not None) == before
        assert (second.weight.grad is not None) == after
        assert (x.grad is not None) == x_grad


def test_extra_inputs_flag_in_the_context() -> None:
    flags = []

    class Add(te.ops.BasicOperation):
        num_extra_inputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            ctx = basic_op_ctxs[0]
            flags.append((ctx.requires_grad, ctx.input_requires_grad))
            flags.append(bool(ctx.extra_inputs_requires_grad & 1))
            return input_ + basic_op_extra_inputs[0][0], [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return grad_output, [()], [(grad_output,)]

    add = Add()
    add.set_extra_input_channel(0, "r")
    linear = Linear(8, 8)
    fuser = te.ops.OperationFuser([fork("r"), linear, add])
    fuser(make_input(3, 8))
    assert flags == [(True, True), True]
    flags.clear()
    fuser(make_input(3, 8, requires_grad=False))
    assert flags == [(True, True), False]
    flags.clear()
    linear.requires_grad_(False)
    fuser(make_input(3, 8, requires_grad=False))
    assert flags == [(False, False), False]


# -- alone


def test_an_operation_by_itself_takes_and_gives_everything() -> None:
    x, extra = make_input(3, 8), make_input(3, 8)
    a, b = fork("r"), join("r")
    y, other = a(x)
    assert torch.equal(y, x)
    assert torch.equal(other, x)
    torch.testing.assert_close(b(x, extra), x + extra)
    with pytest.raises(ValueError, match="take 1 extra inputs, got 0"):
        b(x)


def test_hooks_split_the_fuser_but_not_the_channel() -> None:
    model = Sequential(fork("r"), Linear(8, 8), te.ops.GELU(), join("r"))
    x = make_input(3, 8)
    wanted = model(x)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    model[3].register_forward_pre_hook(lambda module, args: seen.append(args))
    got = model(x)
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, wanted)
    assert len(seen) == 2
    check_against_reference(model, make_input(3, 8))


def test_channels_survive_copies() -> None:
    model = Sequential(fork("r"), te.ops.ConstantScale(2.0), join("r"))
    x = torch.randn(3, 8)
    model(x)
    clone = copy.deepcopy(model)
    torch.testing.assert_close(clone(x), 3 * x)
    fresh = copy.deepcopy(clone[0])
    fresh.set_extra_output_channel(0, "other")  # a copy is not fixed yet


# -- errors


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (
            lambda: [te.ops.GELU(), join("r")],
            "channel 'r', which AddExtraInput (operation 1) takes, has no producer",
        ),
        (
            lambda: [join("r"), te.ops.GELU(), fork("r", output_to_caller=True)],
            "channel 'r', which AddExtraInput (operation 0) takes, has no earlier producer: "
            "MakeExtraOutput (operation 2) comes later",
        ),
        (
            lambda: [fork("r"), Linear(8, 8), fork("r"), join("r")],
            "channel 'r' has multiple producers: MakeExtraOutput (operation 0) and "
            "MakeExtraOutput (operation 3)",
        ),
    ],
)
def test_wrong_wiring(ops, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        te.ops.OperationFuser(ops())
    with pytest.raises(ValueError, match=re.escape(message)):
        Sequential(*ops())(torch.randn(3, 8))


def test_a_channel_ends_with_its_fuser() -> None:
    model = Sequential(fork("r"), torch.nn.ReLU(), join("r"))
    with pytest.raises(ValueError, match="channel 'r'"):
        model(torch.randn(3, 8))


def test_in_place_addition_cannot_take_a_channel() -> None:
    add = te.ops.AddExtraInput(in_place=True)
    add.set_extra_input_channel(0, "r")
    message = "AddExtraInput (operation 1) works in place, so it cannot take its extra input from"
    with pytest.raises(ValueError, match=re.escape(message)):
        te.ops.OperationFuser([fork("r"), add])


def test_bindings_are_fixed_once_read() -> None:
    a, b = fork("r"), join("r")
    a.set_extra_output_channel(0, "s", output_to_caller=False)
    b.set_extra_input_channel(0, "s")
    model = Sequential(a, te.ops.ConstantScale(2.0), b)
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), 3 * x)
    message = "its channels are fixed once a fuser has read them"
    with pytest.raises(RuntimeError, match=rf"\[MakeExtraOutput\] {message}"):
        a.set_extra_output_channel(0, "t")
    with pytest.raises(RuntimeError, match=rf"\[AddExtraInput\] {message}"):
        b.set_extra_input_channel(0, "t")
    torch.testing.assert_close(model(x), 3 * x)


def test_wrong_wiring_can_be_put_right() -> None:
    """Nothing was captured, so nothing is fixed."""
    a, b = fork("r"), join("s")
    with pytest.raises(ValueError, match="channel 's'"):
        Sequential(a, b)(torch.randn(3, 8))
    b.set_extra_input_channel(0, "r")
    x = torch.randn(3, 8)
    torch.testing.assert_close(Sequential(a, b)(x), 2 * x)


@pytest.mark.parametrize("index", [1, 7, -1, -2, 2**70])
def test_index_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match=rf"\[MakeExtraOutput\] has 1 extra outputs.*{index}"):
        te.ops.MakeExtraOutput().set_extra_output_channel(index, "r")
    with pytest.raises(IndexError, match=rf"\[AddExtraInput\] has 1 extra inputs.*{index}"):
        te.ops.AddExtraInput().set_extra_input_channel(index, "r")
    with pytest.raises(IndexError, match=rf"\[GELU\] has 0 extra inputs.*{index}"):
        te.ops.GELU().set_extra_input_channel(index, "r")


@pytest.mark.parametrize("index", ["0", None, 0.0])
def test_index_that_is_no_index(index: object) -> None:
    with pytest.raises(TypeError, match=r"\[AddExtraInput\] index must be an int, got"):
        te.ops.AddExtraInput().set_extra_input_channel(index, "r")
    with pytest.raises(TypeError, match=r"\[MakeExtraOutput\] index must be an int, got"):
        te.ops.MakeExtraOutput().set_extra_output_channel(index, "r")


@pytest.mark.parametrize("name", ["", 3, b"r", ["r"]])
def test_name_that_is_no_name(name: object) -> None:
    message = r"channel must be a non-empty string or None, got"
    with pytest.raises(ValueError, match=rf"\[AddExtraInput\] {message}"):
        te.ops.AddExtraInput().set_extra_input_channel(0, name)
    with pytest.raises(ValueError, match=rf"\[MakeExtraOutput\] {message}"):
        te.ops.MakeExtraOutput().set_extra_output_channel(0, name)


@pytest.mark.parametrize("flag", [None, 0, 1, "no", torch.tensor(True)])
def test_flag_that_is_no_bool(flag: object) -> None:
    op = te.ops.MakeExtraOutput()
    with pytest.raises(TypeError, match=r"\[MakeExtraOutput\] output_to_caller must be a bool"):
        op.set_extra_output_channel(0, "r", output_to_caller=flag)
    y, extra = op(torch.randn(3, 8))  # nothing was bound
    assert torch.equal(y, extra)


def test_none_takes_a_binding_away() -> None:
    a, b = fork("r"), join("r")
    a.set_extra_output_channel(0, None)
    b.set_extra_input_channel(0, None)
    x, extra = torch.randn(3, 8), torch.randn(3, 8)
    y, other = Sequential(a, b)(x, extra)
    torch.testing.assert_close(y, x + extra)
    assert torch.equal(other, x)


# -- nobody need take it


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_channel_that_nobody_takes(place: int, fuse: bool) -> None:
    ops = [Linear(8, 8), te.ops.GELU()]
    ops.insert(place, fork("unused"))
    fuser = te.ops.OperationFuser(ops, fuse=fuse)
    x = make_input(3, 8)
    y = fuser(x)
    assert isinstance(y, torch.Tensor)
    check_against_reference(Sequential(*ops), make_input(3, 8), scale=3)


def test_an_output_of_python_that_nobody_takes() -> None:
    """Its gradient is zeros; it may be left out."""
    grads = []

    class Both(te.ops.BasicOperation):
        num_extra_outputs = 2

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return 2 * input_, [(input_ * 1, None)]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            grads.extend(basic_op_grad_extra_outputs[0])
            return 2 * grad_output, [()], [()]

    op = Both()
    op.set_extra_output_channel(0, "a", output_to_caller=False)
    op.set_extra_output_channel(1, "b", output_to_caller=False)
    x = make_input(3, 8)
    y = Sequential(op, te.ops.ConstantScale(3.0))(x)
    y.sum().backward()
    assert (x.grad == 6).all()
    assert grads[0].shape == (3, 8)
    assert not grads[0].any()
    assert grads[1] is None
