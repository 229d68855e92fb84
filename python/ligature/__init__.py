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

and in low precision inside a context::

    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        y = mlp(x)
"""

import torch  # its libraries must be loaded before ours

from ._torch_check import check_torch

check_torch(torch.__version__, torch.__file__)

from . import common, distributed, integrations, ops, quantization, testing  # noqa: E402
from ._C import __version__  # noqa: E402
from ._config import cmake_prefix_path, set_launch_graphs, show_config  # noqa: E402
from .common import recipe  # noqa: E402
from .explanation import Explanation, PlanDiff, explain, strict  # noqa: E402
from .graph import make_graphed_callables  # noqa: E402
from .permutation import (  # noqa: E402
    Fp8Padding,
    Fp8Unpadding,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .quantization import (  # noqa: E402
    DType,
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    NVFP4Tensor,
    QuantizedTensor,
    Quantizer,
    QuantizerRole,
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)

__all__ = [
    "DType",
    "Explanation",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Fp8Padding",
    "Fp8Unpadding",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "PlanDiff",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "__version__",
    "autocast",
    "checkpoint",
    "cmake_prefix_path",
    "common",
    "distributed",
    "explain",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "integrations",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "quantization",
    "quantized_model_init",
    "recipe",
    "set_launch_graphs",
    "show_config",
    "strict",
    "testing",
]
