// Memory for results on the CPU, without torch's dispatcher, which costs more than a small kernel.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

namespace ligature::cpu {

inline at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_cpu(sizes, dtype);
}

/// Of the same shape, dtype and layout.
inline at::Tensor new_like(const at::Tensor& x) {
  return x.is_contiguous() ? new_tensor(x.sizes(), x.scalar_type()) : at::empty_like(x);
}

}  // namespace ligature::cpu
