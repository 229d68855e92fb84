// Products with a gated activation beside them, called by kernels/gated_linear.cpp.
#pragma once

#include "ligature/kernels/gated_linear.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::ActivationSpec;
using kernels::GatedBackward;
using kernels::GatedForward;

bool has_gated_linear(const ActivationSpec& spec, at::ScalarType dtype, at::Device device);

/// Is there a kernel for these operands?
bool takes_gated_linear(const Tensor& x, const Tensor& w, const ActivationSpec& spec,
                        bool backward);

// As in kernels/gated_linear.h; the two products for all operands that takes_gated_linear() takes,
// whether it pays or not.
bool runs_gated_linear(const Tensor& x, const Tensor& w, const ActivationSpec& spec, bool backward);
GatedForward linear_gated_forward(const Tensor& x, const Tensor& w, const ActivationSpec& spec);
GatedBackward linear_gated_backward(const Tensor& dy, const Tensor& w, const Tensor& z,
                                    const ActivationSpec& spec, bool need_a, bool over_z);

}  // namespace ligature::cuda
