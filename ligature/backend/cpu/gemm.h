// The CPU backend's GEMMs of a linear layer, where its own are faster than ATen's (product.h).
#pragma once

#include "ligature/kernels/gemm.h"

namespace ligature::cpu {

/// Undefined for operands that are left to ATen.
at::Tensor gemm(const kernels::GemmDesc& desc);
/// "cpu", or null for those; of tensors without memory as well.
const char* gemm_name(const kernels::GemmDesc& desc);

}  // namespace ligature::cpu
