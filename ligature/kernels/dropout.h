// Dropout. The random numbers are those of torch's generator of the device, so that seeds, saved
// states and graph capture mean what they mean in torch; what is made of them is the backend's.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::kernels {

using at::Tensor;

struct DropoutForward {
  Tensor y;
  Tensor mask;  // bool, true where the value is kept
};

/// Zeroes each value with probability p in [0, 1] and divides the rest by 1 - p.
DropoutForward dropout_forward(const Tensor& x, double p);

Tensor dropout_backward(const Tensor& dy, const Tensor& mask, double p);

}  // namespace ligature::kernels
