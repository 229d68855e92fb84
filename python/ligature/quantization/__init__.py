"""Low precision: recipes and their context, quantizers and the tensors that they make."""

from .autocast import (
    autocast,
    checkpoint,
    fp8_autocast,
    get_autocast_recipe,
    get_default_recipe,
    is_autocast_calibrating,
    is_autocast_enabled,
)
from .availability import (
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from .dtypes import DType
from .model_init import fp8_model_init, quantized_model_init
from .quantizer import Quantizer
from .quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from .roles import QuantizerRole
from .tensor import (
    Float8BlockwiseQTensor,
    Float8Tensor,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedTensor,
)
from .weights import note_weights_changed

__all__ = [
    "DType",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "get_autocast_recipe",
    "get_default_recipe",
    "is_autocast_calibrating",
    "is_autocast_enabled",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "note_weights_changed",
    "quantized_model_init",
]
