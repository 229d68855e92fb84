// One row of a normalization, forward and backward. The three norms differ in two things only:
// whether the mean is taken out, and what the sum of squares is divided by.
//   LayerNorm: centered, by n    RMSNorm: not centered, by n    L2: not centered, by 1
#pragma once

#include <algorithm>

#include "ligature/backend/cpu/vector_math.h"

namespace ligature::cpu {

struct NormKind {
  bool centered;
  bool averaged;
};

constexpr NormKind kLayerNorm{true, true};
constexpr NormKind kRMSNorm{false, true};
constexpr NormKind kL2Norm{false, false};

template <typename C>
struct RowStatistics {
  C mean;
  C rstd;
};

// The second pass gives the squared deviations and, by the sum of the deviations, what rounding
// took from the mean.
template <typename C>
LIGATURE_SIMD RowStatistics<C> centered_statistics(const C* x, int64_t n, C eps) {
  const C rough = lane_sum<C>(n, [&](int64_t i) { return x[i]; }) / C(n);
  const SumPair<C> sums = lane_sums<C>(
      n, [&](int64_t i) { return x[i] - rough; },
      [&](int64_t i) { return (x[i] - rough) * (x[i] - rough); });
  const C drift = sums.first / C(n);
  const C variance = std::max(sums.second / C(n) - drift * drift, C(0));
  return {rough + drift, C(1) / std::sqrt(variance + eps)};
}

template <typename C>
LIGATURE_SIMD RowStatistics<C> plain_statistics(const C* x, int64_t n, C divisor, C eps) {
  const C squares = lane_sum<C>(n, [&](int64_t i) { return x[i] * x[i]; });
  return {C(0), C(1) / std::sqrt(squares / divisor + eps)};
}

template <typename C>
RowStatistics<C> row_statistics(const C* x, int64_t n, NormKind kind, C eps) {
  if (kind.centered) return centered_statistics(x, n, eps);
  return plain_statistics(x, n, kind.averaged ? C(n) : C(1), eps);
}

/// y = (x - mean) * rstd * gamma + beta.
template <typename C>
LIGATURE_SIMD void normalize_row(const C* x, RowStatistics<C> s, const C* gamma, const C* beta,
                                 C* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - s.mean) * s.rstd * gamma[i] + beta[i];
}

/// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + add with g = dy * gamma, where mean(g) is 0
/// unless centered, and the means are sums unless averaged. `add` may be null.
template <typename C>
LIGATURE_SIMD void row_input_grad(const C* dy, const C* x, RowStatistics<C> s, const C* gamma,
                                  NormKind kind, const C* add, C* dx, int64_t n) {
  const C divisor = kind.averaged ? C(n) : C(1);
  const SumPair<C> sums = lane_sums<C>(
      n, [&](int64_t i) { return dy[i] * gamma[i] * ((x[i] - s.mean) * s.rstd); },
      [&](int64_t i) { return dy[i] * gamma[i]; });
  const C along = sums.first / divisor;
  const C offset = kind.centered ? sums.second / divisor : C(0);
  if (add != nullptr) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const C xhat = (x[i] - s.mean) * s.rstd;
      dx[i] = (dy[i] * gamma[i] - offset - xhat * along) * s.rstd + add[i];
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const C xhat = (x[i] - s.mean) * s.rstd;
      dx[i] = (dy[i] * gamma[i] - offset - xhat * along) * s.rstd;
    }
  }
}

/// dw += dy * xhat.
template <typename C>
LIGATURE_SIMD void add_row_weight_grad(const C* dy, const C* x, RowStatistics<C> s, C* dw,
                                       int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dw[i] += dy[i] * ((x[i] - s.mean) * s.rstd);
}

template <typename C>
LIGATURE_SIMD void add_row(const C* dy, C* db, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) db[i] += dy[i];
}

}  // namespace ligature::cpu
