// For BasicOperation::complete_context: contexts that users' fusions fill as te.ops does.
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "ligature/ops/checks.h"

namespace ligature {

/// "save_for_backward(input, weight) is expected, got 0 tensors"
inline std::string expected(const std::string& what, const std::string& got) {
  return what + " is expected, got " + got;
}

inline std::string count_of(const OperationContext& ctx) {
  return std::to_string(ctx.num_saved()) + " tensors";
}

/// A field of te.ops' that the fusion set, if it is of this kind.
template <class T>
const T* field(const OperationContext& ctx, const char* name) {
  const PlainValue* value = ctx.state.find(name);
  return value != nullptr ? std::get_if<T>(value) : nullptr;
}

template <class T>
void set_if_missing(OperationContext& ctx, const char* name, T value) {
  if (field<T>(ctx, name) == nullptr) ctx.state.set(name, std::move(value));
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
