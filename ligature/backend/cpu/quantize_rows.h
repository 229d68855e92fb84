// Kernels of the CPU backend whose rows go straight into low precision, as they are computed.
#pragma once

#include <optional>

#include "ligature/kernels/quantize.h"

namespace ligature::cpu {

using at::Tensor;
using kernels::ActivationSpec;
using kernels::QuantizeArgs;

std::optional<kernels::NormQuantized> layer_norm_forward_quantize(const Tensor& x, const Tensor& w,
                                                                  const Tensor& b, double eps,
                                                                  bool zero_centered_gamma,
                                                                  at::ScalarType out_dtype,
                                                                  const QuantizeArgs& args);
std::optional<kernels::NormQuantized> rms_norm_forward_quantize(const Tensor& x, const Tensor& w,
                                                                double eps,
                                                                bool zero_centered_gamma,
                                                                at::ScalarType out_dtype,
                                                                const QuantizeArgs& args);
std::optional<kernels::QuantizedPair> activation_forward_quantize(const Tensor& x,
                                                                  const ActivationSpec& spec,
                                                                  const Tensor& scales,
                                                                  const QuantizeArgs& args);
std::optional<kernels::ActivationBackwardQuantized> activation_backward_quantize(
    const Tensor& dy, const Tensor& x, const ActivationSpec& spec, const Tensor& scales,
    bool need_dscales, bool need_dbias, const QuantizeArgs& args);

}  // namespace ligature::cpu
