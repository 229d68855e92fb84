// The products of a linear layer over values of which some are quantized. Where the device has
// products of a format, they are its own. Elsewhere they run emulated and lose nothing: elements
// times their block's factor are exact in bfloat16, so it is a bfloat16 product accumulated in
// float32, with the float factors applied to the result. Float factors per block are applied to
// each block's partial sum.
#pragma once

#include "ligature/kernels/native_gemm.h"

namespace ligature::kernels {

/// An operand, which is only borrowed: a plain tensor, or a quantized one in the orientations that
/// there are.
struct GemmOperand {
  const Tensor* plain = nullptr;
  const QuantizedPair* parts = nullptr;
  const Format* format = nullptr;
  at::IntArrayRef sizes;
  at::Device device = at::kCPU;

  bool is_quantized() const { return plain == nullptr; }
  int64_t columns() const { return sizes.back(); }
  int64_t rows() const { return c10::multiply_integers(sizes.begin(), sizes.end() - 1); }
};

/// How a device's own FP8 products with one factor per tensor sum up: moved to float32 now and
/// then, or not. `Default`: not in forward.
enum class Accumulation : uint8_t { Default, Split, Fast };
inline Accumulation accumulation(bool split) {
  return split ? Accumulation::Split : Accumulation::Fast;
}

struct ProductArgs {
  at::ScalarType dtype = at::kFloat;  ///< of the result, and of operands that are not quantized
  Tensor bias;                        ///< optional
  Tensor add;                         ///< optional
  double alpha = 1.0;
  Accumulation accumulation = Accumulation::Default;
};

/// y = alpha * x w^T + bias + add
Tensor quantized_linear_forward(const GemmOperand& x, const GemmOperand& w,
                                const ProductArgs& args);

/// Is there one kernel for the product of these operands and the gated activation behind it, in the
/// format `to`, and is it faster than the two one after the other?
bool quantized_gated_pays(const GemmOperand& x, const GemmOperand& w, const ProductArgs& args,
                          const ActivationSpec& spec, const Format& to);
/// z as quantized_linear_forward gives it, and its activation: by that kernel, whether it is faster
/// or not. There is no other way to compute it behind this call.
GatedForwardQuantized quantized_linear_gated_forward(const GemmOperand& x, const GemmOperand& w,
                                                     const ProductArgs& args,
                                                     const ActivationSpec& spec,
                                                     const QuantizeArgs& to, bool need_z);

/// dx = alpha * dy w + add
Tensor quantized_linear_input_grad(const GemmOperand& dy, const GemmOperand& w,
                                   const ProductArgs& args);
/// dw = alpha * dy^T x
Tensor quantized_linear_weight_grad(const GemmOperand& dy, const GemmOperand& x,
                                    const ProductArgs& args);
/// out = alpha * dy^T x, or out += alpha * dy^T x
void quantized_linear_weight_grad_into(Tensor& out, const GemmOperand& dy, const GemmOperand& x,
                                       bool accumulate, const ProductArgs& args);

}  // namespace ligature::kernels
