// The CUDA backend's dropout kernels, called by kernels/dropout.cpp. p is below 1.
#pragma once

#include "ligature/kernels/dropout.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::DropoutForward;

DropoutForward dropout_forward(const Tensor& x, double p);
Tensor dropout_backward(const Tensor& dy, const Tensor& mask, double p);

}  // namespace ligature::cuda
