"""What all quantizers have in common."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _C
from .._arguments import check_group, default_device
from .dispatch import wrap
from .dtypes import DType
from .tensor import QuantizedTensor


class _Quantize(torch.autograd.Function):
    """The gradient passes as if nothing had been rounded."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return quantizer._quantize(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if isinstance(grad, QuantizedTensor):
            grad = grad.dequantize()
        return grad.to(ctx.dtype), None, None


class Quantizer:
    """Base class of the quantizers; the state of each is in C++."""

    _handle: _C.Quantizer
    _amax_reduction_group: Any = None

    def _make(
        self,
        fields: dict[str, Any],
        rowwise: bool,
        columnwise: bool,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        op = type(self).__name__
        for name, value in {"rowwise": rowwise, "columnwise": columnwise, **fields}.items():
            if name not in _NOT_FLAGS and not isinstance(value, bool):
                raise TypeError(
                    f"[{op}] {_ARGUMENTS.get(name, name)} must be True or False, got {value!r}"
                )
        self._adopt(_C.Quantizer(fields, rowwise, columnwise, scale, amax))

    def _adopt(self, handle: _C.Quantizer) -> None:
        self._handle = handle
        handle.owner = weakref.ref(self)

    def _reduce_over(self, enabled: bool, group: Any) -> None:
        if group is not None and not enabled:
            raise ValueError(
                f"[{type(self).__name__}] amax_reduction_group must be None without "
                f"with_amax_reduction, got {group!r}"
            )
        check_group(type(self).__name__, "amax_reduction_group", group)
        if enabled:
            self._amax_reduction_group = group
            self._handle.set_reduce_amax(_reducer(group))

    # -- quantizing

    def __call__(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """The same as ``quantize``."""
        return self.quantize(tensor, out=out, dtype=dtype)

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """``tensor`` in this quantizer's format. The gradient passes unchanged.

        Args:
            tensor: In float32, bfloat16 or float16, with at least one dimension.
            out: A tensor in this format, to be written into.
            dtype: What the result stands for; that of ``tensor`` by default.
        """
        if out is not None:
            if dtype is not None and dtype != out.dtype:
                raise ValueError(
                    f"[{type(self).__name__}] dtype must be that of out, {out.dtype}, got {dtype}"
                )
            return self.update_quantized(tensor, out)
        self._check(tensor, "tensor")
        if dtype is not None:
            self._check_dtype(dtype)
        if isinstance(tensor, QuantizedTensor):
            tensor = tensor.dequantize()
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Quantize.apply(tensor, self, dtype)
        return self._quantize(tensor, dtype)

    def _quantize(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> QuantizedTensor:
        made = self._handle.quantize(tensor)
        return wrap(made if dtype is None else made.with_dtype(dtype))

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantizes ``src`` into the memory of ``dst``, and returns ``dst``.

        A ``noop_flag`` that is not zero leaves ``dst`` as it is.
        """
        op = type(self).__name__
        self._check(src, "src")
        handle = _C.quantized_of(dst) if isinstance(dst, torch.Tensor) else None
        if handle is None:
            raise TypeError(f"[{op}] dst must be a quantized tensor, got {type(dst).__name__}")
        if handle.fields != self._handle.fields:
            raise ValueError(
                f"[{op}] dst must be in this quantizer's format, {self._handle.format} with "
                f"{_differences(self._handle.fields, handle.fields)}"
            )
        if src.shape != dst.shape:
            raise ValueError(
                f"[{op}] src must have the shape of dst, {list(dst.shape)}, got {list(src.shape)}"
            )
        if noop_flag is not None and noop_flag.item() != 0:
            return dst
        if isinstance(src, QuantizedTensor):
            src = src.dequantize()
        self._handle.update(src.detach(), handle)
        if not dst.is_inference():
            torch.autograd.graph.increment_version(dst)
        return dst

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """A tensor of this format, all zeros."""
        self._check_dtype(dtype)
        made = self._handle.make_empty([int(n) for n in shape], dtype, default_device(device))
        return wrap(made, requires_grad)

    def is_quantizable(self, tensor: torch.Tensor) -> bool:
        """Can it quantize a tensor of this shape and dtype?"""
        return not self._handle.why_not(tensor)

    def _check(self, tensor: Any, argument: str) -> None:
        op = type(self).__name__
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"[{op}] {argument} must be a tensor, got {type(tensor).__name__}")
        if why_not := self._handle.why_not(tensor):
            raise TypeError(f"[{op}] {argument}: {why_not}")

    def _check_dtype(self, dtype: Any) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"[{type(self).__name__}] dtype must be float32, bfloat16 or float16, got {dtype}"
            )

    # -- which orientations

    @property
    def rowwise_usage(self) -> bool:
        """Does it make row-wise data, for products over the last dimension?"""
        return self._handle.rowwise

    @rowwise_usage.setter
    def rowwise_usage(self, value: bool) -> None:
        self._handle.rowwise = value

    @property
    def columnwise_usage(self) -> bool:
        """Does it make column-wise data, for products over the other dimensions?"""
        return self._handle.columnwise

    @columnwise_usage.setter
    def columnwise_usage(self, value: bool) -> None:
        self._handle.columnwise = value

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Which orientations to make; None leaves one as it is."""
        if rowwise is not None:
            self._handle.rowwise = rowwise
        if columnwise is not None:
            self._handle.columnwise = columnwise

    # -- itself

    @property
    def dtype(self) -> DType:
        """The type of its elements."""
        return DType.of_element(self._handle.fields["element"])

    def copy(self) -> Quantizer:
        """Another of the same settings. Those of delayed scaling share their scale and amax."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._adopt(self._handle.copy())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantizer:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(self.__dict__)
        made._adopt(self._handle.copy(deep=True))
        return made

    def __repr__(self) -> str:
        usage = f"rowwise={self.rowwise_usage}, columnwise={self.columnwise_usage}"
        return f"{type(self).__name__}({self._handle.format}, {usage})"


# Fields of a format that are no flags; and what others are called as arguments, if not the same.
_NOT_FLAGS = ("scaling", "element", "amax_epsilon", "four_over_six")
_ARGUMENTS = {
    "power_of_2_scales": "force_pow_2_scales",
    "block_2d": "with_2d_quantization",
    "hadamard": "with_rht",
    "row_scaled": "row_scaled_nvfp4",
}


def _reducer(group: Any) -> Callable[[torch.Tensor], None]:
    def reduce(amax: torch.Tensor) -> None:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)

    return reduce


def _differences(wanted: dict[str, Any], got: dict[str, Any]) -> str:
    names = [name for name in wanted if wanted[name] != got[name]]
    sides = [", ".join(f"{name}={side[name]}" for name in names) for side in (wanted, got)]
    return f"{sides[0]}, got {sides[1]}"
