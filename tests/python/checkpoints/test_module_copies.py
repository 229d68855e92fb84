"""Copies of operations and models: deepcopy, pickle and torch.save."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
from reference import Reference, assert_close, check_against_reference, make_input, make_mlp
from torch.nn.utils import parametrize

import ligature.ops as ops


class Halved(torch.nn.Module):
    def forward(self, value):
        return value / 2


class Shift(ops.BasicOperation):
    """A user's operation with a parameter and an attribute."""

    def __init__(self, features: int, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.shift = torch.nn.Parameter(torch.randn(features))

    def op_forward_compute(self, input_, *, requires_grad, **unused):
        return input_ * self.factor + self.shift, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, requires_grad, **unused):
        ctx.factor = self.factor

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.factor, (grad_output.sum(0),)


class Swapped(ops.SwiGLU):
    """A built-in operation with a method written in Python."""

    def op_backward(self, ctx, grad_output):
        grad_input, grads = super().op_backward(ctx, grad_output)
        return 2 * grad_input, grads


def by_pickle(module):
    return pickle.loads(pickle.dumps(module))


def by_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": by_pickle, "torch.save": by_torch_save}

OPERATIONS = {
    "Linear": lambda: ops.Linear(8, 6),
    "Linear without bias": lambda: ops.Linear(8, 6, bias=False, accumulate_into_main_grad=False),
    "BasicLinear": lambda: ops.BasicLinear(8, 6),
    "Bias": lambda: ops.Bias(8),
    "LayerNorm": lambda: ops.LayerNorm(8, eps=0.1, zero_centered_gamma=True),
    "RMSNorm": lambda: ops.RMSNorm((4, 8), eps=0.2),
    "L2Normalization": lambda: ops.L2Normalization(eps=0.3),
    "GELU": ops.GELU,
    "SwiGLU": lambda: ops.SwiGLU(glu_interleave_size=2),
    "ClampedSwiGLU": lambda: ops.ClampedSwiGLU(limit=0.5, alpha=1.5, glu_linear_offset=0.25),
    "SiTUGLU": lambda: ops.SiTUGLU(beta1=1.0, beta2=2.0),
    "Dropout": lambda: ops.Dropout(0.25).eval(),
    "Identity": ops.Identity,
    "Reshape": lambda: ops.Reshape((2, 2, -1)),
    "ConstantScale": lambda: ops.ConstantScale(1.5),
}
WITH_EXTRA_INPUT = {
    "AddExtraInput": lambda: ops.AddExtraInput(),
    "ScaledSwiGLU": lambda: ops.ScaledSwiGLU(4),
    "ScaledSReLU": lambda: ops.ScaledSReLU(),
    "ScaledClampedQGeGLU": lambda: ops.ScaledClampedQGeGLU(limit=0.5),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def check_independent(a, b):
    """Equal parameters that share no memory."""
    parameters = dict(b.named_parameters())
    assert [n for n, _ in a.named_parameters()] == list(parameters)
    for name, parameter in a.named_parameters():
        other = parameters[name]
        assert torch.equal(parameter, other), name
        assert parameter.requires_grad == other.requires_grad
        assert parameter.data_ptr() != other.data_ptr(), name


def options(module) -> list:
    basic = module.basic_ops if isinstance(module, ops.FusedOperation) else [module]
    return [(type(op).__name__, op._impl.options()) for op in basic]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(device, way, name, called):
    op = OPERATIONS[name]()
    x = make_input(4, 8) if name != "RMSNorm" else make_input(2, 4, 8)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.normal_()
    if called:
        op(x).sum().backward()
        op.zero_grad(set_to_none=True)
    twin = way(op)
    assert type(twin) is type(op)
    assert twin.training == op.training
    assert options(twin) == options(op)
    assert repr(twin) == repr(op)
    check_independent(op, twin)
    assert torch.equal(twin(x), op(x))
    wanted = op(x).detach()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert torch.equal(op(x), wanted)
    check_against_reference(twin, x)


@pytest.mark.parametrize("name", WITH_EXTRA_INPUT)
def test_operations_with_an_extra_input(device, way, name):
    op = WITH_EXTRA_INPUT[name]()
    x = make_input(4, 8)
    extra = make_input(4, 8) if name == "AddExtraInput" else make_input(4)
    op(x, extra)
    twin = way(op)
    assert options(twin) == options(op)
    check_against_reference(twin, x, extra)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_models(device, way, called, recompute):
    model = make_mlp(recompute=recompute)
    model[1].weight.requires_grad_(False)
    x = make_input(6, 8)
    if called:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)
    twin = way(model)
    assert twin.recompute == recompute
    assert twin._module_groups is None
    check_independent(model, twin)
    check_against_reference(twin, x)
    del model
    gc.collect()
    check_against_reference(twin, x)


def test_models_with_channels(device, way):
    model = ops.Sequential(
        ops.MakeExtraOutput(),
        ops.Linear(8, 8),
        ops.MakeExtraOutput(),
        ops.AddExtraInput(),
        ops.AddExtraInput(),
    )
    model[0].set_extra_output_channel(0, "in", output_to_caller=False)
    model[2].set_extra_output_channel(0, "mid")
    model[3].set_extra_input_channel(0, "in")
    x, extra = make_input(6, 8), make_input(6, 8)
    model(x, extra)
    twin = way(model)
    assert twin.num_extra_inputs == 1
    for a, b in zip(twin(x, extra), model(x, extra), strict=True):
        assert torch.equal(a, b)
    check_against_reference(twin, x, extra)
    assert twin[0]._handle.extra_output_channel(0) == "in"
    assert not twin[0]._handle.extra_output_to_caller(0)
    fresh = way(model)
    fresh[4].set_extra_input_channel(0, "mid")  # bindings of a copy are not locked yet
    assert fresh.num_extra_inputs == 0
    check_against_reference(fresh, x)


def test_python_operations(device, way):
    model = ops.Sequential(ops.Linear(8, 8), Shift(8, 3.0), Swapped())
    x = make_input(6, 8)
    y = model(x)
    y.sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    twin = way(model)
    check_independent(model, twin)
    assert twin[1].factor == 3.0
    del model
    gc.collect()
    z = twin(x)
    assert torch.equal(z, y)
    z.sum().backward()
    for name, parameter in twin.named_parameters():
        assert_close(parameter.grad, wanted[name], torch.float32)


def test_tied_weights_stay_tied(device, way):
    model = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))
    model[2].weight = model[0].weight
    model(make_input(6, 8))
    twin = way(model)
    assert twin[2].weight is twin[0].weight
    assert twin[0].weight is not model[0].weight
    check_against_reference(twin, make_input(6, 8))


def test_parametrized_operations(device):
    model = make_mlp()
    for index in (0, 1):
        parametrize.register_parametrization(model[index], "weight", Halved())
    x = make_input(6, 8)
    y = model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[1].parametrizations.weight.original.zero_()
    assert torch.equal(twin(x), y)
    twin(x).sum().backward()
    assert twin[1].parametrizations.weight.original.grad is not None


def test_hooks_are_copied(device):
    model = make_mlp()
    model[1].register_forward_hook(double_output)
    x = make_input(6, 8)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert not torch.equal(model(x), ops.Sequential(*make_mlp())(x))


def double_output(module, args, output):
    return 2 * output


@pytest.mark.parametrize("make", [lambda: ops.Linear(8, 8), lambda: ops.LayerNorm(8), make_mlp])
def test_shallow_copies_leave_the_original_alone(device, make):
    model = make()
    x = make_input(6, 8)
    wanted = model(x).detach()
    twin = copy.copy(model)
    assert torch.equal(twin(x), wanted)
    assert torch.equal(model(x), wanted)
    del twin
    gc.collect()
    assert torch.equal(model(x), wanted)
    check_against_reference(model, x)
    check_against_reference(ops.Sequential(ops.Identity(), model), x)


def test_a_copy_of_a_shallow_copy_outlives_it(device):
    linear = ops.Linear(8, 8)
    twin = copy.copy(linear)
    wanted = linear(make_input(2, 8)).shape
    del linear
    gc.collect()
    assert twin(make_input(2, 8)).shape == wanted
    check_against_reference(twin, make_input(2, 8))


def test_copy_in_the_middle_of_training(device):
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = make_input(6, 8)
    y = model(x)
    twin = copy.deepcopy(model)
    y.sum().backward()
    assert all(p.grad is None for p in twin.parameters())
    optimizer.step()
    assert not torch.equal(twin(x), model(x))
    check_against_reference(twin, x)


def test_state_dict_needs_no_pickle(device):
    model = make_mlp()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin = make_mlp()
    twin.load_state_dict(torch.load(file, weights_only=True))
    x = make_input(6, 8)
    assert torch.equal(twin(x), model(x))
    assert_close(twin(x), Reference(model)(x.double()), torch.float32)
