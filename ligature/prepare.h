// Small steps that operations share: bringing an argument into the form a kernel takes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_to_copy.h>

#include "ligature/value.h"

namespace ligature {

inline Tensor contiguous(const Tensor& t) { return t.is_contiguous() ? t : t.contiguous(); }

/// Contiguous and of this dtype; the same tensor when it already is.
inline Tensor prepare(const Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? contiguous(t) : at::_to_copy(t, dtype).contiguous();
}
inline Tensor prepare(const Value& v, at::ScalarType dtype) {
  return v.is_quantized() ? prepare(v.dequantized(), dtype) : prepare(v.tensor(), dtype);
}
inline Tensor prepare(const Value& v) { return contiguous(v.dequantized()); }

/// The same values in this dtype, whatever the strides.
inline Tensor cast(const Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : at::_to_copy(t, dtype);
}

}  // namespace ligature
