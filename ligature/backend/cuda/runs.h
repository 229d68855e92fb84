// Whether the CUDA backend serves a tensor. Every build has these two; without the CUDA backend the
// answer is no.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::cuda {

using at::Tensor;

/// Is the backend part of this build, and does it compute in this dtype? (Not in double.)
bool computes_in(at::ScalarType dtype);

inline bool runs(const Tensor& x) { return x.is_cuda() && computes_in(x.scalar_type()); }

}  // namespace ligature::cuda
