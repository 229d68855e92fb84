// The CUDA backend's activation kernels, called by kernels/activation.cpp.
#pragma once

#include "ligature/backend/cuda/activation_params.h"
#include "ligature/kernels/activation.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::ActivationBackward;
using kernels::ActivationSpec;

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales);
Tensor activation_forward_(Tensor& x, const ActivationSpec& spec);
ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias, bool over_x = false);

/// As the .cu files know them.
inline ActivationParams params_of(const ActivationSpec& spec) {
  ActivationParams params;
  params.kind = spec.kind;
  params.limit = static_cast<float>(spec.limit);
  params.alpha = static_cast<float>(spec.alpha);
  params.offset = static_cast<float>(spec.glu_linear_offset);
  params.beta1 = static_cast<float>(spec.beta1);
  params.beta2 = static_cast<float>(spec.beta2);
  params.inverse_beta1 = static_cast<float>(1.0 / spec.beta1);
  params.inverse_beta2 = static_cast<float>(1.0 / spec.beta2);
  params.interleave = spec.glu_interleave_size;
  return params;
}

}  // namespace ligature::cuda
