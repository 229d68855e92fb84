// GEMMs with a gated activation beside them.
#pragma once

#include "ligature/backend/cuda/gemm.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::ActivationSpec;
using kernels::GatedForwardQuantized;
using kernels::QuantizeArgs;

struct GatedForward {
  Tensor z;  ///< x w^T
  Tensor a;  ///< the activation of z
};

struct GatedBackward {
  Tensor dz;
  Tensor a;  ///< the activation of z, where it was asked for
};

/// Are there kernels for this activation in this dtype? Sizes may still speak against them.
bool has_gated_linear(const ActivationSpec& spec, at::ScalarType dtype, at::Device device);

/// Is there a kernel for these operands?
bool takes_gated_linear(const Tensor& x, const Tensor& w, const ActivationSpec& spec,
                        bool backward);

/// Is it faster than the GEMM and the activation one after the other? The two GEMMs are for all
/// operands that takes_gated_linear() takes, whether it pays or not.
bool runs_gated_linear(const Tensor& x, const Tensor& w, const ActivationSpec& spec, bool backward);
/// z = x w^T and a = act(z), with x [..., k], w [2 n, k], z [..., 2 n], a [..., n].
GatedForward linear_gated_forward(const Tensor& x, const Tensor& w, const ActivationSpec& spec);
/// dz = the gradient of act at z for da = dy w, with dy [..., m], w [m, n], z and dz [..., 2 n];
/// and a = act(z) [..., n] where `need_a`. da is rounded to its dtype, as if it had been written.
/// `over_z`: z is not needed any more, dz may take its memory.
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
