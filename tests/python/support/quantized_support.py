"""Quantizers of every kind, for the tests of quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ligature.quantization import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
)

E4M3, E5M2, E2M1 = DType.kFloat8E4M3, DType.kFloat8E5M2, DType.kFloat4E2M1

QUANTIZERS: dict[str, Callable[..., Quantizer]] = {
    "delayed": lambda **kw: Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), E4M3, **kw),
    "current": lambda **kw: Float8CurrentScalingQuantizer(E5M2, **kw),
    "block 1d": lambda **kw: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **kw),
    "block 2d": lambda **kw: Float8BlockQuantizer(E4M3, force_pow_2_scales=False, **kw),
    "mx": lambda **kw: MXFP8Quantizer(E4M3, **kw),
    "mx 2d": lambda **kw: MXFP8Quantizer(E5M2, with_2d_quantization=True, **kw),
    "nv": lambda **kw: NVFP4Quantizer(E2M1, **kw),
    "nv 2d": lambda **kw: NVFP4Quantizer(E2M1, with_2d_quantization=True, **kw),
    "nv rht": lambda **kw: NVFP4Quantizer(E2M1, with_rht=True, **kw),
    "nv rows": lambda **kw: NVFP4Quantizer(E2M1, row_scaled_nvfp4=True, **kw),
}
EVERY = pytest.mark.parametrize("kind", QUANTIZERS)
# One of each class, for what does not depend on the rest.
CLASSES = pytest.mark.parametrize("kind", ["delayed", "current", "block 2d", "mx", "nv"])


def make(kind: str, *shape: int, dtype: torch.dtype = torch.float32, **kw: Any) -> QuantizedTensor:
    return QUANTIZERS[kind](**kw)(torch.randn(shape or (32, 48), dtype=dtype))


def written(q: torch.Tensor, x: torch.Tensor) -> QuantizedTensor:
    """What a write of ``x`` leaves in ``q``: with delayed scaling, a scale that holds it."""
    assert isinstance(q, QuantizedTensor)
    quantizer = q._quantizer
    if isinstance(quantizer, Float8Quantizer):
        largest = 448.0 if quantizer.dtype is E4M3 else 57344.0
        amax = x.detach().float().abs().max()
        scale = torch.full((1,), largest) / amax if amax > 0 else torch.ones(1)
        usage = {"rowwise": q.rowwise_data is not None, "columnwise": q.columnwise_data is not None}
        quantizer = Float8Quantizer(scale, torch.zeros(1), quantizer.dtype, **usage)
    return quantizer.quantize(x.detach())


def requantized(q: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    """The values of ``q`` after ``values`` were written into it."""
    return written(q, values).dequantize()


def bits(q: torch.Tensor) -> list[torch.Tensor]:
    """Copies of all its parts."""
    assert isinstance(q, QuantizedTensor)
    return [part.clone() for part in q._handle.tensors]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.format == b.format and all(map(torch.equal, bits(a), bits(b)))
