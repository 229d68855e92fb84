// A bias over the last dimension and its gradient.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::kernels {

using at::Tensor;

/// y = x + b, with b [features] along the last dimension of x; y has x's dtype.
Tensor bias_forward(const Tensor& x, const Tensor& b);

/// db = sum of dy over all rows, [features] in dy's dtype, accumulated in float.
Tensor bias_backward(const Tensor& dy, int64_t features);

}  // namespace ligature::kernels
