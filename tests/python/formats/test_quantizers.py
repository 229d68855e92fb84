"""Quantizers: what they make, their arguments, usages, gradients and errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from quantized_support import CLASSES, E2M1, E4M3, E5M2, EVERY, QUANTIZERS, make, same_bits

from ligature.quantization import (
    DType,
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    NVFP4Tensor,
)


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("delayed", Float8Tensor),
        ("current", Float8Tensor),
        ("block 1d", Float8BlockwiseQTensor),
        ("block 2d", Float8BlockwiseQTensor),
        ("mx", MXFP8Tensor),
        ("nv", NVFP4Tensor),
    ],
)
def test_class_of_the_result(kind: str, cls: type) -> None:
    x = torch.randn(4, 6, 32, dtype=torch.bfloat16)
    q = QUANTIZERS[kind]()(x)
    assert type(q) is cls
    assert q.shape == x.shape
    assert q.dtype == x.dtype
    assert q.device == x.device
    assert q.is_contiguous()
    assert q.stride() == x.stride()
    assert not q.requires_grad


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_near(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(32, 64, dtype=dtype)
    y = QUANTIZERS[kind]()(x).dequantize()
    assert type(y) is torch.Tensor
    assert y.dtype == dtype
    coarse = 0.26 if kind.startswith(("nv", "current", "mx 2d")) else 0.07
    assert ((y - x).abs() <= coarse * x.abs() + 0.2).all()


@EVERY
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True), (True, True)])
def test_usage(kind: str, rowwise: bool, columnwise: bool) -> None:
    quantizer = QUANTIZERS[kind](rowwise=rowwise, columnwise=columnwise)
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (rowwise, columnwise)
    x = torch.randn(32, 32)
    q = quantizer(x)
    assert (q.rowwise_data is not None) == rowwise
    assert (q.columnwise_data is not None) == columnwise
    assert (q.rowwise_scale is not None) == rowwise
    assert (q.columnwise_scale is not None) == columnwise
    other = QUANTIZERS[kind]()
    other.set_usage(rowwise=rowwise, columnwise=columnwise)
    assert same_bits(other(x), q)
    other.set_usage()
    assert (other.rowwise_usage, other.columnwise_usage) == (rowwise, columnwise)
    other.rowwise_usage, other.columnwise_usage = columnwise, rowwise
    assert (other.rowwise_usage, other.columnwise_usage) == (columnwise, rowwise)


def test_no_usage_is_refused() -> None:
    with pytest.raises(ValueError, match="neither orientation"):
        MXFP8Quantizer(E4M3, rowwise=False, columnwise=False)(torch.randn(32, 32))


@EVERY
def test_gradient_passes_unchanged(kind: str) -> None:
    x = torch.randn(8, 32, requires_grad=True)
    q = QUANTIZERS[kind]()(x * 1)
    assert q.requires_grad
    assert q.grad_fn is not None
    weight = torch.randn(8, 32)
    (q.dequantize() * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    x.grad = None
    (QUANTIZERS[kind]()(x) * weight).sum().backward()  # any function, not only dequantize
    assert torch.equal(x.grad, weight)
    with torch.no_grad():
        assert not QUANTIZERS[kind]()(x).requires_grad


def test_gradient_has_the_dtype_of_each_side() -> None:
    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    y = MXFP8Quantizer(E4M3)(x, dtype=torch.float16).dequantize(torch.float32)
    assert y.dtype == torch.float32
    y.backward(torch.full_like(y, 1 / 3))
    assert x.grad.dtype == torch.bfloat16
    wanted = torch.tensor(1 / 3).half().bfloat16()
    assert torch.equal(x.grad, wanted.expand(8, 32))


def test_a_quantized_tensor_is_quantized_again() -> None:
    q = make("mx", 16, 64).requires_grad_()
    again = NVFP4Quantizer(E2M1)(q)
    assert same_bits(again, NVFP4Quantizer(E2M1)(q.detach().dequantize()))
    again.dequantize().sum().backward()
    assert torch.equal(q.grad, torch.ones(16, 64))


@EVERY
def test_out_and_update(kind: str) -> None:
    x, y = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    quantizer = QUANTIZERS[kind]()
    q = quantizer(x)
    version, where = q._version, q.rowwise_data.data_ptr()
    assert quantizer.quantize(y, out=q) is q
    assert same_bits(q, quantizer(y))
    assert q.rowwise_data.data_ptr() == where
    assert q._version > version
    assert quantizer.update_quantized(x, q) is q
    assert same_bits(q, quantizer(x))
    quantizer.update_quantized(y, q, noop_flag=torch.ones(1))
    assert same_bits(q, quantizer(x))
    quantizer.update_quantized(y, q, noop_flag=torch.zeros(1))
    assert same_bits(q, quantizer(y))


@CLASSES
def test_update_is_caught_by_autograd(kind: str) -> None:
    quantizer = QUANTIZERS[kind]()
    q = quantizer(torch.randn(16, 32))
    w = torch.randn(16, 32, requires_grad=True)
    loss = (q * w).sum()
    quantizer.update_quantized(torch.randn(16, 32), q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@EVERY
def test_make_empty(kind: str) -> None:
    quantizer = QUANTIZERS[kind]()
    q = quantizer.make_empty((3, 5, 40), dtype=torch.bfloat16)
    assert q.shape == (3, 5, 40)
    assert q.dtype == torch.bfloat16
    assert torch.equal(q.dequantize(), torch.zeros(3, 5, 40, dtype=torch.bfloat16))
    x = torch.randn(3, 5, 40, dtype=torch.bfloat16)
    quantizer.update_quantized(x, q)
    assert same_bits(q, quantizer(x))
    assert quantizer.make_empty((16, 16), requires_grad=True).requires_grad


def test_make_empty_notes_nothing() -> None:
    quantizer = QUANTIZERS["delayed"]()
    quantizer.make_empty((16, 16))
    assert quantizer.amax.item() == 0


def test_delayed_scaling_shares_its_tensors() -> None:
    scale, amax = torch.tensor([2.0]), torch.tensor([0.5])
    quantizer = Float8Quantizer(scale, amax, E4M3)
    q = quantizer(torch.tensor([[1.0, -3.0]]))
    assert amax.item() == 3.0
    assert q._scale_inv.item() == 0.5
    assert q._data.view(torch.float8_e4m3fn).tolist() == [[2.0, -6.0]]
    scale.fill_(4.0)
    assert quantizer(torch.tensor([[1.0, 0.5]]))._scale_inv.item() == 0.25
    assert amax.item() == 3.0
    other = quantizer.copy()
    other(torch.tensor([[7.0, 0.0]]))
    assert amax.item() == 7.0
    deep = copy.deepcopy(quantizer)
    deep(torch.tensor([[9.0, 0.0]]))
    assert amax.item() == 7.0
    assert deep.amax.item() == 9.0


@EVERY
def test_copy(kind: str) -> None:
    quantizer = QUANTIZERS[kind]()
    other = quantizer.copy()
    assert type(other) is type(quantizer)
    other.set_usage(columnwise=False)
    assert quantizer.columnwise_usage
    x = torch.randn(32, 32)
    assert torch.equal(quantizer(x).rowwise_data, other(x).rowwise_data)
    assert type(copy.deepcopy(quantizer)) is type(quantizer)


@EVERY
def test_a_tensor_knows_its_quantizer(kind: str) -> None:
    quantizer = QUANTIZERS[kind]()
    q = quantizer(torch.randn(32, 32))
    assert q._quantizer is quantizer
    name = repr(quantizer)
    del quantizer
    assert repr(q._quantizer) == name


@EVERY
def test_is_quantizable(kind: str) -> None:
    quantizer = QUANTIZERS[kind]()
    assert quantizer.is_quantizable(torch.randn(3, 5))
    assert quantizer.is_quantizable(torch.randn(16, dtype=torch.bfloat16))
    assert not quantizer.is_quantizable(torch.randn(3, 5, dtype=torch.float64))
    assert not quantizer.is_quantizable(torch.ones(3, 5, dtype=torch.int32))
    assert not quantizer.is_quantizable(torch.tensor(1.0))


def test_settings_can_be_read() -> None:
    current = Float8CurrentScalingQuantizer(
        torch.float8_e4m3fn, force_pow_2_scales=True, amax_epsilon=0.5
    )
    assert current.dtype is DType.kFloat8E4M3
    assert current.force_pow_2_scales
    assert current.amax_epsilon == 0.5
    assert not current.with_amax_reduction
    block = Float8BlockQuantizer(torch.float8_e5m2)
    assert block.dtype is DType.kFloat8E5M2
    assert (block.block_scaling_dim, block.block_len) == (2, 128)
    assert block.force_pow_2_scales
    assert Float8BlockQuantizer(E4M3, block_scaling_dim=1).block_scaling_dim == 1
    assert not MXFP8Quantizer(E4M3).with_2d_quantization
    nv = NVFP4Quantizer(E2M1, with_rht=True, stochastic_rounding=True, nvfp4_use_4over6=True)
    assert nv.with_rht
    assert nv.stochastic_rounding
    assert nv.nvfp4_use_4over6
    assert not nv.row_scaled_nvfp4
    assert not nv.with_2d_quantization


X = torch.ones(4, 16, device="cpu")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MXFP8Quantizer("e4m3"), TypeError, r"\[MXFP8Quantizer\] fp8_dtype must be"),
        (lambda: MXFP8Quantizer(E2M1), ValueError, "fp8_dtype must be .* got DType.kFloat4E2M1"),
        (lambda: MXFP8Quantizer(torch.float32), ValueError, "fp8_dtype .* got torch.float32"),
        (lambda: NVFP4Quantizer(E4M3), ValueError, "fp4_dtype must be DType.kFloat4E2M1"),
        (
            lambda: MXFP8Quantizer(E4M3, rowwise=None),
            TypeError,
            "rowwise must be True or False, got None",
        ),
        (
            lambda: Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=1),
            TypeError,
            "force_pow_2_scales must be True or False, got 1",
        ),
        (
            lambda: Float8CurrentScalingQuantizer(E4M3, amax_epsilon=-1.0),
            ValueError,
            "amax_epsilon must be zero or more and finite, got -1.0",
        ),
        (
            lambda: Float8CurrentScalingQuantizer(E4M3, amax_epsilon="0"),
            TypeError,
            "amax_epsilon must be a number, got '0'",
        ),
        (
            lambda: Float8CurrentScalingQuantizer(E4M3, amax_reduction_group=object()),
            ValueError,
            "amax_reduction_group must be None without with_amax_reduction",
        ),
        (
            lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=3),
            ValueError,
            r"\[Float8BlockQuantizer\] block_scaling_dim must be 1 or 2, got 3",
        ),
        (
            lambda: Float8Quantizer(1.0, torch.zeros(1), E4M3),
            TypeError,
            "scale must be a tensor, got float",
        ),
        (
            lambda: Float8Quantizer(torch.ones(2), torch.zeros(1), E4M3),
            ValueError,
            r"scale must be float32 with one element, got torch.float32 \[2\]",
        ),
        (
            lambda: Float8Quantizer(torch.ones(1), torch.zeros(1).double(), E4M3),
            ValueError,
            "amax must be float32 with one element",
        ),
        (
            lambda: NVFP4Quantizer(E2M1, with_2d_quantization=True, with_rht=True),
            ValueError,
            "with_2d_quantization must be False with with_rht",
        ),
        (
            lambda: NVFP4Quantizer(E2M1, with_2d_quantization=True, row_scaled_nvfp4=True),
            ValueError,
            "with_2d_quantization must be False with row_scaled_nvfp4",
        ),
        (
            lambda: NVFP4Quantizer(E2M1, with_rht=True, with_random_sign_mask=False),
            ValueError,
            "with_random_sign_mask must be True",
        ),
        (
            lambda: NVFP4Quantizer(E2M1, with_rht=True, with_post_rht_amax=False),
            ValueError,
            "with_post_rht_amax must be True",
        ),
        (
            lambda: NVFP4Quantizer(E2M1, nvfp4_use_4over6=True, nvfp4_e4m3_max=384),
            ValueError,
            "nvfp4_e4m3_max must be 256 or 448, got 384",
        ),
        (
            lambda: NVFP4Quantizer(E2M1, nvfp4_use_4over6=True, nvfp4_4over6_err_mode="L2"),
            ValueError,
            "nvfp4_4over6_err_mode must be 'MAE' or 'MSE', got 'L2'",
        ),
        (lambda: MXFP8Quantizer(E4M3)([1.0]), TypeError, "tensor must be a tensor, got list"),
        (lambda: MXFP8Quantizer(E4M3)(X.double()), TypeError, r"\[MXFP8Quantizer\] tensor: .*got"),
        (lambda: MXFP8Quantizer(E4M3)(X.sum()), TypeError, "one or more dimensions"),
        (
            lambda: MXFP8Quantizer(E4M3)(X, dtype=torch.float64),
            TypeError,
            "dtype must be float32, bfloat16 or float16, got torch.float64",
        ),
        (
            lambda: MXFP8Quantizer(E4M3)(X, out=MXFP8Quantizer(E4M3)(X), dtype=torch.half),
            ValueError,
            "dtype must be that of out",
        ),
        (
            lambda: MXFP8Quantizer(E4M3).update_quantized(X, X),
            TypeError,
            "dst must be a quantized tensor, got Tensor",
        ),
        (
            lambda: MXFP8Quantizer(E4M3).update_quantized(X, MXFP8Quantizer(E5M2)(X)),
            ValueError,
            "dst must be in this quantizer's format.*element=e4m3, got element=e5m2",
        ),
        (
            lambda: MXFP8Quantizer(E4M3).update_quantized(X, MXFP8Quantizer(E4M3)(X[:2])),
            ValueError,
            r"src must have the shape of dst, \[2, 16\], got \[4, 16\]",
        ),
        (
            lambda: MXFP8Quantizer(E4M3).make_empty((2, 2), dtype=torch.int8),
            TypeError,
            "dtype must be float32",
        ),
        (lambda: MXFP8Quantizer(E4M3).make_empty(()), TypeError, "one or more dimensions"),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# -- several processes


def _reduced(rank: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    x = torch.full((16, 16), 3.0 + rank, device=device)
    current = Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    nv = NVFP4Quantizer(E2M1, with_amax_reduction=True)
    assert current.with_amax_reduction
    assert current.amax_reduction_group is None
    found = {
        "current": current(x)._scale_inv.item(),
        "copy": current.copy()(x)._scale_inv.item(),
        "nv": nv(x).rowwise_amax.item(),
        "alone": Float8CurrentScalingQuantizer(E4M3)(x)._scale_inv.item(),
    }
    torch.save(found, f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


def test_amax_of_a_group(tmp_path: Path, device: str) -> None:
    mp.spawn(_reduced, args=(str(tmp_path), device), nprocs=2)

    def inverse(amax: float) -> float:
        return (1 / (torch.tensor(448.0, device="cpu") / amax)).item()

    for rank in range(2):
        found = torch.load(tmp_path / str(rank))
        assert found["current"] == inverse(4.0)
        assert found["copy"] == inverse(4.0)
        assert found["nv"] == 4.0
        assert found["alone"] == inverse(3.0 + rank)


def test_reduction_without_a_group_says_so() -> None:
    with pytest.raises(ValueError, match="process group has not been initialized"):
        Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)(torch.randn(16, 16))
