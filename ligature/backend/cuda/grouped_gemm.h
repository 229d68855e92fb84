// Grouped GEMMs and sums on the device; see kernels/grouped_gemm.h.
#pragma once

#include "ligature/kernels/grouped_gemm.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::GroupedGemmDesc;
using kernels::Groups;

// The table's.
bool grouped_gemm(const GroupedGemmDesc& desc);
const char* grouped_gemm_name(const GroupedGemmDesc& desc);
Tensor grouped_bias_grad(const Tensor& dy, const Groups& groups, const Tensor& row_scale,
                         const Tensor& index);
Tensor grouped_scale_grad(const Tensor& dy, at::TensorList bias, const Groups& groups,
                          const Tensor& index);

/// Are the kernels of our own used where they fit (wgmma_grouped.cuh)? Off unless
/// LIGATURE_GROUPED_WGMMA=1 is set: they have not been run on a GPU yet.
bool grouped_wgmma();
void set_grouped_wgmma(bool on);

}  // namespace ligature::cuda
