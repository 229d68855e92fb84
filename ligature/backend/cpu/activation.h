// The CPU backend's activation kernels, called by kernels/activation.cpp.
#pragma once

#include "ligature/kernels/activation.h"

namespace ligature::cpu {

using at::Tensor;
using kernels::ActivationBackward;
using kernels::ActivationSpec;

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales);
Tensor activation_forward_(Tensor& x, const ActivationSpec& spec);
ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias);

}  // namespace ligature::cpu
