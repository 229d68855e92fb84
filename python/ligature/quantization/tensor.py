"""Tensors in a low-precision format, as ``torch.Tensor`` subclasses.

Such a tensor has the shape, dtype and device of the tensor that it stands for, and instead of its
memory the parts of its format, in C++. There is one class per kind of format; they differ in names
only.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from .. import _C
from . import dispatch
from .dtypes import DType

if TYPE_CHECKING:
    from .quantizer import Quantizer


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype | None) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return tensor._handle.dequantize(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None


class QuantizedTensor(torch.Tensor):
    """A tensor whose values are kept in a low-precision format.

    Quantizers make them::

        quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
        q = quantizer(torch.randn(64, 64))
        q.dequantize()

    Any torch function takes it: it computes with the dequantized values and gives plain tensors.
    Functions that write into it quantize the result again, in place. ``detach``, ``clone``, ``to``
    another device or floating-point dtype, and views that keep the last dimension stay quantized;
    other views are in high precision and write through to it. As a parameter it works with every
    optimizer.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, handle: _C.QuantizedTensor, *, requires_grad: bool = False) -> QuantizedTensor:
        return dispatch.wrap(handle, requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch.dispatch(func, args, kwargs or {})

    # -- its parts

    @property
    def _handle(self) -> _C.QuantizedTensor:
        handle = _C.quantized_of(self)
        assert handle is not None
        return handle

    @property
    def format(self) -> str:
        """Name of its format, as ``explain()`` shows it: ``"mxfp8 e4m3"``."""
        return self._handle.format

    @property
    def _quantizer(self) -> Quantizer:
        """What quantizes new values into it."""
        from .quantizers import quantizer_of

        return quantizer_of(self._handle.quantizer)

    @property
    def rowwise_data(self) -> torch.Tensor | None:
        """The elements as bytes, with blocks along the last dimension; FP4 has two in a byte."""
        data = self._handle.parts[0]
        return None if data is None else data.view(*self.shape[:-1], data.shape[-1])

    @property
    def rowwise_scale(self) -> torch.Tensor | None:
        """What the elements of each block are multiplied by: float, or codes (E8M0, E4M3)."""
        return self._handle.parts[1]

    @property
    def columnwise_data(self) -> torch.Tensor | None:
        """The elements of the transposed matrix ``[last dimension, all others]``."""
        return self._handle.parts[3]

    @property
    def columnwise_scale(self) -> torch.Tensor | None:
        """Like ``rowwise_scale``, of the transposed matrix."""
        return self._handle.parts[4]

    @property
    def rowwise_amax(self) -> torch.Tensor | None:
        """NVFP4: the largest magnitude (of each row); the factor above the blocks is from it."""
        return self._handle.parts[2]

    @property
    def columnwise_amax(self) -> torch.Tensor | None:
        """Like ``rowwise_amax``, of the transposed matrix."""
        return self._handle.parts[5]

    _rowwise_data = rowwise_data
    _columnwise_data = columnwise_data
    _rowwise_scale_inv = rowwise_scale
    _columnwise_scale_inv = columnwise_scale

    # -- values

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor, rounded once to ``dtype``. Gradients pass unchanged."""
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(
                f"[{type(self).__name__}] dtype must be a floating-point dtype, got {dtype}"
            )
        if dtype is not None and dtype not in dispatch.DTYPES:
            return self.dequantize(torch.float32).to(dtype)
        if self.requires_grad and torch.is_grad_enabled():
            return _Dequantize.apply(self, dtype)
        return self._handle.dequantize(dtype)

    def quantize_(
        self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Quantizes ``tensor`` into it. A ``noop_flag`` that is not zero leaves it as it is."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"[{type(self).__name__}] tensor must be a tensor, got {type(tensor).__name__}"
            )
        if tensor.shape != self.shape:
            raise ValueError(
                f"[{type(self).__name__}] tensor must have shape {list(self.shape)}, "
                f"got {list(tensor.shape)}"
            )
        if noop_flag is None or noop_flag.item() == 0:
            with torch.no_grad():
                self.copy_(tensor)
        return self

    def float(self, memory_format: Any = torch.preserve_format) -> torch.Tensor:
        """The values in float32."""
        return self.dequantize(torch.float32)

    def half(self, memory_format: Any = torch.preserve_format) -> torch.Tensor:
        """The values in float16."""
        return self.dequantize(torch.float16)

    def bfloat16(self, memory_format: Any = torch.preserve_format) -> torch.Tensor:
        """The values in bfloat16."""
        return self.dequantize(torch.bfloat16)

    def _get_data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    def _set_data(self, tensor: torch.Tensor) -> None:
        quantized = isinstance(tensor, QuantizedTensor)
        data: Any = tensor if quantized else dispatch.wrap(self._handle.like(tensor.detach()))
        torch.Tensor.data.__set__(self, data)  # type: ignore[attr-defined]
        self.__class__ = type(data)

    # A plain tensor assigned to it is quantized.
    data = property(_get_data, _set_data)

    # -- what torch does with memory, which it has none of

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ""
        if self.grad_fn is not None:
            grad = f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            grad = ", requires_grad=True"
        return (
            f"{type(self).__name__}({self.format}, shape={list(self.shape)}, "
            f"dtype={self.dtype}{grad}, values=\n{self._handle.dequantize(torch.float32)})"
        )

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() > 0 or not spec else format(self.item(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        handle = self._handle
        args = (
            _FILE_VERSION,
            handle.fields,
            list(handle.sizes),
            handle.dtype,
            list(handle.parts),
            self.requires_grad,
        )
        state = torch._utils._get_obj_state(self)
        if not state:
            return _rebuild_quantized, args
        return torch._tensor._rebuild_from_type_v2, (_rebuild_quantized, type(self), args, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                f"[{type(self).__name__}] deepcopy takes tensors that the user made, got one that "
                f"was computed ({type(self.grad_fn).__name__}); copy its detach() instead"
            )
        handle = self._handle
        made = handle.with_tensors([copy.deepcopy(part, memo) for part in handle.tensors])
        made = made.with_quantizer(handle.quantizer.copy(deep=True))
        result = dispatch.wrap(made, self.requires_grad)
        memo[id(self)] = result
        result.__dict__ = copy.deepcopy(self.__dict__, memo)
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def share_memory_(self) -> QuantizedTensor:
        """Moves its parts into memory that other processes can share."""
        for part in self._handle.tensors:
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Are its parts in memory that other processes can share?"""
        return all(part.is_shared() for part in self._handle.tensors)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of all its parts."""
        return self._handle.bytes

    def data_ptr(self) -> int:
        """It has none: its parts have."""
        raise RuntimeError(
            f"[{type(self).__name__}] has no memory of its own; rowwise_data and columnwise_data "
            "have, and dequantize() gives some"
        )

    apply_ = dispatch.QuantizedView.apply_
    numpy = dispatch.QuantizedView.numpy
    tolist = dispatch.QuantizedView.tolist
    __array__ = dispatch.QuantizedView.__array__
    __dlpack__ = dispatch.QuantizedView.__dlpack__


class Float8Tensor(QuantizedTensor):
    """FP8 with one factor for the tensor, of delayed or of current scaling."""

    @property
    def _data(self) -> torch.Tensor | None:
        return self.rowwise_data

    @property
    def _transpose(self) -> torch.Tensor | None:
        return self.columnwise_data

    @property
    def _scale_inv(self) -> torch.Tensor:
        scale = self.rowwise_scale
        found = self.columnwise_scale if scale is None else scale
        assert found is not None
        return found

    @property
    def _fp8_dtype(self) -> DType:
        return DType.of_element(self._handle.fields["element"])


class Float8BlockwiseQTensor(QuantizedTensor):
    """FP8 with a float factor per block of 1x128 or 128x128."""

    _fp8_dtype = Float8Tensor._fp8_dtype


class MXFP8Tensor(QuantizedTensor):
    """FP8 with a power of two per block of 32."""

    _fp8_dtype = Float8Tensor._fp8_dtype


class NVFP4Tensor(QuantizedTensor):
    """FP4 with an E4M3 factor per block of 16 and a float factor above."""

    _amax_rowwise = QuantizedTensor.rowwise_amax
    _amax_columnwise = QuantizedTensor.columnwise_amax

    @property
    def _fp4_dtype(self) -> DType:
        return DType.kFloat4E2M1


# -- files

_FILE_VERSION = 1


def _rebuild_quantized(
    version: int,
    fields: dict[str, Any],
    sizes: list[int],
    dtype: torch.dtype,
    parts: list[torch.Tensor | None],
    requires_grad: bool,
) -> QuantizedTensor:
    """A quantized tensor from its parts, as files name it."""
    if version != _FILE_VERSION:
        raise ValueError(
            f"[QuantizedTensor] a file must have version {_FILE_VERSION}, got {version!r}"
        )
    return dispatch.wrap(_C.make_quantized(fields, sizes, dtype, parts), requires_grad)


def _collate(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    """A batch of a data loader: values in high precision."""
    values = [dispatch.values_of(tensor) for tensor in batch]
    return collate_tensor_fn(values, collate_fn_map=collate_fn_map)


dispatch.CLASSES.update(
    delayed=Float8Tensor,
    current=Float8Tensor,
    block=Float8BlockwiseQTensor,
    mx=MXFP8Tensor,
    nv=NVFP4Tensor,
)
_C.set_quantized_wrapper(dispatch.wrap)
_CLASSES = [Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor]
torch.serialization.add_safe_globals([_rebuild_quantized, *_CLASSES])
default_collate_fn_map.update(dict.fromkeys([*_CLASSES, dispatch.QuantizedView], _collate))
