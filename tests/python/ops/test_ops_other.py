"""Operations that move, scale, drop, add or return values."""

from __future__ import annotations

import pytest
import torch
from reference import FLOAT_DTYPES, check_against_reference, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

SHAPES = [(8,), (5, 8), (2, 3, 8), (2, 1, 3, 8), (0, 8), (2, 0, 8)]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("scale", [0.0, -2.5, 1.0, 3])
def test_constant_scale(scale: float, dtype: torch.dtype) -> None:
    op = te.ops.ConstantScale(scale)
    for shape in [(), *SHAPES]:
        check_against_reference(op, make_input(shape, dtype=dtype))
    check_against_reference(op, torch.randn(8, 5, dtype=dtype).t().requires_grad_())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_identity(dtype: torch.dtype) -> None:
    for shape in [(), *SHAPES]:
        check_against_reference(te.ops.Identity(), make_input(shape, dtype=dtype))


def test_identity_takes_any_dtype() -> None:
    x = torch.arange(4)
    assert torch.equal(te.ops.Identity()(x), x)
    assert not te.ops.Identity()(x).requires_grad


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(6, 4), (-1, 4), (2, 3, -1), (24,), (-1,), [4, 1, 6]])
def test_reshape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    op = te.ops.Reshape(shape)
    check_against_reference(op, make_input(3, 8, dtype=dtype))
    check_against_reference(op, make_input(2, 3, 4, dtype=dtype))
    check_against_reference(op, torch.randn(8, 3, dtype=dtype).t().requires_grad_())


def test_reshape_of_nothing() -> None:
    check_against_reference(te.ops.Reshape((-1, 4)), make_input(0, 8))
    check_against_reference(te.ops.Reshape((0, 3)), make_input(0, 8))
    check_against_reference(te.ops.Reshape(()), make_input(1, 1))


def test_reshape_between_operations() -> None:
    model = te.ops.Sequential(
        te.ops.Linear(8, 6), te.ops.Reshape((-1, 3)), te.ops.Linear(3, 5), te.ops.SiLU()
    )
    check_against_reference(model, make_input(2, 4, 8))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(p: float, dtype: torch.dtype) -> None:
    op = te.ops.Dropout(p)
    x = torch.full((200, 100), 2.0, dtype=dtype, requires_grad=True)
    y = op(x)
    assert y.dtype is dtype
    kept = y != 0
    sigma = (p * (1 - p) / x.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * sigma
    wanted = torch.full_like(y, 2.0) / (1 - p)
    torch.testing.assert_close(y[kept], wanted[kept], rtol=1e-2, atol=0)
    # Rows and columns are dropped alike.
    for dim in (0, 1):
        rates = kept.double().mean(dim)
        assert rates.std() < 3 * (p * (1 - p) / kept.shape[dim]) ** 0.5

    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(x.grad != 0, kept & (grad != 0))
    torch.testing.assert_close(x.grad[kept], (grad / (1 - p))[kept], rtol=1e-2, atol=1e-4)


def test_dropout_draws_anew_and_repeats_with_the_seed() -> None:
    op = te.ops.Dropout(0.5)
    x = torch.ones(64, 64)
    torch.manual_seed(3)
    first, second = op(x), op(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(op(x), first)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_dropout_in_eval_mode_does_nothing(p: float) -> None:
    op = te.ops.Dropout(p).eval()
    check_against_reference(op, make_input(5, 8))
    model = te.ops.Sequential(te.ops.Linear(8, 8), op, te.ops.GELU()).eval()
    check_against_reference(model, make_input(5, 8))
    x = make_input(5, 8)
    before = model(x)
    model.train()
    assert torch.equal(model(x), before) == (p == 0)
    model.eval()
    assert torch.equal(model(x), before)


def test_dropout_of_all_or_nothing() -> None:
    x = make_input(5, 8)
    y = te.ops.Dropout(1.0)(x)
    y.backward(torch.randn_like(y))
    assert not y.any()
    assert not x.grad.any()
    check_against_reference(te.ops.Dropout(0.0), make_input(5, 8))
    infinite = torch.full((3,), torch.inf)
    assert not te.ops.Dropout(1.0)(infinite).any()
    empty = make_input(0, 8)
    te.ops.Dropout(0.5)(empty).sum().backward()
    assert empty.grad.shape == (0, 8)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_add_extra_input(dtype: torch.dtype) -> None:
    op = te.ops.AddExtraInput()
    assert (op.num_extra_inputs, op.num_extra_outputs) == (1, 0)
    for shape in [(), *SHAPES]:
        check_against_reference(op, make_input(shape, dtype=dtype), make_input(shape, dtype=dtype))
    for grads in [(True, False), (False, True), (False, False)]:
        inputs = [make_input(3, 8, dtype=dtype, requires_grad=g) for g in grads]
        check_against_reference(op, *inputs)
    strided = torch.randn(8, 3, dtype=dtype).t().requires_grad_()
    check_against_reference(op, make_input(3, 8, dtype=dtype), strided)


def test_add_extra_input_of_another_dtype() -> None:
    x, extra = make_input(3, 8, dtype=torch.bfloat16), make_input(3, 8)
    check_against_reference(te.ops.AddExtraInput(), x, extra, dtype=torch.bfloat16, scale=1)


def test_the_same_tensor_as_input_and_extra_input() -> None:
    x = make_input(3, 8)
    y = te.ops.AddExtraInput()(x, x)
    torch.testing.assert_close(y, 2 * x)
    y.sum().backward()
    assert (x.grad == 2).all()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_make_extra_output(dtype: torch.dtype) -> None:
    op = te.ops.MakeExtraOutput()
    assert (op.num_extra_inputs, op.num_extra_outputs) == (0, 1)
    for shape in [(), *SHAPES]:
        check_against_reference(op, make_input(shape, dtype=dtype))
    check_against_reference(op, make_input(3, 8, dtype=dtype, requires_grad=False))


@pytest.mark.parametrize("used", [0, 1])
def test_make_extra_output_of_which_one_is_used(used: int) -> None:
    x = make_input(3, 8)
    outputs = te.ops.MakeExtraOutput()(x)
    assert len(outputs) == 2
    outputs[used].backward(torch.full((3, 8), 3.0))
    assert (x.grad == 3).all()
