// GEMMs through ATen: what no other backend takes.
#pragma once

#include "ligature/kernels/gemm.h"

namespace ligature::aten {

at::Tensor gemm(const kernels::GemmDesc& desc);

}  // namespace ligature::aten
