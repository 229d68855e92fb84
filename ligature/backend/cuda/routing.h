// Routing on the device; the kernels of kernels/routing.h. Nothing is read by the host.
#pragma once

#include "ligature/kernels/routing.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::Routing;

Routing route(const Tensor& experts_of, int64_t experts);
Tensor dispatch_rows(const Tensor& x, const Tensor& map);
Tensor combine_rows(const Tensor& x, const Tensor& map, const Tensor& weights);
Tensor combine_weights_grad(const Tensor& dy, const Tensor& x, const Tensor& map);

}  // namespace ligature::cuda
