"""Activations against float64: all of them, their options, and the ones that take scales."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from reference import (
    ACTIVATIONS,
    FLOAT_DTYPES,
    GLU_ACTIVATIONS,
    assert_close,
    check_against_reference,
    make_input,
)

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

#: Also widths that no vector register divides.
SHAPES = [(16,), (5, 34), (2, 3, 8), (2, 1, 3, 74), (0, 8), (2, 0, 8), (3, 2)]
SCALED = ["ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU", "ScaledSReLU"]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forward_and_gradient(name: str, dtype: torch.dtype) -> None:
    op = getattr(te.ops, name)()
    assert not list(op.parameters())
    for shape in SHAPES:
        check_against_reference(op, make_input(*shape, dtype=dtype), scale=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_strided_input(name: str, dtype: torch.dtype) -> None:
    op = getattr(te.ops, name)()
    for x in (
        torch.randn(16, 5, dtype=dtype).t(),
        torch.randn(5, 32, dtype=dtype)[:, ::2],
        torch.randn(4, 3, 16, dtype=dtype).transpose(0, 1),
        torch.randn(1, 16, dtype=dtype).expand(5, 16),
    ):
        assert not x.is_contiguous()
        check_against_reference(op, x.requires_grad_(), scale=2)
    grad = torch.randn(8 if name in GLU_ACTIVATIONS else 16, 5, dtype=dtype).t()
    check_against_reference(op, make_input(5, 16, dtype=dtype), grad_outputs=[grad], scale=2)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_and_special_values(name: str) -> None:
    """Far from zero nothing overflows; zero itself has a gradient; NaN stays NaN."""
    op = getattr(te.ops, name)()
    values = torch.tensor([-1e4, -88.5, -20.0, -1e-30, 1e-30, 20.0, 88.5, 1e4])
    x = torch.cat([values, values.flip(0)]).requires_grad_()
    check_against_reference(op, x, scale=2)
    zero = torch.zeros(2, 16, requires_grad=True)
    y = op(zero)
    y.sum().backward()
    assert y.isfinite().all()
    assert zero.grad.isfinite().all()
    assert op(torch.full((2, 16), torch.nan)).isnan().all()


@pytest.mark.parametrize("size", [1, 2, 4, 32])
@pytest.mark.parametrize("name", ["SwiGLU", "ClampedSwiGLU", "SiTUGLU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interleaved(name: str, size: int, dtype: torch.dtype) -> None:
    op = getattr(te.ops, name)(glu_interleave_size=size)
    for shape in [(4 * size,), (3, 2 * size), (2, 3, 6 * size)]:
        check_against_reference(op, make_input(*shape, dtype=dtype), scale=2)
    empty = make_input(0, 2 * size, dtype=dtype)
    y = op(empty)
    assert y.shape == (0, size)
    y.sum().backward()
    assert empty.grad.shape == empty.shape


def test_interleaved_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0]])
    gate, linear = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[10.0, 20, 30, 40]])
    y = te.ops.SwiGLU(glu_interleave_size=2)(x)
    torch.testing.assert_close(y, torch.nn.functional.silu(gate) * linear)


@pytest.mark.parametrize("name", ["GLU", "GEGLU", "SwiGLU"])
def test_the_first_half_is_gated(name: str) -> None:
    x = torch.cat([torch.zeros(2, 3), torch.ones(2, 3)], dim=-1)
    wanted = 0.5 if name == "GLU" else 0.0
    assert (getattr(te.ops, name)()(x) == wanted).all()
    assert (getattr(te.ops, name)()(x.flip(-1)) == 0).all()


# Limits that no half-precision number equals, so that no value lies on the kink.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("ClampedSwiGLU", {"limit": 0.7}),
    ("ClampedSwiGLU", {"limit": 1.3, "alpha": 0.5, "glu_linear_offset": 0.0}),
    ("ClampedSwiGLU", {"glu_linear_offset": -2.0, "alpha": 3.0}),
    ("SiTUGLU", {"beta1": 0.5, "beta2": 0.7}),
    ("SiTUGLU", {"beta1": 10.0, "beta2": 1.5}),
    ("ScaledClampedQGeGLU", {"limit": 0.7, "alpha": 2.5, "glu_linear_offset": 0.5}),
    ("ScaledSiTUGLU", {"beta1": 0.5, "beta2": 0.7}),
    ("ScaledSwiGLU", {"glu_interleave_size": 4}),
    ("ScaledSiTUGLU", {"glu_interleave_size": 8}),
    ("ScaledClampedQGeGLU", {"glu_interleave_size": 2}),
]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_options(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    op = getattr(te.ops, name)(**options)
    inputs = [make_input(6, 32, dtype=dtype)]
    if name.startswith("Scaled"):
        inputs.append(make_input(6, dtype=dtype))
    check_against_reference(op, *inputs, scale=4)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", SCALED)
def test_scales(name: str, dtype: torch.dtype) -> None:
    op = getattr(te.ops, name)()
    assert (op.num_extra_inputs, op.num_extra_outputs) == (1, 0)
    for shape in [(16,), (5, 16), (2, 3, 34), (2, 1, 3, 8), (0, 8), (2, 0, 8)]:
        x, scales = make_input(shape, dtype=dtype), make_input(shape[:-1], dtype=dtype)
        check_against_reference(op, x, scales, scale=4)
    for x_grad, scales_grad in [(True, False), (False, True), (False, False)]:
        check_against_reference(
            op,
            make_input(5, 16, dtype=dtype, requires_grad=x_grad),
            make_input(5, dtype=dtype, requires_grad=scales_grad),
            scale=4,
        )
    x = torch.randn(16, 5, dtype=dtype).t().requires_grad_()
    check_against_reference(op, x, torch.randn(10, dtype=dtype)[::2].requires_grad_(), scale=4)


@pytest.mark.parametrize("name", SCALED)
def test_scales_in_float32_with_half_precision_input(name: str) -> None:
    op = getattr(te.ops, name)()
    x, scales = make_input(5, 16, dtype=torch.bfloat16), make_input(5)
    y = op(x, scales)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype is torch.bfloat16
    assert scales.grad.dtype is torch.float32
    x64, scales64 = x.detach().double().requires_grad_(), scales.detach().double().requires_grad_()
    y64 = op(x64, scales64)
    y64.sum().backward()
    assert_close(y, y64, torch.bfloat16)
    assert_close(x.grad, x64.grad, torch.bfloat16)
    torch.testing.assert_close(scales.grad.double(), scales64.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", [*ACTIVATIONS, *SCALED])
def test_options_of_te_change_nothing_here(name: str) -> None:
    """What to keep quantized, and what a grouped MLP recomputes, does not change the result."""
    option = "activation_recompute_in_mlp" if name in SCALED else "cache_quantized_input"
    x, scales = torch.randn(3, 16), torch.rand(3)
    extra = (scales,) if name in SCALED else ()
    plain, other = getattr(te.ops, name)(), getattr(te.ops, name)(**{option: True})
    assert torch.equal(plain(x, *extra), other(x, *extra))


def test_gelu_is_the_tanh_form() -> None:
    x = torch.linspace(-4, 4, 65)
    wanted = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(te.ops.GELU()(x), wanted)
    assert not torch.allclose(te.ops.GELU()(x), torch.nn.functional.gelu(x), atol=1e-5)


def test_setting_an_option_later_is_seen() -> None:
    op = te.ops.ClampedSwiGLU()
    x = 4 * torch.randn(3, 16)
    op(x)
    op.limit = 0.5
    assert torch.equal(op(x), te.ops.ClampedSwiGLU(limit=0.5)(x))
    with pytest.raises(ValueError, match="limit must be positive"):
        op.limit = -1.0
    assert op.limit == 0.5


@pytest.mark.parametrize("name", [*ACTIVATIONS, *SCALED])
def test_options_are_readable(name: str) -> None:
    cls = getattr(te.ops, name)
    values = {"limit": 3.0, "alpha": 2.0, "glu_linear_offset": 0.5, "beta1": 2.0, "beta2": 3.0}
    values |= {"glu_interleave_size": 4, "cache_quantized_input": True}
    values |= {"activation_recompute_in_mlp": True}
    options = {k: v for k, v in values.items() if k in inspect.signature(cls).parameters}
    assert (name in SCALED) == ("activation_recompute_in_mlp" in options)
    given = cls(**options)
    for option, value in options.items():
        assert getattr(given, option) == value
        assert type(getattr(given, option)) is type(value)
        assert getattr(cls(), option) == inspect.signature(cls).parameters[option].default
        setattr(given, option, getattr(cls(), option))
        assert getattr(given, option) == getattr(cls(), option)


def test_a_limit_beyond_everything_does_not_clamp() -> None:
    x = make_input(3, 8)
    wide, other = te.ops.ClampedSwiGLU(limit=torch.inf), te.ops.ClampedSwiGLU(limit=1e30)
    assert torch.equal(wide(x), other(x))
