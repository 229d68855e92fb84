// Whether the CUDA backend computes with a tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::cuda {

using at::Tensor;

/// Does it compute in this dtype? (Not in double.)
bool computes_in(at::ScalarType dtype);

inline bool runs(const Tensor& x) { return x.is_cuda() && computes_in(x.scalar_type()); }

}  // namespace ligature::cuda
