// The CPU backend's bias with an activation, called by kernels/bias_activation.cpp.
#pragma once

#include "ligature/kernels/bias_activation.h"

namespace ligature::cpu {

/// x and b are of one dtype, other than half.
kernels::BiasActivation bias_activation_forward(const at::Tensor& x, const at::Tensor& b,
                                                const kernels::ActivationSpec& spec, bool need_z);

}  // namespace ligature::cpu
