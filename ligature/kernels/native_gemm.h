// GEMMs of quantized operands, as a device has them itself; quantized_gemm.cpp emulates the rest.
#pragma once

#include "ligature/kernels/quantize.h"

namespace ligature::kernels {

/// What is done to a product a b^T [m, n].
struct ProductTerms {
  at::ScalarType dtype = at::kFloat;  ///< of the result
  Tensor bias;                        ///< [n], of the result's dtype; optional
  Tensor add;                         ///< [m, n], of the result's dtype; optional
  double alpha = 1.0;
  Tensor a_factor, b_factor;       ///< float [1] on the device, scales of the product; optional
  bool fast_accumulation = false;  ///< FP8 operands: sums are not moved to float32 now and then
};

/// An operand [rows, k] of a product over k. Its data may be without memory.
struct QuantizedOperand {
  QuantizedMatrix matrix;
  Format format;
  int64_t rows = 0, k = 0;
};

enum class QuantizedSupport : uint8_t {
  No,
  Yes,
  NeverRun,  ///< there is code for it, which was never run for want of such a device
};

/// A GEMM of operands in low precision, with its gated activation in low precision as well.
struct GatedForwardQuantized {
  Tensor z;  ///< undefined where it was not asked for
  QuantizedPair a;
};

struct QuantizedGemms {
  /// Has this device GEMMs of such operands, if their sizes fit? They read both orientations of a
  /// tensor; emulated ones can do with one.
  bool (*has)(const Format& format, at::Device device);
  QuantizedSupport (*support)(const QuantizedOperand& a, const QuantizedOperand& b,
                              at::ScalarType dtype);
  /// alpha * a b^T + bias + add, with the operands' own scales in it.
  Tensor (*run)(const QuantizedOperand& a, const QuantizedOperand& b, const ProductTerms& terms);
  void (*run_into)(Tensor& out, const QuantizedOperand& a, const QuantizedOperand& b,
                   bool accumulate, const ProductTerms& terms);

  /// Does the device take these plain operands [m, k] and [n, k] for the two below?
  bool (*supports_plain)(const Tensor& a, const Tensor& b);
  /// The same of plain operands, with scales that are on the device.
  Tensor (*run_plain)(const Tensor& a, const Tensor& b, const ProductTerms& terms);
  void (*run_plain_into)(Tensor& out, const Tensor& a, const Tensor& b, bool accumulate,
                         const ProductTerms& terms);

  // With a gated activation behind it, in the format `to`.
  bool (*supports_gated)(const QuantizedOperand& x, const QuantizedOperand& w,
                         const ActivationSpec& spec, const Format& to);
  bool (*gated_pays)(const QuantizedOperand& x, const QuantizedOperand& w,
                     const ActivationSpec& spec, const Format& to);
  GatedForwardQuantized (*run_gated)(const QuantizedOperand& x, const QuantizedOperand& w,
                                     const ActivationSpec& spec, const QuantizeArgs& to,
                                     bool need_z);
};

/// Has this device GEMMs of its own of such operands?
bool has_quantized_gemm(const Format& format, at::Device device);

}  // namespace ligature::kernels
