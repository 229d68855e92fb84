"""Recipes: which tensor is computed with in which format.

Fields and defaults are those of Transformer Engine; no environment variable changes a default. A
field that is set takes effect with the next call, also inside an open ``autocast``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .recipe_base import (
    NO_SPLIT,
    SPLIT,
    Format,
    MMParams,
    QParams,
    Recipe,
    recipe_class,
)

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]


@recipe_class
class DelayedScaling(Recipe):
    """FP8 with one factor per tensor, chosen from the largest values of earlier steps.

    The factor is ``fp8_max / amax / 2^margin``; an ``amax`` that is zero or not finite keeps the
    old one. The history moves on when the outermost ``autocast`` ends and after each backward pass.

    Args:
        margin: halvings of the factor.
        fp8_format: ``Format.E4M3``, ``E5M2`` or ``HYBRID``.
        amax_history_len: how many steps are remembered.
        amax_compute_algo: ``"max"``, ``"most_recent"``, or a function of the history, newest first,
            of shape ``[amax_history_len, 1]``, that gives the value to scale by.
        scaling_factor_compute_algo: ``f(amax, old_scale, fp8_max, recipe) -> new_scale`` instead of
            the formula above.
        reduce_amax: share the largest values with the other processes of the group.
        fp8_dpa, fp8_mha: accepted for compatibility, no effect: Ligature has no attention.
        backward_override: None, the only choice here.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def _check_values(self, values: dict[str, Any]) -> None:
        if values["backward_override"] is not None:
            raise ValueError(
                f"[{type(self).__name__}] backward_override must be None with delayed scaling, got "
                f"{values['backward_override']!r}"
            )


@recipe_class
class Float8CurrentScaling(Recipe):
    """FP8 with one factor per tensor, from its own largest value: ``fp8_max / amax``.

    Args:
        fp8_format: ``Format.E4M3``, ``E5M2`` or ``HYBRID``.
        use_power_2_scales: round the factor down to a power of two.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: whether the FP8 products of a GPU move their
            sums to float32 now and then, in forward, for the input's and for the weight's gradient.
            Without an effect on emulated products, whose sums are in float32 anyway.
        fp8_dpa, fp8_mha: accepted for compatibility, no effect: Ligature has no attention.
        backward_override: what the GEMMs of backward compute with: ``None`` for operands in low
            precision, ``"high_precision"`` for the input and the weight as they were before they
            were quantized, ``"dequantized"`` for what forward computed with, in high precision.
            Unless it is None, gradients are not quantized.

    ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight`` and ``fp8_quant_bwd_grad`` may be set to a
    ``QParams(power_2_scale, amax_epsilon)`` of their own.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = NO_SPLIT
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _first: ClassVar[tuple[str, ...]] = ("fp8_format",)

    def _default_params(self, name: str) -> QParams:
        return QParams(power_2_scale=self.use_power_2_scales)


@recipe_class
class Float8BlockScaling(Recipe):
    """FP8 with a factor per block of 1x128, or of 128x128.

    Args:
        fp8_format: ``Format.E4M3``, ``E5M2`` or ``HYBRID``.
        use_f32_scales: any float as a factor, not only powers of two.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 for 1x128, 2 for
            128x128, of the input, the weight and the output's gradient.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accepted for compatibility, no effect:
            products of blocks always move their sums to float32.
        fp8_dpa, fp8_mha: accepted for compatibility, no effect: Ligature has no attention.
        backward_override: what the GEMMs of backward compute with: ``None`` for operands in low
            precision, ``"high_precision"`` for the input and the weight as they were before they
            were quantized, ``"dequantized"`` for what forward computed with, in high precision.
            Unless it is None, gradients are not quantized.

    ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight`` and ``fp8_quant_bwd_grad`` may be set to a
    ``QParams(power_2_scale, amax_epsilon)`` of their own.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = SPLIT
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _first: ClassVar[tuple[str, ...]] = ("fp8_format",)

    def _default_params(self, name: str) -> QParams:
        return QParams(power_2_scale=not self.use_f32_scales)


@recipe_class
class MXFP8BlockScaling(Recipe):
    """FP8 with a power of two per block of 32.

    Args:
        fp8_format: ``Format.E4M3``, ``E5M2`` or ``HYBRID``.
        enable_2d_quantization: blocks of 32x32 for weights.
        margin: accepted for compatibility, no effect: a block's amax alone gives its scale.
        fp8_dpa, fp8_mha: accepted for compatibility, no effect: Ligature has no attention.
        backward_override: what the GEMMs of backward compute with: ``None`` for operands in low
            precision, ``"high_precision"`` for the input and the weight as they were before they
            were quantized, ``"dequantized"`` for what forward computed with, in high precision.
            Unless it is None, gradients are not quantized.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    _first: ClassVar[tuple[str, ...]] = ("fp8_format", "enable_2d_quantization")


@recipe_class
class NVFP4BlockScaling(Recipe):
    """FP4 with an E4M3 factor per block of 16 and a float factor above them.

    Args:
        disable_rht: no random Hadamard transform of what the weight's gradient is computed from.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: blocks of 1x16 for weights, not 16x16.
        row_scaled_activation: one upper factor per row of the input.
        nvfp4_4over6: where the better of two block scales is sought: ``"none"``, ``"weights"``,
            ``"activations"`` or ``"all"``.
        nvfp4_4over6_e4m3_use_256: for which of them block scales reach up to 256, so that both can
            be stored; those of the others reach up to 448, and the larger one may be cut off there.
        nvfp4_4over6_err_mode: what better means: ``"MAE"`` or ``"MSE"``.
        fp4_format: ``Format.E2M1``, the only one.
        fp8_format: ``Format.E4M3``, that of the block scales, the only one.
        fp8_dpa, fp8_mha: accepted for compatibility, no effect: Ligature has no attention.
        backward_override: what the GEMMs of backward compute with: ``None`` for operands in low
            precision, ``"high_precision"`` for the input and the weight as they were before they
            were quantized, ``"dequantized"`` for what forward computed with, in high precision.
            Unless it is None, gradients are not quantized.

    ``fp4_quant_fwd_inp``, ``fp4_quant_fwd_weight`` and ``fp4_quant_bwd_grad`` may be set to a
    ``QParams(random_hadamard_transform, stochastic_rounding, fp4_2d_quantization)`` of their own.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def _default_params(self, name: str) -> QParams:
        if name == "fp4_quant_fwd_weight":
            return QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        gradient = name == "fp4_quant_bwd_grad"
        return QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=gradient and not self.disable_stochastic_rounding,
        )

    def _check_values(self, values: dict[str, Any]) -> None:
        for name, wanted in (("fp4_format", Format.E2M1), ("fp8_format", Format.E4M3)):
            if values[name] is not wanted:
                raise ValueError(
                    f"[{type(self).__name__}] {name} must be Format.{wanted.name}, got "
                    f"{values[name]}"
                )


@recipe_class
class CustomRecipe(Recipe):
    """A quantizer for each tensor from a function of the user's.

    Args:
        qfactory: given a :class:`QuantizerRole`, makes a quantizer, or returns None for high
            precision. It is called once per operation and role.
        fp8_format: accepted for compatibility, no effect: the quantizers of ``qfactory`` decide.
        fp8_dpa, fp8_mha: accepted for compatibility, no effect: Ligature has no attention.
        backward_override: what the GEMMs of backward compute with: ``None`` for operands in low
            precision, ``"high_precision"`` for the input and the weight as they were before they
            were quantized, ``"dequantized"`` for what forward computed with, in high precision.
            Unless it is None, gradients are not quantized.
    """

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
