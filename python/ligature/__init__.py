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

import torch  # its libraries must be loaded before ours

from ._torch_check import check_torch

check_torch(torch.__version__, torch.__file__)

from . import ops, testing  # noqa: E402
from ._C import __version__  # noqa: E402
from ._config import cmake_prefix_path, show_config  # noqa: E402
from .explanation import Explanation, PlanDiff, explain, strict  # noqa: E402

__all__ = [
    "Explanation",
    "PlanDiff",
    "__version__",
    "cmake_prefix_path",
    "explain",
    "ops",
    "show_config",
    "strict",
    "testing",
]
