// What travels between two steps: a tensor or a quantized tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "ligature/check.h"
#include "ligature/kernels/quantized_gemm.h"
#include "ligature/quantized/quantized_tensor.h"

namespace ligature {

using at::Tensor;

class Value {
 public:
  Value() = default;
  /// A torch tensor that stands for a quantized one is that one.
  Value(Tensor tensor)  // NOLINT: a tensor is a value
      : tensor_(std::move(tensor)), quantized_(quantized_of(tensor_)) {}
  Value(QuantizedPtr quantized) : quantized_(std::move(quantized)) {}  // NOLINT

  bool defined() const { return tensor_.defined() || quantized_ != nullptr; }
  bool is_quantized() const { return quantized_ != nullptr; }

  const Tensor& tensor() const {
    LIGATURE_CHECK_STATE(quantized_ == nullptr, "wanted a plain tensor, got one in format ",
                         quantized_ ? quantized_->format() : std::string());
    return tensor_;
  }
  const QuantizedPtr& quantized() const { return quantized_; }
  /// The torch tensor that autograd knows: the plain one, or what stands for the quantized one;
  /// undefined for one that was quantized between two steps.
  const Tensor& identity() const { return tensor_; }

  /// The plain tensor, dequantized where it has to be.
  Tensor dequantized() const { return quantized_ ? quantized_->dequantize() : tensor_; }

  /// As a GEMM reads it, as long as this value lives.
  operator kernels::GemmOperand() const {  // NOLINT: a value is an operand
    if (!quantized_) return {&tensor_, nullptr, nullptr, tensor_.sizes(), tensor_.device()};
    return {nullptr, &quantized_->parts(), &quantized_->format_tag(), quantized_->sizes(),
            quantized_->device()};
  }

  at::IntArrayRef sizes() const { return quantized_ ? quantized_->sizes() : tensor_.sizes(); }
  at::ScalarType dtype() const { return quantized_ ? quantized_->dtype() : tensor_.scalar_type(); }
  at::Device device() const { return quantized_ ? quantized_->device() : tensor_.device(); }

 private:
  Tensor tensor_;
  QuantizedPtr quantized_;
};

}  // namespace ligature
