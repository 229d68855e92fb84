"""Quantized tensors under torch's functions: what is computed and written, their parts, and
autograd's tools."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_support import (
    CLASSES,
    E2M1,
    E4M3,
    EVERY,
    QUANTIZERS,
    bits,
    make,
    requantized,
    same_bits,
    written,
)

from ligature.quantization import (
    Float8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    QuantizedTensor,
)

# -- functions compute with the values


@EVERY
def test_functions_give_plain_tensors(kind: str) -> None:
    q = make(kind, 24, 40)
    v = q.dequantize()
    other = torch.randn(24, 40)
    for f in (
        lambda t: t + 1,
        lambda t: other * t,
        lambda t: t @ other.t(),
        lambda t: torch.cat([t, other, t]),
        lambda t: F.linear(other, t),
        lambda t: t.float().softmax(-1),
        lambda t: torch.stack([t, t]),
        lambda t: t.sum(dim=1),
        lambda t: t.amax(dim=-1),
        lambda t: t[3:5, ::2],
        lambda t: t.t(),
        lambda t: t.permute(1, 0).reshape(-1),
        lambda t: torch.where(t > 0, t, other),
        lambda t: F.layer_norm(t, (40,)),
        lambda t: torch.einsum("ij,ij->i", t, other),
        lambda t: t.max(dim=0).values,
        lambda t: t.double(),
        lambda t: t.to(torch.int32),
        lambda t: t.view(torch.int32),
    ):
        result = f(q)
        assert not isinstance(result, QuantizedTensor)
        assert torch.equal(result, f(v)), f
        assert type(result + 0) is torch.Tensor
    assert q.sum().item() == v.sum().item()
    assert torch.equal(q, v)
    assert torch.allclose(q, v)
    assert q.tolist() == v.tolist()
    if v.is_cpu:
        assert (q.numpy() == v.numpy()).all()
    else:
        with pytest.raises(TypeError, match="numpy"):
            q.numpy()
    assert (q.numpy(force=True) == v.cpu().numpy()).all()
    assert (q.cpu().numpy() == v.cpu().numpy()).all()
    assert [row.tolist() for row in q] == v.tolist()
    assert torch.equal(torch.from_dlpack(q), v)


def test_functions_in_inference_mode() -> None:
    with torch.inference_mode():
        q = make("mx", 24, 64)
        v, x = q.dequantize(), torch.randn(3, 64)
        assert torch.equal(F.linear(x, q), F.linear(x, v))
        assert isinstance(q.reshape(2, 12, 64), MXFP8Tensor)
        assert isinstance(q.to(torch.bfloat16), MXFP8Tensor)
        assert q.contiguous() is q
        q[3] = 1.0
        assert torch.equal(q[3], torch.ones(64))
        q.mul_(2)
        assert torch.equal(q[3], torch.full((64,), 2.0))
        assert same_bits(copy.deepcopy(q), q)


def test_out_arguments() -> None:
    a, b, out = make("mx", 16, 64), torch.randn(16, 64), torch.empty(16, 64)
    assert torch.add(a, b, out=out) is out
    assert torch.equal(out, a.dequantize() + b)
    q = make("mx", 16, 64)
    wanted = requantized(q, a.dequantize() + b)
    assert torch.add(a, b, out=q) is q
    assert torch.equal(q.dequantize(), wanted)


def test_gradients_of_functions() -> None:
    q = make("mx", 24, 64).requires_grad_()
    x = torch.randn(5, 64, requires_grad=True)
    F.linear(x, q).square().sum().backward()
    v = q.detach().dequantize().requires_grad_()
    y = x.detach().clone().requires_grad_()
    F.linear(y, v).square().sum().backward()
    assert torch.equal(q.grad, v.grad)
    assert torch.equal(x.grad, y.grad)
    assert type(q.grad) is torch.Tensor


# -- writing


@EVERY
def test_writing_functions(kind: str) -> None:
    other = torch.randn(24, 40)
    for f in (
        lambda t: t.add_(other),
        lambda t: t.mul_(0.5),
        lambda t: t.zero_(),
        lambda t: t.fill_(3.0),
        lambda t: t.clamp_(-1, 1),
        lambda t: t.addcmul_(other, other),
        lambda t: t.lerp_(other, 0.3),
        lambda t: t.masked_fill_(other > 0, 0.0),
        lambda t: t.index_copy_(0, torch.tensor([2]), other[:1]),
        lambda t: t.add_(t),
        lambda t: t.copy_(other),
        lambda t: t.copy_(other[0].double()),
        lambda t: t.copy_(make("mx", 24, 40)),
    ):
        torch.manual_seed(7)
        q = make(kind, 24, 40)
        v = q.dequantize()
        where = [part.data_ptr() for part in q._handle.tensors]
        version = q._version
        torch.manual_seed(8)
        assert f(q) is q
        torch.manual_seed(8)
        f(v)
        assert torch.equal(q.dequantize(), requantized(q, v)), f
        assert [part.data_ptr() for part in q._handle.tensors] == where
        assert q._version == version + 1


@EVERY
def test_writing_keeps_the_orientations_together(kind: str) -> None:
    q = make(kind, 32, 48)
    x = torch.randn(32, 48)
    q.copy_(x)
    assert same_bits(q, written(q, x))
    columnwise = make(kind, 32, 48, rowwise=False)
    columnwise.copy_(x)
    assert columnwise.rowwise_data is None
    assert torch.equal(columnwise.columnwise_data, q.columnwise_data)


@EVERY
def test_plain_from_quantized(kind: str) -> None:
    q = make(kind, 16, 32)
    plain = torch.empty(16, 32, dtype=torch.bfloat16)
    assert plain.copy_(q) is plain
    assert torch.equal(plain, q.dequantize().bfloat16())
    plain.add_(q)
    assert type(plain) is torch.Tensor


@EVERY
def test_quantized_from_quantized_copies_bytes(kind: str) -> None:
    source, to = make(kind, 16, 32), make(kind, 16, 32, dtype=torch.bfloat16)
    to.copy_(source)
    assert same_bits(to, source)
    assert to.dtype == torch.bfloat16
    assert to._quantizer is not source._quantizer


def test_quantized_from_another_format() -> None:
    source, to = make("nv", 16, 32), make("mx", 16, 32)
    to.copy_(source)
    assert same_bits(to, written(to, source.dequantize()))


@EVERY
def test_quantize_(kind: str) -> None:
    q = make(kind, 16, 32)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    assert q.quantize_(x) is q
    assert torch.equal(q.dequantize(), written(q, x).dequantize(q.dtype))
    before = bits(q)
    q.quantize_(x * 2, noop_flag=torch.ones(1))
    assert all(map(torch.equal, bits(q), before))


def test_quantize_refuses() -> None:
    q = make("mx", 16, 32)
    with pytest.raises(ValueError, match=r"\[MXFP8Tensor\] tensor must have shape \[16, 32\]"):
        q.quantize_(torch.randn(32))
    with pytest.raises(TypeError, match="tensor must be a tensor, got float"):
        q.quantize_(1.0)
    with pytest.raises(RuntimeError, match="must match the existing size"):
        q.copy_(torch.randn(16, 31))


@CLASSES
def test_writes_are_caught_by_autograd(kind: str) -> None:
    w = torch.randn(16, 32, requires_grad=True)
    for write in (
        lambda q: q.mul_(2),
        lambda q: q.quantize_(torch.randn(16, 32)),
        lambda q: q.detach().zero_(),
        lambda q: q.view(4, 4, 32).zero_(),
        lambda q: q[0].zero_(),
        lambda q: q.t().zero_(),
    ):
        q = make(kind, 16, 32)
        loss = (q * w).sum()
        write(q)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        # The parts are what operations in C++ save.
        q = make(kind, 16, 32)
        versions = [part._version for part in q._handle.tensors]
        write(q)
        after = [part._version for part in q._handle.tensors]
        assert all(b > a for a, b in zip(versions, after, strict=True))


def test_shapes_cannot_be_written() -> None:
    q = make("mx", 16, 32)
    before = bits(q)
    for f in (lambda: q.t_(), lambda: q.resize_(4, 4), lambda: q.unsqueeze_(0)):
        with pytest.raises(RuntimeError, match=r"\[MXFP8Tensor\] aten.* must leave a tensor of"):
            f()
    assert q.shape == (16, 32)
    assert all(map(torch.equal, bits(q), before))


# -- parts


def test_parts() -> None:
    x = torch.randn(2, 16, 48)
    mx = MXFP8Quantizer(E4M3)(x)
    assert mx.format == "mxfp8 e4m3"
    assert mx.rowwise_data.shape == (2, 16, 48)
    assert mx.rowwise_scale.shape == (32, 2)
    assert mx.columnwise_data.shape == (48, 32)
    assert mx.columnwise_scale.shape == (48, 1)
    assert mx._rowwise_data.data_ptr() == mx.rowwise_data.data_ptr()
    assert mx._columnwise_data.data_ptr() == mx.columnwise_data.data_ptr()
    assert mx._rowwise_scale_inv is mx.rowwise_scale
    assert mx._columnwise_scale_inv is mx.columnwise_scale
    assert mx._fp8_dtype is E4M3
    assert mx.rowwise_amax is None
    assert mx.nbytes == 2 * (32 * 48) + 32 * 2 + 48
    nv = NVFP4Quantizer(E2M1)(x)
    assert nv.rowwise_data.shape == (2, 16, 24)
    assert nv.rowwise_amax.item() == x.abs().max().item()
    assert nv.columnwise_amax.item() == x.abs().max().item()
    f8 = make("current", 16, 32)
    assert isinstance(f8, Float8Tensor)
    assert f8._data.shape == (16, 32)
    assert torch.equal(f8._transpose, f8._data.t())
    assert f8._scale_inv.shape == (1,)


@EVERY
def test_repr(kind: str) -> None:
    q = make(kind, 3, 32)
    text = repr(q)
    assert text.startswith(f"{type(q).__name__}({q.format}, shape=[3, 32], dtype=torch.float32")
    assert repr(q.dequantize()) in text
    assert "requires_grad=True" in repr(q.requires_grad_())
    assert "grad_fn=" in repr(q.clone())
    assert f"{q}" == repr(q)


def test_memory_is_that_of_the_parts() -> None:
    q = make("mx", 16, 32)
    with pytest.raises(RuntimeError, match=r"\[MXFP8Tensor\] has no memory of its own"):
        q.data_ptr()
    for access in (q.untyped_storage, q.storage):
        with pytest.raises(RuntimeError, match="storage"):
            access()


def test_apply_() -> None:
    q = make("mx", 4, 32)
    v = q.dequantize()
    if not v.is_cpu:
        with pytest.raises(TypeError, match="only implemented on CPU"):
            q.apply_(lambda x: 2 * x)
        assert torch.equal(q.dequantize(), v)
        return
    assert q.apply_(lambda x: 2 * x) is q
    assert torch.equal(q.dequantize(), 2 * v)
    q[1].apply_(lambda x: 1.0)
    assert torch.equal(q[1], torch.ones(32))


# -- under autograd's tools


def test_saved_tensor_hooks() -> None:
    q = make("mx", 16, 32)
    w = torch.randn(16, 32, requires_grad=True)
    seen: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(type(t)) or t.detach().clone(), lambda t: t
    ):
        loss = (q * w).sum()
    loss.backward()
    assert MXFP8Tensor in seen
    assert torch.equal(w.grad, q.dequantize())
    w.grad = None
    with torch.autograd.graph.save_on_cpu():
        loss = (q * w).sum()
    loss.backward()
    assert torch.equal(w.grad, q.dequantize())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    q = make("mx", 16, 32).requires_grad_()
    w = torch.randn(16, 32, requires_grad=True)

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).exp() * a

    f(q, w).sum().backward()
    wanted = [q.grad.clone(), w.grad.clone()]
    q.grad = w.grad = None
    torch.utils.checkpoint.checkpoint(f, q, w, use_reentrant=reentrant).sum().backward()
    assert torch.equal(q.grad, wanted[0])
    assert torch.equal(w.grad, wanted[1])


@EVERY
def test_threads(kind: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    x = torch.randn(4, 64, 64)
    quantizer = QUANTIZERS[kind]()
    wanted = [quantizer(part).dequantize().cpu() for part in x]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            got = pool.map(lambda part: quantizer(part).dequantize().cpu(), x)
            assert all(map(torch.equal, got, wanted))
