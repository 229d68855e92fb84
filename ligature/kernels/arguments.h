// What kernels share with their forms that do more in the same pass: checks of arguments, and
// shapes.
#pragma once

#include "ligature/kernels/activation.h"

namespace ligature::kernels {

/// A product of x and a matrix w, along dimension `inner` of w. `op`: as the error names it.
void check_product(const char* op, const Tensor& x, const Tensor& w, int64_t inner);
/// Memory for rows of another length, as many as x has.
Tensor rows_like(const Tensor& x, int64_t columns);

void check_norm(const char* op, const Tensor& x, const Tensor& w);

void check_activation(const Tensor& x, const ActivationSpec& spec, const Tensor& scales);
void check_activation_gradient(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                               const Tensor& scales, bool need_dscales);

}  // namespace ligature::kernels
