// Sums of rows of elements T, and of the products of two, computed in C.
#pragma once

#include "ligature/backend/cpu/cast.h"

namespace ligature::cpu {

/// sums += scale * x.
template <typename C, typename T>
LIGATURE_SIMD void accumulate_scaled(const T* x, C scale, C* sums, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) sums[i] += scale * Cast<T, C>::apply(x[i]);
}

/// In an order that depends on n alone.
template <typename C, typename T, typename U>
LIGATURE_SIMD C dot_rows(const T* a, const U* b, int64_t n) {
  return lane_sum<C>(n,
                     [&](int64_t i) { return Cast<T, C>::apply(a[i]) * Cast<U, C>::apply(b[i]); });
}

}  // namespace ligature::cpu
