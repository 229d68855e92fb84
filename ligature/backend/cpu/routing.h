// The CPU backend's kernels of kernels/routing.h.
#pragma once

#include "ligature/kernels/routing.h"

namespace ligature::cpu {

kernels::Routing route(const at::Tensor& experts_of, int64_t experts);
at::Tensor dispatch_rows(const at::Tensor& x, const at::Tensor& map);
at::Tensor combine_rows(const at::Tensor& x, const at::Tensor& map, const at::Tensor& weights);
at::Tensor combine_weights_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& map);

}  // namespace ligature::cpu
