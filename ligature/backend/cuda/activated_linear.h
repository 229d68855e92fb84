// GEMMs with cuBLASLt's epilogues: GELU behind a linear, and a bias' gradient beside the weight's.
#pragma once

#include "ligature/kernels/gemm.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::ActivationSpec;

struct ActivatedForward {
  Tensor y;
  Tensor z;  ///< x w^T + bias, where it was asked for
};

struct WeightBiasGrads {
  Tensor dw, dbias;
};

/// Where such GEMMs run: where the table of activated_linear.cpp says that they pay, everywhere
/// they exist, or nowhere. LIGATURE_GEMM_EPILOGUES=always or never sets it from outside. Plans that
/// were made before keep their fusions.
enum class EpilogueUse : uint8_t { WhereTheyPay, Always, Never };
void set_epilogue_use(EpilogueUse use);

bool has_activated_linear(const ActivationSpec& spec, at::ScalarType dtype);
bool has_weight_bias_grad(at::ScalarType dtype);

// Do the GEMMs exist for these operands?
bool takes_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                             const ActivationSpec& spec, bool need_z);
bool takes_weight_bias_grad(const Tensor& dy, const Tensor& x);

// Are they faster than one after the other? The GEMMs are for all operands that takes_...() takes,
// whether it pays or not.
bool runs_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                            const ActivationSpec& spec, bool need_z);
/// y = act(x w^T + bias), with x [..., k], w [n, k], bias [n] or undefined, y [..., n]. The
/// activation is computed from the sums before they are rounded.
ActivatedForward linear_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                                          const ActivationSpec& spec, bool need_z);
bool runs_weight_bias_grad(const Tensor& dy, const Tensor& x);
/// dw = dy^T x, and the sums of dy over its rows.
WeightBiasGrads linear_weight_bias_grad(const Tensor& dy, const Tensor& x);

}  // namespace ligature::cuda
