"""Activations where float overflows on the way, and lazily negated tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference import make_input

import ligature as te
import ligature.ops as ops

MAGNITUDES = [0.0, 1.0, 30.0, 80.0, 87.5, 88.5, 89.0, 104.0, 1e3, 6e4, 1e19, 2e19, 1e30]
MAGNITUDES += [1e36, 1e37, 1e38, 3e38, 3.4e38]


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


GATES = {
    "GELU": gelu,
    "QGELU": qgelu,
    "SiLU": F.silu,
    "ReLU": F.relu,
    "SReLU": lambda x: F.relu(x).square(),
}
GATED = {
    "GLU": torch.sigmoid,
    "GEGLU": gelu,
    "QGEGLU": qgelu,
    "SwiGLU": F.silu,
    "ReGLU": F.relu,
    "SReGLU": GATES["SReLU"],
    "ClampedSwiGLU": lambda x: x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
}


def extremes(dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    values = [v for v in MAGNITUDES if v <= largest]
    return torch.tensor([*values, *(-v for v in values), float("nan")], dtype=dtype)


def check(actual: torch.Tensor, wanted: torch.Tensor, least: float = 1e-35) -> None:
    """``wanted`` in float64, rounded to the dtype."""
    dtype = actual.dtype
    rtol = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-9}.get(dtype, 1e-5)
    atol = 1e-7 if dtype is torch.float16 else least
    torch.testing.assert_close(
        actual.double(), wanted.to(dtype).double(), rtol=rtol, atol=atol, equal_nan=True
    )


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATES)
def test_plain_activations_at_the_extremes(device, name, dtype):
    x = extremes(dtype).view(1, -1).requires_grad_()
    reference = x.detach().double().requires_grad_()
    y, wanted = getattr(ops, name)()(x), GATES[name](reference)
    check(y.detach(), wanted.detach())
    y.backward(torch.ones_like(y))
    wanted.backward(torch.ones_like(wanted))
    check(x.grad, reference.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATED)
def test_gated_activations_at_the_extremes(device, name, dtype):
    gates = extremes(dtype).view(1, -1)
    if name == "ClampedSwiGLU":
        gates = gates[:, :-1]  # torch's clamp has no gradient at NaN
    x = torch.cat([gates, torch.full_like(gates, 2.0)], 1).requires_grad_()
    reference = x.detach().double().requires_grad_()
    a, b = reference.chunk(2, -1)
    if name == "ClampedSwiGLU":
        b = b.clamp(-7, 7) + 1
    y, wanted = getattr(ops, name)()(x), GATED[name](a) * b
    check(y.detach(), wanted.detach())
    y.backward(torch.ones_like(y))
    wanted.backward(torch.ones_like(wanted))
    # 1 - sigmoid is as exact as numbers near 1.
    check(x.grad, reference.grad, 1e-7 if name == "GLU" and dtype != torch.float64 else 1e-30)


def test_the_values_of_the_report(device):
    assert ops.SiLU()(torch.tensor([[-1e38]])).item() == 0
    x = torch.tensor([[3e38, -3e38]], requires_grad=True)
    ops.QGELU()(x).sum().backward()
    assert x.grad.tolist() == [[1, 0]]


@pytest.mark.parametrize("name", ["SiLU", "GELU", "QGELU"])
def test_behind_a_linear_and_in_front_of_one(device, name):
    model = ops.Sequential(
        ops.Linear(1, 2, bias=False), getattr(ops, name)(), ops.Linear(2, 1, bias=False)
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[2].weight.fill_(1)
    for recompute in ("none", "cheap"):
        model.recompute = recompute
        x = torch.tensor([[2e38]], requires_grad=True)
        y = model(x)
        assert y.item() == x.item()
        y.backward()
        assert x.grad.item() == 1


# -- the negative bit


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``-tensor``, as memory of ``tensor`` and a bit."""
    out = torch._neg_view(tensor.detach().clone())
    assert out.is_neg()
    assert out.is_contiguous()
    return out


def runs() -> dict[str, torch.nn.Module]:
    return {
        "LayerNorm": ops.LayerNorm(8),
        "RMSNorm": ops.RMSNorm(8),
        "L2Normalization": ops.L2Normalization(),
        "SiLU": ops.SiLU(),
        "SwiGLU": ops.SwiGLU(),
        "Bias": ops.Bias(8),
        "Linear": ops.Linear(8, 8),
        "Dropout": ops.Dropout(0.0),
        "ConstantScale": ops.ConstantScale(2.0),
        "Reshape": ops.Reshape((-1, 4)),
        "mlp": ops.Sequential(
            ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU(), ops.Linear(8, 8), recompute="cheap"
        ),
        "fork": ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(8)),
    }


def outputs(result):
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", list(runs()))
def test_the_negative_bit_of_inputs_and_gradients(device, name):
    model = runs()[name]
    values = make_input(4, 8, requires_grad=False)
    got = {}
    for lazy in (False, True):
        x = (negated(values) if lazy else -values).requires_grad_()
        ys = outputs(model(x))
        torch.manual_seed(5)
        dys = [torch.randn_like(y) for y in ys]
        grads = torch.autograd.grad(
            ys, [x, *model.parameters()], [negated(d) if lazy else -d for d in dys]
        )
        got[lazy] = [*(y.detach() for y in ys), *grads]
    for plain, lazy in zip(got[False], got[True], strict=True):
        assert torch.equal(plain, lazy)


def test_an_imaginary_part(device):
    """As it comes about: the imaginary part of a conjugate."""
    z = torch.randn(4, 8, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    norm = ops.LayerNorm(8)
    assert torch.equal(norm(x), norm(x.resolve_neg()))
    contiguous = torch._neg_view(z.imag.contiguous())
    assert torch.equal(norm(contiguous), norm(x.resolve_neg()))


def test_the_negative_bit_of_parameters_and_extra_inputs(device):
    x = make_input(4, 8, requires_grad=False)
    for model, key in [
        (ops.LayerNorm(8), "weight"),
        (ops.Bias(8), "bias"),
        (ops.Linear(8, 8), "weight"),
    ]:
        values = torch.randn_like(getattr(model, key))
        wanted = torch.func.functional_call(model, {key: -values}, x)
        assert torch.equal(torch.func.functional_call(model, {key: negated(values)}, x), wanted)
    extra, scales = torch.randn(4, 8), torch.randn(4)
    add = ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput())
    assert torch.equal(add(x, negated(extra)), add(x, -extra))
    assert torch.equal(ops.ScaledSwiGLU()(x, negated(scales)), ops.ScaledSwiGLU()(x, -scales))


def test_the_negative_bit_in_low_precision(device):
    x = torch.randn(32, 32)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=device)
    assert torch.equal(quantizer(negated(x)).dequantize(), quantizer(-x).dequantize())
    model = ops.Linear(32, 32)
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        assert torch.equal(model(negated(x)), model(-x))
