// The three matrix products of a linear layer. Weights are [out, in] as in torch.nn.Linear, so each
// product reads its operands in place: transposes are views which BLAS takes as flags.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::kernels {

using at::Tensor;

/// y = alpha * x w^T + bias + add, with x [..., k], w [m, k], bias [m], add and y [..., m].
Tensor linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias = {},
                      const Tensor& add = {}, double alpha = 1.0);

/// y += alpha * x w^T + bias, in place.
void linear_forward_add_(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias = {},
                         double alpha = 1.0);

/// dx = alpha * dy w + add, with dy [..., m], w [m, k], add and dx [..., k].
Tensor linear_input_grad(const Tensor& dy, const Tensor& w, const Tensor& add = {},
                         double alpha = 1.0);

/// dw = alpha * dy^T x, [m, k].
Tensor linear_weight_grad(const Tensor& dy, const Tensor& x, double alpha = 1.0);

/// out = alpha * dy^T x, or out += alpha * dy^T x. `out` may be float32 while the operands are
/// bfloat16 or half; nothing is then rounded to the operands' type.
void linear_weight_grad_into(Tensor& out, const Tensor& dy, const Tensor& x, bool accumulate,
                             double alpha = 1.0);

}  // namespace ligature::kernels
