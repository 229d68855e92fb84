// Checks of arguments that a kernel shares with its forms that also quantize.
#pragma once

#include "ligature/kernels/activation.h"

namespace ligature::kernels {

/// `op`: as the error names it.
void check_norm(const char* op, const Tensor& x, const Tensor& w);

void check_activation(const Tensor& x, const ActivationSpec& spec, const Tensor& scales);
void check_activation_gradient(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                               const Tensor& scales, bool need_dscales);

}  // namespace ligature::kernels
