"""Operations, the container that fuses them, and the registration of fusions."""

# fusible, op                           what an operation is
# basic, activation, linear, fused      the operations
# fuser, sequential, grouping           what runs them
# Modules with an underscore are the package's own; _traced is for torch's graphs and modes.

from . import basic, fused, fuser
from ._traced import flops as flops
from .activation import *  # noqa: F403
from .basic import *  # noqa: F403
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
from .mixture import mixture_of_experts
from .op import BasicOperation, FusedOperation, OperationContext
from .sequential import Sequential

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "Fusion",
    "FusionHandle",
    "Linear",
    "OperationContext",
    "OperationFuser",
    "Sequential",
    "basic",
    "fused",
    "fuser",
    "mixture_of_experts",
    "optional",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
__all__ += basic.__all__
