"""Activations and gated linear units, some of them scaled per row."""

from __future__ import annotations

from typing import Any

from ._builtin import BuiltinOperation, option

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "ClampedSwiGLU",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]


def _cached() -> Any:
    return option("cache_quantized_input", "Whether its input is kept for backward in FP8.")


def _interleaved() -> Any:
    return option("glu_interleave_size", "Block size, or None for halves.")


def _recomputed() -> Any:
    return option(
        "activation_recompute_in_mlp",
        "Whether a grouped MLP makes the output again in backward; GroupedMLP does so either way.",
    )


class _Activation(BuiltinOperation):
    cache_quantized_input: bool = _cached()

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)


class GELU(_Activation):
    """Gaussian error linear unit in its tanh form."""


class GLU(_Activation):
    """``sigmoid(a) * b``, where a and b are the halves of the last dimension."""


class GEGLU(_Activation):
    """``gelu(a) * b``, where a and b are the halves of the last dimension."""


class QGELU(_Activation):
    """``x * sigmoid(1.702 x)``."""


class QGEGLU(_Activation):
    """``qgelu(a) * b``, where a and b are the halves of the last dimension."""


class ReLU(_Activation):
    """``max(x, 0)``."""


class ReGLU(_Activation):
    """``relu(a) * b``, where a and b are the halves of the last dimension."""


class SReLU(_Activation):
    """``relu(x)²``."""


class SReGLU(_Activation):
    """``relu(a)² * b``, where a and b are the halves of the last dimension."""


class SiLU(_Activation):
    """``x * sigmoid(x)``."""


class SwiGLU(BuiltinOperation):
    """``silu(a) * b``, where a and b are the halves of the last dimension.

    With ``glu_interleave_size=n`` the last dimension holds blocks of n gates and n linear units,
    alternating.
    """

    cache_quantized_input: bool = _cached()
    glu_interleave_size: int | None = _interleaved()

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(
            cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size
        )


class ClampedSwiGLU(BuiltinOperation):
    """``a = min(a, limit)``, ``b = clamp(b, ±limit) + offset``, ``a * sigmoid(alpha a) * b``."""

    limit: float = option("limit", "Bound of both halves.")
    alpha: float = option("alpha", "Factor inside the sigmoid.")
    glu_linear_offset: float = option("glu_linear_offset", "Added to the linear half.")
    cache_quantized_input: bool = _cached()
    glu_interleave_size: int | None = _interleaved()

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            limit=float(limit),
            alpha=float(alpha),
            glu_linear_offset=float(glu_linear_offset),
            cache_quantized_input=cache_quantized_input,
            glu_interleave_size=glu_interleave_size,
        )


class SiTUGLU(BuiltinOperation):
    """``beta1 tanh(a/beta1) sigmoid(a) * beta2 tanh(b/beta2)``."""

    beta1: float = option("beta1", "Bound of the gate.")
    beta2: float = option("beta2", "Bound of the linear half.")
    cache_quantized_input: bool = _cached()
    glu_interleave_size: int | None = _interleaved()

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            beta1=float(beta1),
            beta2=float(beta2),
            cache_quantized_input=cache_quantized_input,
            glu_interleave_size=glu_interleave_size,
        )


def _unit_scale() -> Any:
    return option("unit_scale", "Scales are taken for 1, whatever they are; one element will do.")


class _ScaledGLU(BuiltinOperation):
    _grouped_mlp_unit_activation_scale: bool = _unit_scale()
    activation_recompute_in_mlp: bool = _recomputed()
    glu_interleave_size: int | None = _interleaved()

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            glu_interleave_size=glu_interleave_size,
            activation_recompute_in_mlp=activation_recompute_in_mlp,
            **options,
        )


class ScaledSwiGLU(_ScaledGLU):
    """SwiGLU times an extra input: one scale per row, of the shape without the last dimension.

    ``activation_recompute_in_mlp``, of this and the other scaled activations, allows a grouped MLP
    to make the output again in backward. :class:`fused.GroupedMLP` does so with True and False: it
    costs no GEMM and changes no bit.
    """

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )


class ScaledSiTUGLU(_ScaledGLU):
    """SiTUGLU times an extra input: one scale per row."""

    beta1: float = SiTUGLU.beta1
    beta2: float = SiTUGLU.beta2

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(
            glu_interleave_size,
            activation_recompute_in_mlp=activation_recompute_in_mlp,
            beta1=float(beta1),
            beta2=float(beta2),
        )


class ScaledClampedQGeGLU(_ScaledGLU):
    """ClampedSwiGLU times an extra input: one scale per row."""

    limit: float = ClampedSwiGLU.limit
    alpha: float = ClampedSwiGLU.alpha
    glu_linear_offset: float = ClampedSwiGLU.glu_linear_offset

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(
            glu_interleave_size,
            activation_recompute_in_mlp=activation_recompute_in_mlp,
            limit=float(limit),
            alpha=float(alpha),
            glu_linear_offset=float(glu_linear_offset),
        )


class ScaledSReLU(BuiltinOperation):
    """SReLU times an extra input: one scale per row."""

    _grouped_mlp_unit_activation_scale: bool = _unit_scale()
    activation_recompute_in_mlp: bool = _recomputed()

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
