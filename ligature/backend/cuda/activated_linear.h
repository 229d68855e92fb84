// Products with cuBLASLt's epilogues for activations, their gradients and bias gradients, called by
// kernels/activated_linear.cpp.
#pragma once

#include "ligature/kernels/activated_linear.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::ActivatedBackward;
using kernels::ActivatedForward;
using kernels::ActivationSpec;
using kernels::WeightBiasGrads;

/// A row of ReLU's mask: whole groups of 128 bits.
constexpr int64_t mask_bytes(int64_t columns) { return (columns + 127) / 128 * 16; }

/// Where such products run: where the table of activated_linear.cpp says that they pay, everywhere
/// they exist, or nowhere. LIGATURE_GEMM_EPILOGUES=always or never sets it from outside. Plans that
/// were made before keep their fusions.
enum class EpilogueUse : uint8_t { WhereTheyPay, Always, Never };
void set_epilogue_use(EpilogueUse use);

bool has_activated_linear(const ActivationSpec& spec, at::ScalarType dtype, at::Device device,
                          bool backward);
bool has_weight_bias_grad(at::ScalarType dtype, at::Device device);

// Do the products exist for these operands?
bool takes_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                             const ActivationSpec& spec, bool need_aux);
bool takes_activated_backward(const Tensor& dy, const Tensor& w, const Tensor& aux,
                              const ActivationSpec& spec, bool need_dbias);
bool takes_weight_bias_grad(const Tensor& dy, const Tensor& x);

// As in kernels/activated_linear.h; the products for all operands that takes_...() takes, whether
// it pays or not.
bool runs_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                            const ActivationSpec& spec, bool need_aux);
ActivatedForward linear_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                                          const ActivationSpec& spec, bool need_aux);
bool runs_activated_backward(const Tensor& dy, const Tensor& w, const Tensor& aux,
                             const ActivationSpec& spec, bool need_dbias);
ActivatedBackward linear_activated_backward(const Tensor& dy, const Tensor& w, const Tensor& aux,
                                            const ActivationSpec& spec, bool need_dbias);
bool runs_weight_bias_grad(const Tensor& dy, const Tensor& x);
WeightBiasGrads linear_weight_bias_grad(const Tensor& dy, const Tensor& x);

}  // namespace ligature::cuda
