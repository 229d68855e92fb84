// The CUDA backend's bias kernels, called by kernels/bias.cpp.
#pragma once

#include "ligature/kernels/bias.h"

namespace ligature::cuda {

using at::Tensor;

Tensor bias_forward(const Tensor& x, const Tensor& b);
Tensor bias_backward(const Tensor& dy, int64_t features);

}  // namespace ligature::cuda
