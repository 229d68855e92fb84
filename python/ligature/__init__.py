"""Ligature: an operation fuser for training transformers.

List small operations in a :class:`ligature.ops.Sequential`; they run as few fused kernels, grouped
differently in forward and backward::

    import ligature as te

    mlp = te.ops.Sequential(
        te.ops.LayerNorm(256),
        te.ops.Linear(256, 1024),
        te.ops.SwiGLU(),
        te.ops.Linear(512, 256),
    )
    y = mlp(x)
"""

import torch  # noqa: F401  its libraries must be loaded before ours

from . import ops, testing
from ._C import __version__
from .explanation import Explanation, PlanDiff, explain, strict

__all__ = ["Explanation", "PlanDiff", "__version__", "explain", "ops", "strict", "testing"]
