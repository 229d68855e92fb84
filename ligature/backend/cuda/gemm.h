// Matrix products of CUDA tensors through cuBLASLt: the products of kernels/gemm.h, and those of
// quantized operands.
#pragma once

#include "ligature/kernels/gemm.h"
#include "ligature/kernels/native_gemm.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::ProductTerms;
using kernels::QuantizedOperand;
using kernels::QuantizedSupport;

// The table's: undefined, or null, for operands that cuBLASLt does not take.
Tensor gemm(const kernels::GemmDesc& desc);
const char* gemm_name(const kernels::GemmDesc& desc);

/// Does cuBLASLt take these two as operands of one product? Else ATen says what is wrong with them,
/// or computes it (float64).
bool runs_gemm(const Tensor& a, const Tensor& b);

// As in kernels/gemm.h, for operands that runs_gemm() takes.
Tensor linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& add,
                      double alpha);
void linear_forward_add_(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias,
                         double alpha);
Tensor linear_input_grad(const Tensor& dy, const Tensor& w, const Tensor& add, double alpha);
Tensor linear_weight_grad(const Tensor& dy, const Tensor& x, double alpha);
void linear_weight_grad_into(Tensor& out, const Tensor& dy, const Tensor& x, bool accumulate,
                             double alpha);

/// alpha * a_factor * b_factor * a b^T + bias + add, with plain a [m, k] and b [n, k].
Tensor scaled_product(const Tensor& a, const Tensor& b, const ProductTerms& terms);
/// The same into `out`, or added to it; nothing else is added.
void scaled_product_into(Tensor& out, const Tensor& a, const Tensor& b, bool accumulate,
                         const ProductTerms& terms);

/// Has this device products of such operands, with a result of this dtype?
QuantizedSupport quantized_support(const QuantizedOperand& a, const QuantizedOperand& b,
                                   at::ScalarType dtype);

/// Has this device products of such operands, if their sizes fit? They read both orientations of a
/// tensor; emulated ones can do with one.
bool has_products_of(const Format& format, at::Device device);

/// As scaled_product, with the operands' own factors in it.
Tensor quantized_product(const QuantizedOperand& a, const QuantizedOperand& b,
                         const ProductTerms& terms);
void quantized_product_into(Tensor& out, const QuantizedOperand& a, const QuantizedOperand& b,
                            bool accumulate, const ProductTerms& terms);

}  // namespace ligature::cuda
