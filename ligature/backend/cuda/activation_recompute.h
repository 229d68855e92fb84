// The CUDA backend's activations backward with the forward's output again, called by
// kernels/activation.cpp.
#pragma once

#include "ligature/kernels/activation.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::ActivationRecompute;
using kernels::ActivationSpec;

ActivationRecompute activation_recompute(const Tensor& dy, const Tensor& x,
                                         const ActivationSpec& spec, bool need_dbias, bool over_dy,
                                         bool over_x);

ActivationRecompute activation_recompute_scaled(const Tensor& dy, const Tensor& x,
                                                const ActivationSpec& spec, const Tensor& scales,
                                                bool need_dscales, bool over_dy, bool over_x);

}  // namespace ligature::cuda
