// The GEMMs of all groups in one parallel region.
#pragma once

#include "ligature/kernels/grouped_gemm.h"

namespace ligature::cpu {

/// False for operands that it does not take: dtypes without tiles (product_tile.h), and sizes which
/// the rule of product.h gives to ATen in every group. A group that is ATen's alone, as its GEMM
/// would be without the others, is computed before the others.
bool grouped_gemm(const kernels::GroupedGemmDesc& desc);
const char* grouped_gemm_name(const kernels::GroupedGemmDesc& desc);

at::Tensor grouped_bias_grad(const at::Tensor& dy, const kernels::Groups& groups,
                             const at::Tensor& row_scale, const at::Tensor& index);
at::Tensor grouped_scale_grad(const at::Tensor& dy, at::TensorList bias,
                              const kernels::Groups& groups, const at::Tensor& index);

}  // namespace ligature::cpu
