#include "ligature/kernels/backend.h"

#include "ligature/backend/aten/activation.h"
#include "ligature/backend/aten/bias.h"
#include "ligature/backend/aten/gemm.h"
#include "ligature/backend/aten/norm.h"

namespace ligature {

const kernels::Backend& kernels::aten_backend() {
  static constexpr Backend backend{
      .name = "aten",
      .layer_norm_forward = aten::layer_norm_forward,
      .rms_norm_forward = aten::rms_norm_forward,
      .layer_norm_apply = aten::layer_norm_apply,
      .rms_norm_apply = aten::rms_norm_apply,
      .layer_norm_backward = aten::layer_norm_backward,
      .rms_norm_backward = aten::rms_norm_backward,
      .l2_normalization_forward = aten::l2_normalization_forward,
      .l2_normalization_backward = aten::l2_normalization_backward,
      .activation_forward = aten::activation_forward,
      .activation_forward_ = aten::activation_forward_,
      .activation_backward = aten::activation_backward,
      .activation_recompute = aten::activation_recompute,
      .bias_forward = aten::bias_forward,
      .bias_backward = aten::bias_backward,
      .gemm = aten::gemm,
  };
  return backend;
}

}  // namespace ligature
