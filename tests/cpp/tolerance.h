// How close two results must be, in one table by dtype, and the comparison every test uses.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

struct Tolerance {
  double rtol, atol;
};

inline Tolerance tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return {1e-10, 1e-10};
    case at::kFloat:
      return {2e-5, 2e-5};
    case at::kHalf:
      return {2e-3, 2e-3};
    case at::kBFloat16:
      return {1.6e-2, 1e-2};
    default:
      throw std::invalid_argument(std::string("[tolerance] wanted a floating dtype, got ") +
                                  c10::toString(dtype));
  }
}

/// For a sum of n terms of size about 1, whose rounding errors grow with the root of n.
inline Tolerance tolerance_of_sum(at::ScalarType dtype, int64_t n) {
  const Tolerance t = tolerance(dtype);
  return {t.rtol, t.atol * std::max(1.0, std::sqrt(static_cast<double>(n)) / 4)};
}

/// Checks shape, dtype, contiguity, NaN and values. `expected` is a reference in float64 on any
/// device; `dtype` is the dtype `actual` must have, and gives the tolerance unless one is given.
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, at::ScalarType dtype,
                         const std::string& where, Tolerance allowed) {
  ASSERT_TRUE(actual.defined()) << where << ": undefined";
  ASSERT_TRUE(expected.defined()) << where << ": undefined reference";
  EXPECT_EQ(actual.scalar_type(), dtype) << where;
  EXPECT_TRUE(actual.is_contiguous()) << where << ": strides " << actual.strides();
  ASSERT_EQ(actual.sizes(), expected.sizes()) << where;
  const at::Tensor a = actual.detach().to(at::kCPU, at::kDouble);
  const at::Tensor e = expected.detach().to(at::kCPU, at::kDouble);
  EXPECT_TRUE(at::equal(a.isnan(), e.isnan())) << where << ": NaN in other places";
  if (a.numel() == 0) return;
  const at::Tensor excess = (a - e).abs() - (allowed.atol + allowed.rtol * e.abs());
  const at::Tensor close = (excess <= 0).logical_or(a == e).logical_or(e.isnan());
  if (close.all().item<bool>()) return;
  const int64_t worst =
      at::where(close, -1.0, excess.nan_to_num(INFINITY)).argmax().item<int64_t>();
  ADD_FAILURE() << where << ": " << (close.numel() - close.sum().item<int64_t>()) << " of "
                << close.numel() << " differ; worst at " << worst << ": "
                << a.flatten()[worst].item<double>() << ", wanted "
                << e.flatten()[worst].item<double>();
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, at::ScalarType dtype,
                         const std::string& where) {
  expect_close(actual, expected, dtype, where, tolerance(dtype));
}

/// For results of the same dtype, such as those of two backends.
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected,
                         const std::string& where) {
  ASSERT_TRUE(expected.defined()) << where << ": undefined reference";
  expect_close(actual, expected, expected.scalar_type(), where);
}

inline void expect_same_bits(const at::Tensor& actual, const at::Tensor& expected,
                             const std::string& where) {
  ASSERT_EQ(actual.defined(), expected.defined()) << where;
  if (!actual.defined()) return;
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type()) << where;
  EXPECT_TRUE(at::equal(actual, expected)) << where << ": other bits";
}
