// The activation kernels as composites of ATen calls, for devices without a backend of their own.
#pragma once

#include "ligature/kernels/activation.h"

namespace ligature::aten {

using at::Tensor;
using kernels::ActivationBackward;
using kernels::ActivationRecompute;
using kernels::ActivationSpec;

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales);
Tensor activation_forward_(Tensor& x, const ActivationSpec& spec);
ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias, bool over_x = false);
ActivationRecompute activation_recompute(const Tensor& dy, const Tensor& x,
                                         const ActivationSpec& spec, bool need_dbias, bool over_dy,
                                         bool over_x);

}  // namespace ligature::aten
