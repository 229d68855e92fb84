// ATen composites compute in float (double for double) and round once, at the end.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::aten {

inline at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// t in the compute dtype of `like`; undefined stays undefined.
inline at::Tensor to_compute(const at::Tensor& t, const at::Tensor& like) {
  return t.defined() ? t.to(compute_dtype(like.scalar_type())) : t;
}

}  // namespace ligature::aten
