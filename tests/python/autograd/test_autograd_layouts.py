"""Empty, strided and expanded tensors, microbatches, and dropout."""

from __future__ import annotations

import pytest
import torch
from reference import (
    FLOAT_DTYPES,
    Reference,
    assert_close,
    check_against_reference,
    float64_copy,
    make_input,
    make_mlp,
)

import ligature.ops as ops

MODELS = {
    "mlp": lambda: make_mlp(),
    "recomputing mlp": lambda: make_mlp(recompute="cheap"),
    "glu": lambda: ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 16, bias=False), ops.SwiGLU()),
    "l2": lambda: ops.Sequential(
        ops.L2Normalization(), ops.ConstantScale(0.5), ops.BasicLinear(8, 3)
    ),
    "branches": lambda: ops.Sequential(
        ops.Linear(8, 8), ops.MakeExtraOutput(), ops.ReLU(), ops.Bias(8), ops.MakeExtraOutput()
    ),
}


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def model(request, device):
    return MODELS[request.param]()


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (3, 0, 8)])
def test_empty_batch(model, shape):
    x = make_input(*shape)
    check_against_reference(model, x)
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(y.sum() for y in outputs).backward()
    assert x.grad.shape == shape
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.count_nonzero(parameter.grad) == 0, name


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8), (2, 1, 3, 8)])
def test_ranks(model, shape):
    check_against_reference(model, make_input(*shape))


def strided_inputs():
    yield "transposed", lambda: torch.randn(8, 6).t()
    yield "strided columns", lambda: torch.randn(6, 16)[:, ::2]
    yield "strided rows", lambda: torch.randn(12, 8)[::2]
    yield "offset", lambda: torch.randn(7, 9)[1:, 1:]
    yield "expanded", lambda: torch.randn(8).expand(6, 8)
    yield "permuted", lambda: torch.randn(8, 2, 3).permute(2, 1, 0)


@pytest.mark.parametrize("make", [pytest.param(m, id=n) for n, m in strided_inputs()])
def test_non_contiguous_inputs(model, make):
    values = make()
    assert not values.is_contiguous()
    x = values.detach().requires_grad_()
    check_against_reference(model, x)


@pytest.mark.parametrize("make", [pytest.param(m, id=n) for n, m in strided_inputs()])
def test_non_contiguous_grad_outputs(device, make):
    model = make_mlp()
    dy = make()
    x = make_input(*dy.shape)
    check_against_reference(model, x, grad_outputs=[dy])
    check_against_reference(ops.Identity(), x, grad_outputs=[dy])
    glu = ops.Sequential(ops.Linear(8, 16), ops.GEGLU())
    check_against_reference(glu, x, grad_outputs=[dy])


def test_gradient_of_a_sum_is_expanded(model):
    x = make_input(6, 8)
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(y.sum() for y in outputs).backward()
    reference = Reference(model)
    x64 = float64_copy(x)
    wanted = reference(x64)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    sum(y.sum() for y in wanted).backward()
    assert_close(x.grad, x64.grad, torch.float32)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, reference.parameters[name].grad, torch.float32, what=name)


def test_non_contiguous_extra_inputs(device):
    model = ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput(), ops.ScaledSReLU())
    extra = torch.randn(8, 6).t().requires_grad_()
    scales = torch.randn(12)[::2].requires_grad_()
    check_against_reference(model, make_input(6, 8), extra, scales)


def test_non_contiguous_parameters(device):
    model = make_mlp()
    model[1].weight = torch.nn.Parameter(torch.randn(8, 16).t())
    model[3].bias = torch.nn.Parameter(torch.randn(16)[::2])
    model[0].weight = torch.nn.Parameter(torch.randn(1).expand(8))
    assert not model[1].weight.is_contiguous()
    check_against_reference(model, make_input(6, 8))


def test_gradients_do_not_alias(device):
    """What backward hands to one leaf is not written by another's accumulation."""
    model = ops.Sequential(ops.AddExtraInput(), ops.Identity(), ops.AddExtraInput())
    x, a, b = (make_input(6, 8) for _ in range(3))
    for _ in range(2):
        model(x, a, b).sum().backward()
    for leaf in (x, a, b):
        assert_close(leaf.grad, torch.full((6, 8), 2.0), torch.float32)
    x.grad.zero_()
    assert_close(a.grad, torch.full((6, 8), 2.0), torch.float32)


@pytest.mark.parametrize("after", [[], [ops.ConstantScale(1.0)]], ids=["last", "inside"])
def test_gradients_in_other_shapes_do_not_alias(device, after):
    """A view of a gradient is one that autograd may not take over as it is."""
    model = ops.Sequential(ops.Reshape((2, 3, 8)), ops.AddExtraInput(), *after)
    x, extra = make_input(6, 8), make_input(2, 3, 8)
    y, dy = model(x, extra), torch.ones(2, 3, 8)
    for k in (1, 2, 3):
        y.backward(dy, retain_graph=True)
        assert (x.grad == k).all()
        assert (extra.grad == k).all()
    assert (dy == 1).all()


def test_backward_leaves_the_grad_output_alone(device):
    model = ops.Sequential(
        ops.MakeExtraOutput(), ops.Linear(8, 8), ops.Bias(8), ops.AddExtraInput(), ops.Identity()
    )
    x, extra = make_input(6, 8), make_input(6, 8)
    y, z = model(x, extra)
    dy, dz = torch.randn_like(y), torch.randn_like(z)
    copies = dy.clone(), dz.clone()
    torch.autograd.backward([y, z], [dy, dz])
    assert torch.equal(dy, copies[0])
    assert torch.equal(dz, copies[1])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_microbatches_add_up(device, dtype):
    model = make_mlp(dtype=dtype)
    x = make_input(8, 8, dtype=dtype, requires_grad=False)
    for part in x.split(2):
        model(part).sum().backward()
    reference = Reference(model)
    reference(x.double()).sum().backward()
    for name, parameter in model.named_parameters():
        wanted = reference.parameters[name].grad
        assert_close(parameter.grad, wanted, dtype, scale=4, what=name)


# -- dropout


def test_dropout_zeroes_and_scales(device):
    op = ops.Dropout(0.25)
    x = torch.full((100, 200), 3.0).requires_grad_()
    y = op(x)
    kept = y != 0
    assert_close(y[kept], torch.full_like(y[kept], 4.0), torch.float32)
    assert 0.73 < kept.double().mean() < 0.77
    y.backward(torch.full_like(y, 0.75))
    assert_close(x.grad, kept.float(), torch.float32)
    torch.manual_seed(5)
    first = op(x)
    second = op(x)
    torch.manual_seed(5)
    assert torch.equal(op(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_the_wanted_share(device, dtype, p):
    kept = ops.Dropout(p)(torch.ones(1000, 1003, dtype=dtype)) != 0
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) < 6 * deviation
    both = (kept[1:] & kept[:-1]).double().mean().item()  # neighbours know nothing of each other
    assert abs(both - (1 - p) ** 2) < 12 * deviation


def test_dropout_in_a_model_uses_one_mask(device):
    model = ops.Sequential(ops.Linear(8, 64), ops.Dropout(0.5), ops.Linear(64, 8, bias=False))
    x = make_input(6, 8)
    torch.manual_seed(11)
    y = model(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    torch.manual_seed(11)
    mask = ops.Dropout(0.5)(torch.ones(6, 64)).double()
    reference = Reference(model)
    x64 = float64_copy(x)
    weights = reference.parameters
    hidden = torch.nn.functional.linear(x64, weights["0.weight"], weights["0.bias"]) * mask
    wanted = torch.nn.functional.linear(hidden, weights["2.weight"])
    wanted.backward(dy.double())
    assert_close(y, wanted, torch.float32)
    assert_close(x.grad, x64.grad, torch.float32)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, weights[name].grad, torch.float32, what=name)


def test_dropout_follows_train_and_eval(device):
    model = ops.Sequential(ops.Linear(8, 64), ops.Dropout(0.5))
    x = make_input(6, 8)
    assert (model(x) == 0).any()
    model.eval()
    check_against_reference(model, x)
    model.train()
    assert (model(x) == 0).any()
    model[1].eval()
    check_against_reference(model, x)


def test_dropout_at_its_ends(device):
    x = make_input(6, 8)
    check_against_reference(ops.Dropout(0.0), x)
    y = ops.Dropout(1.0)(x)
    y.backward(torch.randn_like(y))
    assert torch.count_nonzero(y) == 0
    assert torch.count_nonzero(x.grad) == 0
    infinite = ops.Dropout(1.0)(torch.full((4, 4), float("inf")))
    assert torch.count_nonzero(infinite) == 0
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="p must be in"):
            ops.Dropout(p)
