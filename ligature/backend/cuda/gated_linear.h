// Products with a gated activation beside them, called by kernels/gated_linear.cpp and, of FP8
// operands, by quantization/gemm.cpp.
#pragma once

#include "ligature/backend/cuda/gemm.h"
#include "ligature/kernels/gated_linear.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::ActivationSpec;
using kernels::GatedBackward;
using kernels::GatedForward;
using kernels::GatedForwardQuantized;
using kernels::QuantizeArgs;

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

// The same of FP8 operands with one factor each, x [rows, k] and w [2 n, k], where the activation
// is wanted in FP8 as well; z is bfloat16 [rows, 2 n]. `to`: the format of the activation.

bool takes_gated_codes(const QuantizedOperand& x, const QuantizedOperand& w,
                       const ActivationSpec& spec, const Format& to);
bool runs_gated_codes(const QuantizedOperand& x, const QuantizedOperand& w,
                      const ActivationSpec& spec, const Format& to);
GatedForwardQuantized linear_gated_forward_quantize(const QuantizedOperand& x,
                                                    const QuantizedOperand& w,
                                                    const ActivationSpec& spec,
                                                    const QuantizeArgs& to, bool need_z);

}  // namespace ligature::cuda
