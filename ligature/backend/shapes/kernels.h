// The kernels for tensors without memory (on the meta device): they tell the shapes and dtypes of
// the results and compute nothing. A plan is traced with them.
#pragma once

#include "ligature/kernels/activation.h"
#include "ligature/kernels/bias.h"
#include "ligature/kernels/norm.h"

namespace ligature::shapes {

using at::Tensor;
using kernels::ActivationBackward;
using kernels::ActivationRecompute;
using kernels::ActivationSpec;
using kernels::L2Forward;
using kernels::NormBackward;
using kernels::NormForward;

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec);
ActivationBackward activation_backward(const Tensor& x, const Tensor& scales, bool need_dscales,
                                       bool need_dbias);
ActivationRecompute activation_recompute(const Tensor& x, const ActivationSpec& spec,
                                         bool need_dbias);

Tensor bias_backward(const Tensor& dy, int64_t features);

NormForward norm_forward(const Tensor& x, const Tensor& w, bool with_mean,
                         at::ScalarType out_dtype);
Tensor norm_apply(const Tensor& x, at::ScalarType out_dtype);
NormBackward norm_backward(const Tensor& x, const Tensor& w, bool need_dx, bool need_dw,
                           bool need_db);
L2Forward l2_normalization_forward(const Tensor& x);

/// As the argument: the input's shape and dtype.
Tensor like(const Tensor& x);

}  // namespace ligature::shapes
