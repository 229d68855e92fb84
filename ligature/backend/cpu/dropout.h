// The CPU backend's dropout kernels, called by kernels/dropout.cpp.
#pragma once

#include "ligature/kernels/dropout.h"

namespace ligature::cpu {

using at::Tensor;
using kernels::DropoutForward;

/// One number is drawn from torch's generator; the mask depends on it and on places alone, not on
/// dtypes or threads.
DropoutForward dropout_forward(const Tensor& x, double p);
Tensor dropout_backward(const Tensor& dy, const Tensor& mask, double p);

}  // namespace ligature::cpu
