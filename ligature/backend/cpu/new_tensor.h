// Memory for results on the CPU, without torch's dispatcher, which costs more than a small kernel,
// and in large pages where it is large: the system hands out fresh memory page by page, which can
// take longer than to fill it.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::cpu {

at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType dtype);

/// Of the same shape, dtype and layout.
at::Tensor new_like(const at::Tensor& x);

}  // namespace ligature::cpu
