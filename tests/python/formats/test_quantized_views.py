"""What stays quantized: aliases, clones, views and conversions; other views write through."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from quantized_support import CLASSES, EVERY, make, requantized, same_bits

from ligature.quantization import MXFP8Tensor


@EVERY
def test_detach_and_aliases(kind: str) -> None:
    q = make(kind, 16, 32).requires_grad_()
    for alias in (q.detach(), q.data):
        assert type(alias) is type(q)
        assert not alias.requires_grad
        assert alias._handle is q._handle
    with torch.no_grad():
        q.detach().fill_(2.0)
    assert torch.equal(q.detach().dequantize(), requantized(q, torch.full((16, 32), 2.0)))


@EVERY
def test_clone(kind: str) -> None:
    q = make(kind, 16, 32)
    c = q.clone()
    assert type(c) is type(q)
    assert same_bits(c, q)
    assert c._quantizer is q._quantizer
    c.zero_()
    assert not same_bits(c, q)


def test_clone_has_a_gradient() -> None:
    q = make("mx", 16, 32).requires_grad_()
    (q.clone() * 3).sum().backward()
    assert torch.equal(q.grad, torch.full((16, 32), 3.0))


@EVERY
@pytest.mark.parametrize("shape", [(2, 8, 32), (4, -1, 32), (16, 1, 32), (-1, 32)])
def test_views_with_the_same_last_dimension(kind: str, shape: tuple[int, ...]) -> None:
    q = make(kind, 16, 32)
    for view in (q.view(shape), q.reshape(shape)):
        assert type(view) is type(q)
        assert torch.equal(view.dequantize(), q.dequantize().view(shape))
        assert view.rowwise_data.data_ptr() == q.rowwise_data.data_ptr()
        assert view.rowwise_data.shape[:-1] == view.shape[:-1]
    view.fill_(1.0)
    assert torch.equal(q.dequantize(), requantized(q, torch.ones(16, 32)))


def test_views_that_add_or_drop_dimensions() -> None:
    q = make("mx", 4, 1, 32)
    for f in (
        lambda t: t.unsqueeze(0),
        lambda t: t.squeeze(),
        lambda t: t.squeeze(1),
        lambda t: t.flatten(0, 1),
        lambda t: t.unflatten(0, (2, 2)),
        lambda t: t.view_as(torch.empty(2, 2, 32)),
    ):
        assert isinstance(f(q), MXFP8Tensor)
        assert torch.equal(f(q).dequantize(), f(q.dequantize()))


def test_views_have_gradients() -> None:
    q = make("mx", 16, 32).requires_grad_()
    weight = torch.randn(2, 8, 32)
    (q.view(2, 8, 32) * weight).sum().backward()
    assert torch.equal(q.grad, weight.view(16, 32))


@CLASSES
def test_other_views_write_through(kind: str) -> None:
    for view, write in (
        (lambda t: t[3], lambda t: t.fill_(1.5)),
        (lambda t: t[:, 5:9], lambda t: t.mul_(2.0)),
        (lambda t: t.t(), lambda t: t.copy_(torch.ones(32, 16))),
        (lambda t: t.view(-1), lambda t: t.zero_()),
        (lambda t: t.view(32, 16)[1], lambda t: t.add_(1.0)),
        (lambda t: t.chunk(2)[1], lambda t: t.neg_()),
        (lambda t: t.t()[2:4].t(), lambda t: t.fill_(0.5)),
    ):
        q = make(kind, 16, 32)
        v = q.dequantize()
        part = view(q)
        write(part)
        write(view(v))
        wanted = requantized(q, v)
        assert torch.equal(q.dequantize(), wanted), view
        assert torch.equal(part, view(wanted))
        q.fill_(3.0)
        assert torch.equal(part, view(q.dequantize()))


def test_assignment_by_index() -> None:
    q = make("mx", 16, 32)
    v = q.dequantize()
    for t in (q, v):
        t[0] = 5.0
        t[1:3, ::2] = torch.arange(16.0)
        t[torch.tensor([4, 5])] = 0.25
        t[t > 4] = 4.0
    assert torch.equal(q.dequantize(), v)  # values that E4M3 holds, in blocks of like magnitude


def test_a_view_prints_pickles_and_copies_as_plain() -> None:
    q = make("mx", 4, 32)
    part = q[1]
    assert repr(part) == repr(q.dequantize()[1])
    assert type(copy.deepcopy(part)) is torch.Tensor
    assert type(pickle.loads(pickle.dumps(part))) is torch.Tensor
    assert part.tolist() == q.dequantize()[1].tolist()


@EVERY
def test_to_dtype_keeps_the_bits(kind: str) -> None:
    q = make(kind, 16, 32)
    for other in (q.to(torch.bfloat16), q.to(torch.float16), q.type(torch.bfloat16)):
        assert type(other) is type(q)
        assert same_bits(other, q)
        assert torch.equal(other.dequantize(), q.dequantize(other.dtype))
    assert q.to(torch.float32) is q
    assert type(q.to(torch.float64)) is torch.Tensor


@EVERY
def test_float_half_and_bfloat16_are_plain(kind: str) -> None:
    q = make(kind, 16, 32)
    for got, dtype in (
        (q.float(), torch.float32),
        (q.half(), torch.float16),
        (q.bfloat16(), torch.bfloat16),
        (q.double(), torch.float64),
        (q.dequantize(torch.float64), torch.float64),
    ):
        assert type(got) is torch.Tensor
        assert torch.equal(got, q.dequantize(torch.float32).to(dtype))
    with pytest.raises(TypeError, match="dtype must be a floating-point dtype, got torch"):
        q.dequantize(torch.int8)


@EVERY
def test_to_device(kind: str) -> None:
    q = make(kind, 16, 32)
    assert isinstance(q.cpu(), type(q))
    other = q.to(q.device, copy=True)
    assert same_bits(other, q)
    assert other.rowwise_data.data_ptr() != q.rowwise_data.data_ptr()
    assert type(q.to("meta")) is type(q)
    assert q.to("meta").device.type == "meta"


@EVERY
def test_new_tensors_are_plain(kind: str) -> None:
    q = make(kind, 16, 32, dtype=torch.bfloat16).requires_grad_()
    for made in (
        torch.empty_like(q),
        torch.zeros_like(q, memory_format=torch.preserve_format),
        torch.ones_like(q),
        torch.full_like(q, 2.0),
        torch.randn_like(q),
        q.new_empty((16, 32)),
        q.new_zeros((16, 32)),
    ):
        assert type(made) is torch.Tensor
        assert made.shape == (16, 32)
        assert made.dtype == torch.bfloat16
        assert made.device == q.device
        assert not made.requires_grad
    assert torch.zeros_like(q, dtype=torch.float32).dtype == torch.float32


def test_dequantize_has_a_gradient() -> None:
    q = make("nv", 8, 16, dtype=torch.bfloat16).requires_grad_()
    y = q.dequantize(torch.float32)
    y.backward(torch.full_like(y, 1 / 3))
    assert torch.equal(q.grad, torch.full((8, 16), 1 / 3).bfloat16())
    assert not q.detach().dequantize().requires_grad
    assert torch.equal(torch.dequantize(q.detach()), q.detach().dequantize())
