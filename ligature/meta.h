// Shapes before tensors: what is known of a value without having computed it. Operations check
// their arguments on these, so that bad input fails before any kernel runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>

#include "ligature/value.h"

namespace ligature {

struct ValueMeta {
  at::SmallVector<int64_t, 5> sizes;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;

  static ValueMeta of(const Tensor& t) {
    return {{t.sizes().begin(), t.sizes().end()}, t.scalar_type(), t.device()};
  }
  static ValueMeta of(const Value& v) {
    at::IntArrayRef s = v.sizes();
    return {{s.begin(), s.end()}, v.dtype(), v.device()};
  }
  int64_t numel() const {
    int64_t n = 1;
    for (int64_t s : sizes) n *= s;
    return n;
  }
};

/// Sizes as in messages: "[16, 4095]".
std::string to_string(const ValueMeta& meta);
std::string sizes_string(at::IntArrayRef sizes);
/// "float32", as Python writes it.
std::string dtype_name(at::ScalarType dtype);

struct OpKwargs;

struct InferArgs {
  ValueMeta input;
  at::ArrayRef<Tensor> params;
  at::ArrayRef<std::optional<ValueMeta>> extra_inputs;  ///< empty entry: not known yet
  bool training = true;
  std::optional<at::ScalarType> autocast_dtype;
  /// Of the extra inputs those that the caller gave, else undefined; or none at all.
  at::ArrayRef<Tensor> extra_values = {};
  const OpKwargs* kwargs = nullptr;
};

/// What an operation of this dtype computes in under autocast; float64 is left alone, as in torch.
inline at::ScalarType under_autocast(at::ScalarType dtype,
                                     const std::optional<at::ScalarType>& autocast) {
  return dtype == at::kDouble ? dtype : autocast.value_or(dtype);
}

struct InferResult {
  ValueMeta output;
  at::SmallVector<ValueMeta, 1> extra_outputs;
};

}  // namespace ligature
