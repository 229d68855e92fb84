// How close two results must be, and how to say that they are not.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ligature/format/format.h"

namespace ligature::testing {

using at::Tensor;

/// Relative to the size of the values; one table by dtype.
double tolerance_of(at::ScalarType dtype);

/// How far an element type rounds a value, relative to it.
double rounding_of(Element element);

/// How `actual` differs from `expected`; empty when it does not. An element may be off by
/// `tolerance` times its own size and that of a typical element, and by `spread` where it is given.
std::string difference(const Tensor& actual, const Tensor& expected, double tolerance,
                       const Tensor& spread = {});

bool same_bits(const Tensor& a, const Tensor& b);
bool share_memory(const Tensor& a, const Tensor& b);
/// A copy with the same strides.
Tensor copy_of(const Tensor& t);

}  // namespace ligature::testing
