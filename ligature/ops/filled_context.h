// For BasicOperation::complete_context: contexts that users' fusions fill as te.ops does.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "ligature/ops/checks.h"

namespace ligature {

/// "save_for_backward(input, weight) is expected, got 0 tensors"
inline std::string expected(const std::string& what, const std::string& got) {
  return what + " is expected, got " + got;
}

inline std::string count_of(const OperationContext& ctx) {
  return std::to_string(ctx.num_saved()) + " tensors";
}

template <class T>
void set_if_missing(std::optional<T>& field, T value) {
  if (!field) field = std::move(value);
}

/// A statistic of each row of x in the form of kernels: one number per row. Empty string: it is.
inline std::string as_statistic(Value& value, const Value& x, int64_t row, const char* name) {
  if (!value.defined()) return std::string("None as ") + name;
  const int64_t rows = ValueMeta::of(x).numel() / row;
  const Tensor given = value.dequantized();
  if (given.numel() != rows) {
    return std::string("an ") + name + " of " + sizes_string(given.sizes()) + " for " +
           std::to_string(rows) + " rows";
  }
  const at::ScalarType dtype = x.dtype() == at::kDouble ? at::kDouble : at::kFloat;
  if (given.dim() != 1 || given.scalar_type() != dtype) {
    value = prepare(given.reshape({rows}), dtype);
  }
  return {};
}

}  // namespace ligature
