"""The quantizers of all formats, by Transformer Engine's names and arguments."""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from .dtypes import DType, element_of
from .quantizer import Quantizer

_FP8 = ("e4m3", "e5m2")
_ERROR_MODES = {"MAE": "mean_absolute", "MSE": "mean_square"}


class Float8Quantizer(Quantizer):
    """FP8 with one given factor: delayed scaling.

    Args:
        scale: What values are multiplied by, float32 with one element.
        amax: Raised to the largest magnitude seen, float32 with one element.
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        rowwise: Whether to make row-wise data.
        columnwise: Whether to make column-wise data.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        for name, tensor in (("scale", scale), ("amax", amax)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"[Float8Quantizer] {name} must be a tensor, got {type(tensor).__name__}"
                )
            if tensor.dtype != torch.float32 or tensor.numel() != 1:
                raise ValueError(
                    f"[Float8Quantizer] {name} must be float32 with one element, "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
        element = element_of(fp8_dtype, _FP8, "Float8Quantizer", "fp8_dtype")
        fields = {"scaling": "delayed", "element": element}
        self._make(fields, rowwise, columnwise, scale.detach().view(1), amax.detach().view(1))

    @property
    def scale(self) -> torch.Tensor:
        """What values are multiplied by."""
        return self._handle.scale

    @scale.setter
    def scale(self, value: torch.Tensor) -> None:
        self._handle.scale = value

    @property
    def amax(self) -> torch.Tensor:
        """The largest magnitude seen since it was last set to zero."""
        return self._handle.amax

    @amax.setter
    def amax(self, value: torch.Tensor) -> None:
        self._handle.amax = value


class _Reducing(Quantizer):
    @property
    def with_amax_reduction(self) -> bool:
        """Is the largest magnitude that of all processes of a group?"""
        return self._handle.reduces_amax

    @property
    def amax_reduction_group(self) -> Any:
        """The group; None for the default one."""
        return self._amax_reduction_group


class Float8CurrentScalingQuantizer(_Reducing):
    """FP8 with one factor, from the tensor's own largest magnitude.

    Args:
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        device: Accepted for compatibility, no effect: tensors are quantized where they are.
        rowwise: Whether to make row-wise data.
        columnwise: Whether to make column-wise data.
        force_pow_2_scales: Round the factor down to a power of two.
        amax_epsilon: The least that a largest magnitude counts as.
        with_amax_reduction: Use the largest magnitude of all processes of a group.
        amax_reduction_group: That group; the default one when None.
    """

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
    ) -> None:
        op = "Float8CurrentScalingQuantizer"
        fields = {
            "scaling": "current",
            "element": element_of(fp8_dtype, _FP8, op, "fp8_dtype"),
            "power_of_2_scales": force_pow_2_scales,
            "amax_epsilon": _epsilon(amax_epsilon, op),
        }
        self._make(fields, rowwise, columnwise)
        self._reduce_over(with_amax_reduction, amax_reduction_group)

    @property
    def force_pow_2_scales(self) -> bool:
        """Is the factor rounded down to a power of two?"""
        return self._handle.fields["power_of_2_scales"]

    @property
    def amax_epsilon(self) -> float:
        """The least that a largest magnitude counts as."""
        return self._handle.fields["amax_epsilon"]


class Float8BlockQuantizer(Quantizer):
    """FP8 with a float factor per block.

    Args:
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        rowwise: Whether to make row-wise data.
        columnwise: Whether to make column-wise data.
        amax_epsilon: The least that a largest magnitude counts as.
        force_pow_2_scales: Round factors down to powers of two.
        block_scaling_dim: 1 for blocks of 1x128, 2 for 128x128.
    """

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        op = "Float8BlockQuantizer"
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"[{op}] block_scaling_dim must be 1 or 2, got {block_scaling_dim!r}")
        fields = {
            "scaling": "block",
            "element": element_of(fp8_dtype, _FP8, op, "fp8_dtype"),
            "power_of_2_scales": force_pow_2_scales,
            "amax_epsilon": _epsilon(amax_epsilon, op),
            "block_2d": block_scaling_dim == 2,
        }
        self._make(fields, rowwise, columnwise)

    force_pow_2_scales = Float8CurrentScalingQuantizer.force_pow_2_scales
    amax_epsilon = Float8CurrentScalingQuantizer.amax_epsilon

    @property
    def block_len(self) -> int:
        """Elements along a block."""
        return 128

    @property
    def block_scaling_dim(self) -> int:
        """1 for blocks of 1x128, 2 for 128x128."""
        return 2 if self._handle.fields["block_2d"] else 1


class MXFP8Quantizer(Quantizer):
    """FP8 with a power of two per block of 32.

    Args:
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        rowwise: Whether to make row-wise data.
        columnwise: Whether to make column-wise data.
        with_2d_quantization: Blocks of 32x32 instead of 1x32.
    """

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        element = element_of(fp8_dtype, _FP8, "MXFP8Quantizer", "fp8_dtype")
        fields = {"scaling": "mx", "element": element, "block_2d": with_2d_quantization}
        self._make(fields, rowwise, columnwise)

    @property
    def with_2d_quantization(self) -> bool:
        """Are blocks square?"""
        return self._handle.fields["block_2d"]


class NVFP4Quantizer(_Reducing):
    """FP4 with an E4M3 factor per block of 16 and a float factor above.

    Args:
        fp4_dtype: ``DType.kFloat4E2M1``.
        rowwise: Whether to make row-wise data.
        columnwise: Whether to make column-wise data.
        with_amax_reduction: Use the largest magnitude of all processes of a group.
        amax_reduction_group: That group; the default one when None.
        with_rht: Column-wise data is of the tensor after a random Hadamard transform.
        with_post_rht_amax: Accepted for compatibility, no effect: the amax of column-wise data is
            always that after the transform.
        with_2d_quantization: Blocks of 16x16 instead of 1x16.
        stochastic_rounding: Round up with a probability, so that sums come out right on average.
        row_scaled_nvfp4: One upper factor per row.
        nvfp4_use_4over6: Each block is scaled to 4 or to 6, whichever errs less.
        nvfp4_e4m3_max: The largest block scale: 448; with ``nvfp4_use_4over6`` 256, so that both
            candidates can be stored, or 448.
        nvfp4_4over6_err_mode: How that error is measured, ``"MAE"`` or ``"MSE"``.
        with_random_sign_mask: Accepted for compatibility, no effect: the transform always has
            signs.
    """

    def __init__(
        self,
        fp4_dtype: DType | torch.dtype = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool | None = None,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int | None = None,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        op = "NVFP4Quantizer"

        def refuse(argument: str, wanted: str, got: Any) -> None:
            raise ValueError(f"[{op}] {argument} must be {wanted}, got {got!r}")

        if with_rht and with_post_rht_amax is False:
            refuse("with_post_rht_amax", "True with with_rht", with_post_rht_amax)
        if with_rht and not with_random_sign_mask:
            refuse("with_random_sign_mask", "True with with_rht", with_random_sign_mask)
        if with_2d_quantization and (with_rht or row_scaled_nvfp4):
            other = "with_rht" if with_rht else "row_scaled_nvfp4"
            refuse("with_2d_quantization", f"False with {other}", with_2d_quantization)
        if not nvfp4_use_4over6 and nvfp4_e4m3_max not in (None, 448):
            refuse("nvfp4_e4m3_max", "448 without nvfp4_use_4over6", nvfp4_e4m3_max)
        if nvfp4_e4m3_max not in (None, 256, 448):
            refuse("nvfp4_e4m3_max", "256 or 448", nvfp4_e4m3_max)
        if nvfp4_4over6_err_mode not in _ERROR_MODES:
            refuse("nvfp4_4over6_err_mode", "'MAE' or 'MSE'", nvfp4_4over6_err_mode)
        fields = {
            "scaling": "nv",
            "element": element_of(fp4_dtype, ("e2m1",), op, "fp4_dtype"),
            "hadamard": with_rht,
            "block_2d": with_2d_quantization,
            "stochastic_rounding": stochastic_rounding,
            "row_scaled": row_scaled_nvfp4,
            "four_over_six": _ERROR_MODES[nvfp4_4over6_err_mode] if nvfp4_use_4over6 else "none",
            "scales_to_448": nvfp4_use_4over6 and nvfp4_e4m3_max == 448,
        }
        self._make(fields, rowwise, columnwise)
        self._reduce_over(with_amax_reduction, amax_reduction_group)

    with_2d_quantization = MXFP8Quantizer.with_2d_quantization

    @property
    def with_rht(self) -> bool:
        """Is column-wise data transformed?"""
        return self._handle.fields["hadamard"]

    @property
    def stochastic_rounding(self) -> bool:
        """Does it round by chance?"""
        return self._handle.fields["stochastic_rounding"]

    @property
    def row_scaled_nvfp4(self) -> bool:
        """Is there one upper factor per row?"""
        return self._handle.fields["row_scaled"]

    @property
    def nvfp4_use_4over6(self) -> bool:
        """Is each block scaled to 4 or to 6?"""
        return self._handle.fields["four_over_six"] != "none"

    @property
    def nvfp4_e4m3_max(self) -> int:
        """The largest block scale."""
        return 256 if self.nvfp4_use_4over6 and not self._handle.fields["scales_to_448"] else 448


_CLASSES: dict[str, type[Quantizer]] = {
    "delayed": Float8Quantizer,
    "current": Float8CurrentScalingQuantizer,
    "block": Float8BlockQuantizer,
    "mx": MXFP8Quantizer,
    "nv": NVFP4Quantizer,
}


def quantizer_of(handle: _C.Quantizer) -> Quantizer:
    """The object that stands for a quantizer of the core: its own, or a new one."""
    owner = getattr(handle, "owner", None)
    found = None if owner is None else owner()
    if found is None:
        cls = _CLASSES[handle.fields["scaling"]]
        found = cls.__new__(cls)
        found._adopt(handle)
    return found


def _epsilon(value: Any, op: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"[{op}] amax_epsilon must be a number, got {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"[{op}] amax_epsilon must be zero or more and finite, got {value!r}")
    return float(value)
