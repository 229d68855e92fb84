// GEMMs with an epilogue, as the CUDA tests call them.
#pragma once

#include "ligature/backend/cuda/activated_linear.h"
#include "ligature/backend/cuda/gated_linear.h"
#include "ligature/kernels/gemm.h"

inline ligature::cuda::GatedForward gated_forward(const at::Tensor& x, const at::Tensor& w,
                                                  const ligature::kernels::ActivationSpec& spec) {
  namespace kernels = ligature::kernels;
  auto both = kernels::gemm_with_epilogue(kernels::activated_forward(x, w, {}, spec, true));
  return {both.z, both.y};
}

inline ligature::cuda::GatedBackward gated_backward(const at::Tensor& dy, const at::Tensor& w,
                                                    const at::Tensor& z,
                                                    const ligature::kernels::ActivationSpec& spec,
                                                    bool need_a, bool over_z) {
  namespace kernels = ligature::kernels;
  auto both =
      kernels::gemm_with_epilogue(kernels::activated_input_grad(dy, w, z, spec, need_a, over_z));
  return {both.y, both.activated};
}

inline bool gated_pays(const at::Tensor& x, const at::Tensor& w,
                       const ligature::kernels::ActivationSpec& spec, bool backward) {
  namespace kernels = ligature::kernels;
  return backward ? kernels::pays(kernels::activated_input_grad(x, w, {}, spec, false, false))
                  : kernels::pays(kernels::activated_forward(x, w, {}, spec, true));
}

inline ligature::cuda::ActivatedForward gelu_forward(const at::Tensor& x, const at::Tensor& w,
                                                     const at::Tensor& bias,
                                                     const ligature::kernels::ActivationSpec& spec,
                                                     bool need_z) {
  namespace kernels = ligature::kernels;
  auto both = kernels::gemm_with_epilogue(kernels::activated_forward(x, w, bias, spec, need_z));
  return {both.y, both.z};
}

inline ligature::cuda::WeightBiasGrads weight_bias_grad(const at::Tensor& dy, const at::Tensor& x) {
  namespace kernels = ligature::kernels;
  auto both = kernels::gemm_with_epilogue(kernels::weight_and_bias_grad(dy, x));
  return {both.y, both.dbias};
}
