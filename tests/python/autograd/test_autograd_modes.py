"""Gradient modes, flags of outputs, and edits in place."""

from __future__ import annotations

import pytest
import torch
from reference import Reference, assert_close, check_against_reference, make_input, make_mlp

import ligature.ops as ops

MODIFIED = "modified by an inplace operation"


# -- modes and flags


def test_no_grad(device):
    model = make_mlp()
    x = make_input(6, 8)
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.no_grad(),
    ):
        y = model(x)
    assert not y.requires_grad
    assert y.grad_fn is None
    assert not saved
    assert_close(y, Reference(model)(x.double()), torch.float32)
    check_against_reference(model, x)


def test_inference_mode(device):
    model = make_mlp()
    x = make_input(6, 8)
    with torch.inference_mode():
        y = model(x)
        inner = x * 1
        z = model(inner)
    assert y.is_inference()
    assert not y.requires_grad
    assert_close(z, y.clone(), torch.float32)
    check_against_reference(model, x)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        model(inner)
    model.requires_grad_(False)
    assert_close(model(inner), y.clone(), torch.float32)


def test_grad_enabled_inside_no_grad(device):
    model = make_mlp()
    x = make_input(6, 8)
    with torch.no_grad(), torch.enable_grad():
        y = model(x)
    assert y.requires_grad
    with torch.no_grad():
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not dx.requires_grad


@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("extra_grad", [False, True])
@pytest.mark.parametrize("frozen", [(), (0,), (3,), (0, 3)])
def test_flags_of_outputs(device, x_grad, extra_grad, frozen):
    model = ops.Sequential(
        ops.Linear(8, 8), ops.MakeExtraOutput(), ops.AddExtraInput(), ops.Linear(8, 8)
    )
    for index in frozen:
        model[index].requires_grad_(False)
    x = make_input(5, 8, requires_grad=x_grad)
    extra = make_input(5, 8, requires_grad=extra_grad)
    before = [p.requires_grad for p in model.parameters()]
    y, z = model(x, extra)
    assert z.requires_grad == (x_grad or 0 not in frozen)
    assert y.requires_grad == (z.requires_grad or extra_grad or 3 not in frozen)
    assert (y.grad_fn is not None) == y.requires_grad
    assert (x.requires_grad, extra.requires_grad) == (x_grad, extra_grad)
    assert [p.requires_grad for p in model.parameters()] == before
    check_against_reference(model, x, extra)
    assert (x.requires_grad, extra.requires_grad) == (x_grad, extra_grad)
    assert [p.requires_grad for p in model.parameters()] == before


@pytest.mark.parametrize(
    "make", [ops.Identity, lambda: ops.Dropout(0.0), lambda: ops.Reshape((6, 8))]
)
def test_an_operation_that_returns_its_input(device, make):
    x = make_input(6, 8)
    for op in (make(), ops.Sequential(make(), make())):
        y = op(x)
        assert y is not x
        assert y.requires_grad
        assert not y.is_leaf
        assert x.is_leaf
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 2.0))
        assert_close(dx, torch.full_like(x, 2.0), torch.float32)
        frozen = x.detach()
        assert not op(frozen).requires_grad
        assert not frozen.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_returned_without_gradients_has_no_flag(device, mode):
    x = make_input(6, 8)
    with mode():
        y = ops.Sequential(ops.Identity(), ops.Dropout(0.0))(x)
        first, second = ops.Sequential(ops.MakeExtraOutput(), ops.ReLU())(x)[::-1]
    assert not any(t.requires_grad for t in (y, first, second))
    assert x.requires_grad
    assert torch.equal(y, x)


def test_freezing_after_a_call_is_seen(device):
    model = make_mlp()
    x = make_input(6, 8)
    check_against_reference(model, x)
    model[1].weight.requires_grad_(False)
    model[3].requires_grad_(False)
    check_against_reference(model, x)
    model.requires_grad_(True)
    check_against_reference(model, x)
    model.requires_grad_(False)
    assert not model(x.detach()).requires_grad
    check_against_reference(model, x)


# -- edits in place between forward and backward


def linear_pair(device, *, weight_grad=True, x_grad=True):
    """The same small model in ligature and in torch, as (model, non-leaf input)."""
    ours = ops.Linear(8, 4)
    theirs = torch.nn.Linear(8, 4)
    theirs.load_state_dict(ours.state_dict())
    leaf = make_input(6, 8, requires_grad=x_grad)
    for model in (ours, theirs):
        model.weight.requires_grad_(weight_grad)
        yield model, leaf * 1


@pytest.mark.parametrize("weight_grad", [False, True])
@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("edited", ["input", "weight", "bias", "view of input"])
def test_edits_are_caught_as_in_torch(device, edited, weight_grad, x_grad):
    outcomes = []
    for model, x in linear_pair(device, weight_grad=weight_grad, x_grad=x_grad):
        y = model(x)
        target = {
            "input": x,
            "weight": model.weight,
            "bias": model.bias,
            "view of input": x[:1],
        }[edited]
        with torch.no_grad():
            target.add_(1)
        try:
            y.sum().backward()
            outcomes.append(None)
        except RuntimeError as error:
            assert MODIFIED in str(error)  # noqa: PT017
            outcomes.append("raised")
    assert outcomes[0] == outcomes[1]
    needed = {"input": weight_grad, "view of input": weight_grad, "weight": x_grad, "bias": False}
    assert outcomes[1] == ("raised" if needed[edited] else None)


def test_optimizer_step_before_backward_is_caught(device):
    model = make_mlp()
    y = model(make_input(6, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


@pytest.mark.parametrize("op", [ops.GELU, ops.SwiGLU, lambda: ops.RMSNorm(8), ops.L2Normalization])
def test_edit_of_the_input_of_an_activation_or_norm(device, op):
    x = make_input(6, 8) * 1
    y = op()(x)
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


def test_edit_of_an_extra_input(device):
    scales = make_input(6) * 1
    y = ops.ScaledSwiGLU()(make_input(6, 8), scales)
    with torch.no_grad():
        scales.zero_()
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


def test_edit_of_an_extra_output_that_backward_needs(device):
    model = ops.Sequential(ops.Linear(8, 8), ops.MakeExtraOutput(), ops.Linear(8, 8))
    y, z = model(make_input(6, 8))
    with torch.no_grad():
        z.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()
    model[2].requires_grad_(False)
    x = make_input(6, 8)
    y, z = model(x)
    with torch.no_grad():
        z.add_(1)
    y.sum().backward()
    reference = Reference(model)
    reference(x.double())[0].sum().backward()
    assert_close(model[0].bias.grad, reference.parameters["0.bias"].grad, torch.float32)


# -- edits of the output


@pytest.mark.parametrize(
    "make",
    [
        lambda: ops.Linear(8, 8),
        make_mlp,
        lambda: ops.Sequential(ops.Linear(8, 8), ops.Reshape((3, 2, 8))),
        lambda: ops.GELU(),
        lambda: ops.RMSNorm(8),
        lambda: ops.ConstantScale(2.0),
    ],
    ids=["linear", "mlp", "reshape", "gelu", "norm", "scale"],
)
def test_edit_of_the_output(device, make):
    model = make()
    x = make_input(6, 8)
    reference = Reference(model)
    x64 = x.detach().double().requires_grad_()
    y, y64 = model(x), reference(x64)
    y.add_(1).mul_(2)
    wanted = (y64 + 1) * 2
    assert_close(y, wanted, torch.float32, scale=10)
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy.double())
    assert_close(x.grad, x64.grad, torch.float32, scale=10)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, reference.parameters[name].grad, torch.float32, scale=10)


def test_edit_of_a_view_of_the_output(device):
    model = ops.Linear(8, 8)
    x = make_input(6, 8)
    y = model(x)
    y[0].zero_()
    y.sum().backward()
    reference = Reference(model)
    x64 = x.detach().double().requires_grad_()
    reference(x64)[1:].sum().backward()
    assert_close(x.grad, x64.grad, torch.float32)
    assert_close(model.weight.grad, reference.parameters["weight"].grad, torch.float32, scale=10)


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_edit_of_an_output_that_is_the_input(device, leaf, alone):
    x = make_input(6, 8)
    x = x if leaf else x * 1
    op = ops.Identity() if alone else ops.Sequential(ops.Identity(), ops.Identity())
    y = op(x)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match=r"in-?place"):
        y.add_(1)
    assert torch.equal(x, before)


def test_edit_of_an_extra_output_that_is_the_input(device):
    x = make_input(6, 8) * 1
    y, z = ops.Sequential(ops.MakeExtraOutput(), ops.Linear(8, 8))(x)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        z.add_(1)
    (y.sum() + z.sum()).backward()


def test_in_place_addition_is_seen_by_autograd(device):
    model = ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput(in_place=True))
    # exp keeps its result for backward, and the sum is written over it.
    total = model(make_input(6, 8), make_input(6, 8).exp())
    with pytest.raises(RuntimeError, match=MODIFIED):
        total.sum().backward()
    # A product keeps its factors only.
    x, leaf = make_input(6, 8), make_input(6, 8)
    model(x, leaf * 3).sum().backward()
    assert_close(leaf.grad, torch.full((6, 8), 3.0), torch.float32)


def test_in_place_addition_over_a_tensor_that_was_saved(device):
    model = ops.Sequential(ops.GELU(), ops.AddExtraInput(in_place=True))
    x = make_input(6, 8) * 1
    with pytest.raises(RuntimeError, match=MODIFIED):
        model(x, x).sum().backward()


def test_in_place_addition_and_later_use_of_the_extra_input(device):
    """The extra input became the sum: right gradients, or an error, but no wrong ones."""
    x, leaf = make_input(6, 8), make_input(6, 8)
    extra = leaf * 3
    try:
        y = ops.AddExtraInput(in_place=True)(x, extra)
        (y + extra).sum().backward()
    except RuntimeError:
        return
    assert_close(x.grad, torch.full((6, 8), 2.0), torch.float32)
    assert_close(leaf.grad, torch.full((6, 8), 6.0), torch.float32)


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize("then", ["output", "base"])
def test_in_place_addition_into_a_view(device, history, fork, then):
    """The rest of what it is a view of keeps its gradient; the part itself is the output's."""
    results = []
    for in_place in (True, False):
        torch.manual_seed(0)
        linear = ops.Linear(8, 8)
        x, leaf = make_input(6, 8), make_input(6, 16, requires_grad=history)
        base = leaf * 2
        extra = base[:, ::2]
        if in_place:
            branch = [ops.MakeExtraOutput()] if fork else []
            model = ops.Sequential(*branch, linear, ops.AddExtraInput(in_place=True))
            y = model(x, extra)
            y = y[0] if fork else y
        else:
            y = linear(x) + extra
            base = torch.stack([y, base[:, 1::2]], -1).flatten(1)
        (y if then == "output" else base.sin()).square().sum().backward()
        results.append([y, base, x.grad, linear.weight.grad, linear.bias.grad, leaf.grad])
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted, torch.float32, scale=4)
    assert (leaf.grad is not None) == history


@pytest.mark.parametrize("edited", [0, 1])
@pytest.mark.parametrize(
    "tail",
    [list, lambda: [ops.Identity()], lambda: [ops.Reshape((2, 3, 8))]],
    ids=["same", "identity", "view"],
)
def test_edit_of_one_of_two_outputs_in_the_same_memory(device, tail, edited):
    """In torch both change; here they may also refuse, but not give wrong gradients."""
    model = ops.Sequential(ops.Linear(8, 8), ops.MakeExtraOutput(), *tail())
    x = make_input(6, 8)
    outputs = model(x)
    try:
        outputs[edited].mul_(2)
        outputs[1 - edited].sum().backward()
    except RuntimeError as error:
        assert "inplace" in str(error)  # noqa: PT017
        return
    x64 = x.detach().double().requires_grad_()
    (2 * Reference(model)(x64)[1 - edited]).sum().backward()
    assert_close(x.grad, x64.grad, torch.float32)
