"""Operations, the container that fuses them, and the registration of fusions."""

# fusible, op                           what an operation is
# basic, activation, linear, fused      the operations
# fuser, sequential, grouping           what runs them
# Modules with an underscore are the package's own; _traced is for torch's graphs and modes.

from . import basic, fused, fuser
from ._traced import flops as flops
from .basic import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    Dropout,
    Identity,
    L2Normalization,
    LayerNorm,
    MakeExtraOutput,
    Quantize,
    ReGLU,
    ReLU,
    Reshape,
    RMSNorm,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from .fuser import (
    Fusion,
    FusionHandle,
    OperationFuser,
    optional,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .fusible import FusibleOperation
from .linear import Linear
from .op import BasicOperation, FusedOperation, OperationContext
from .sequential import Sequential

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "Fusion",
    "FusionHandle",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "OperationFuser",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "basic",
    "fused",
    "fuser",
    "optional",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
