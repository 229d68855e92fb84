"""LayerNorm, RMSNorm and L2Normalization against float64."""

from __future__ import annotations

import pytest
import torch
from reference import FLOAT_DTYPES, check_against_reference, make_input

import ligature as te

pytestmark = pytest.mark.usefixtures("device")

NORMS = ["LayerNorm", "RMSNorm"]


def make_norm(kind: str, shape: int | tuple[int, ...], **options: object) -> torch.nn.Module:
    norm = getattr(te.ops, kind)(shape, **options)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_forward_and_gradients(kind: str, zero_centered_gamma: bool, dtype: torch.dtype) -> None:
    norm = make_norm(kind, 37, zero_centered_gamma=zero_centered_gamma, dtype=dtype)
    for shape in [(37,), (5, 37), (2, 3, 37), (2, 1, 3, 37), (0, 37), (2, 0, 37)]:
        check_against_reference(norm, make_input(*shape, dtype=dtype), scale=3)
    for x in (
        torch.randn(37, 5, dtype=dtype).t(),
        torch.randn(5, 74, dtype=dtype)[:, ::2],
        torch.randn(4, 3, 37, dtype=dtype).transpose(0, 1),
        torch.randn(1, 37, dtype=dtype).expand(5, 37),
    ):
        check_against_reference(norm, x.requires_grad_(), scale=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_two_normalized_dimensions(kind: str, dtype: torch.dtype) -> None:
    norm = make_norm(kind, (3, 20), dtype=dtype)
    for shape in [(3, 20), (5, 3, 20), (2, 2, 3, 20), (0, 3, 20)]:
        check_against_reference(norm, make_input(*shape, dtype=dtype), scale=3)
    x = torch.randn(5, 20, 3, dtype=dtype).transpose(1, 2).requires_grad_()
    check_against_reference(norm, x, scale=3)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.7])
def test_eps(kind: str, eps: float) -> None:
    check_against_reference(make_norm(kind, 16, eps=eps), make_input(4, 16))


@pytest.mark.parametrize("kind", NORMS)
def test_parameters_in_float32_with_half_precision_input(kind: str) -> None:
    norm = make_norm(kind, 32, dtype=torch.float32)
    x = make_input(4, 32, dtype=torch.bfloat16)
    check_against_reference(norm, x, dtype=torch.bfloat16, scale=1.5)


@pytest.mark.parametrize("kind", NORMS)
def test_statistics_are_in_float32(kind: str) -> None:
    """In bfloat16 a mean over large equal values would lose what sets them apart."""
    norm = getattr(te.ops, kind)(4096, dtype=torch.bfloat16)
    x = (torch.randn(2, 4096) * 3 + 40).bfloat16().requires_grad_()
    check_against_reference(norm, x)


@pytest.mark.parametrize("kind", NORMS)
def test_constant_rows_and_large_values(kind: str) -> None:
    norm = make_norm(kind, 16)
    x = torch.stack([torch.zeros(16), torch.full((16,), 3.0), 1e4 * torch.randn(16)])
    check_against_reference(norm, x.requires_grad_(), scale=100)


@pytest.mark.parametrize("kind", NORMS)
def test_every_subset_of_gradients(kind: str) -> None:
    count = len(list(make_norm(kind, 16).parameters()))
    for mask in range(2 ** (count + 1)):
        norm = make_norm(kind, 16)
        for i, parameter in enumerate(norm.parameters()):
            parameter.requires_grad_(bool(mask >> i & 1))
        check_against_reference(norm, make_input(4, 16, requires_grad=bool(mask >> count & 1)))


def test_initial_values() -> None:
    assert te.ops.LayerNorm(4).weight.tolist() == [1, 1, 1, 1]
    assert te.ops.LayerNorm(4).bias.tolist() == [0, 0, 0, 0]
    assert te.ops.RMSNorm(4).weight.tolist() == [1, 1, 1, 1]
    assert te.ops.RMSNorm(4, zero_centered_gamma=True).weight.tolist() == [0, 0, 0, 0]
    assert te.ops.LayerNorm((2, 3)).weight.shape == (2, 3)
    assert dict(te.ops.RMSNorm(4).named_parameters()).keys() == {"weight"}


def test_checkpoints_of_torch() -> None:
    ours, theirs = te.ops.LayerNorm(8), torch.nn.LayerNorm(8)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    rms = torch.nn.RMSNorm(8)
    torch.nn.init.normal_(rms.weight)
    mine = te.ops.RMSNorm(8)
    mine.load_state_dict(rms.state_dict())
    assert torch.equal(mine.weight, rms.weight)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_l2_normalization(dtype: torch.dtype, eps: float) -> None:
    op = te.ops.L2Normalization(eps=eps)
    assert not list(op.parameters())
    for shape in [(37,), (5, 37), (2, 3, 37), (2, 1, 3, 8), (0, 8), (2, 0, 8)]:
        check_against_reference(op, make_input(*shape, dtype=dtype), scale=2)
    x = torch.randn(37, 5, dtype=dtype).t().requires_grad_()
    check_against_reference(op, x, scale=2)


def test_l2_normalization_takes_the_arguments_of_te() -> None:
    op = te.ops.L2Normalization(eps=1e-3, seq_length=16, micro_batch_size=2)
    assert op.eps == 1e-3
    x = torch.randn(4, 8)
    assert torch.equal(op(x), te.ops.L2Normalization(eps=1e-3)(x))
