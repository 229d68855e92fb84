// The bias kernels as composites of ATen calls, for devices without a backend of their own.
#pragma once

#include "ligature/kernels/bias.h"

namespace ligature::aten {

using at::Tensor;

Tensor bias_forward(const Tensor& x, const Tensor& b);
Tensor bias_backward(const Tensor& dy, int64_t features);

}  // namespace ligature::aten
