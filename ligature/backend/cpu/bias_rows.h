// The sum of a piece of a row and a bias, for the bias kernel and for those that begin with one.
#pragma once

#include <type_traits>

#include "ligature/backend/cpu/cast.h"

namespace ligature::cpu {

/// y = x + b, rounded once.
template <typename C, typename T>
LIGATURE_SIMD void add_bias(const T* x, const C* b, T* y, int64_t n) {
  if constexpr (std::is_same_v<C, T>) {
    using W = Wide<C>;
    wide_loop(
        y, n, [&](int64_t i, int64_t k, auto& v) { v = W::at(x + i, k) + W::at(b + i, k); },
        [&](int64_t i) { return x[i] + b[i]; });
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = Cast<C, T>::apply(Cast<T, C>::apply(x[i]) + b[i]);
  }
}

}  // namespace ligature::cpu
