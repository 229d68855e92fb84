// One row of a normalization, forward and backward. The three norms differ in two things only:
// whether the mean is taken out, and what the sum of squares is divided by.
//   LayerNorm: centered, by n    RMSNorm: not centered, by n    L2: not centered, by 1
// Rows hold elements T and are computed in C.
#pragma once

#include <algorithm>

#include "ligature/backend/cpu/cast.h"
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
template <typename C, typename T>
LIGATURE_SIMD RowStatistics<C> centered_statistics(const T* x, int64_t n, C eps) {
  const C rough = lane_sum<C>(n, [&](int64_t i) { return Cast<T, C>::apply(x[i]); }) / C(n);
  const SumPair<C> sums = lane_sums<C>(
      n, [&](int64_t i) { return Cast<T, C>::apply(x[i]) - rough; },
      [&](int64_t i) {
        const C deviation = Cast<T, C>::apply(x[i]) - rough;
        return deviation * deviation;
      });
  const C drift = sums.first / C(n);
  const C variance = std::max(sums.second / C(n) - drift * drift, C(0));
  return {rough + drift, C(1) / std::sqrt(variance + eps)};
}

template <typename C, typename T>
LIGATURE_SIMD RowStatistics<C> plain_statistics(const T* x, int64_t n, C divisor, C eps) {
  const C squares = lane_sum<C>(n, [&](int64_t i) {
    const C value = Cast<T, C>::apply(x[i]);
    return value * value;
  });
  return {C(0), C(1) / std::sqrt(squares / divisor + eps)};
}

template <typename C, typename T>
RowStatistics<C> row_statistics(const T* x, int64_t n, NormKind kind, C eps) {
  if (kind.centered) return centered_statistics<C>(x, n, eps);
  return plain_statistics<C>(x, n, kind.averaged ? C(n) : C(1), eps);
}

template <typename C, typename T>
LIGATURE_SIMD void normalize_row_with(const T* x, RowStatistics<C> s, const C* gamma, const C* beta,
                                      T* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const C value = (Cast<T, C>::apply(x[i]) - s.mean) * s.rstd * gamma[i] + beta[i];
    y[i] = Cast<C, T>::apply(value);
  }
}

// A row of parameters less to be held in the nearest cache.
template <typename C, typename T>
LIGATURE_SIMD void normalize_row_without_beta(const T* x, RowStatistics<C> s, const C* gamma, T* y,
                                              int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    y[i] = Cast<C, T>::apply((Cast<T, C>::apply(x[i]) - s.mean) * s.rstd * gamma[i]);
  }
}

/// y = (x - mean) * rstd * gamma + beta; beta may be null.
template <typename C, typename T>
void normalize_row(const T* x, RowStatistics<C> s, const C* gamma, const C* beta, T* y, int64_t n) {
  if (beta != nullptr) {
    normalize_row_with<C>(x, s, gamma, beta, y, n);
  } else {
    normalize_row_without_beta<C>(x, s, gamma, y, n);
  }
}

/// What the gradient of a row's input is made with: mean(g) and mean(g * xhat) with g = dy * gamma,
/// where mean(g) is 0 unless centered, and the means are sums unless averaged.
template <typename C>
struct RowGradient {
  RowStatistics<C> s;
  C offset;
  C along;
};

template <typename C, typename T>
LIGATURE_SIMD RowGradient<C> row_gradient(const T* dy, const T* x, RowStatistics<C> s,
                                          const C* gamma, NormKind kind, int64_t n) {
  const C divisor = kind.averaged ? C(n) : C(1);
  const SumPair<C> sums = lane_sums<C>(
      n,
      [&](int64_t i) {
        const C xhat = (Cast<T, C>::apply(x[i]) - s.mean) * s.rstd;
        return Cast<T, C>::apply(dy[i]) * gamma[i] * xhat;
      },
      [&](int64_t i) { return Cast<T, C>::apply(dy[i]) * gamma[i]; });
  return {s, kind.centered ? sums.second / divisor : C(0), sums.first / divisor};
}

/// A part of a row: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + add, and what it adds to
/// the gradients of parameters, dw += dy * xhat and db += dy. `add`, `dw` and `db` may be null; db
/// is wanted with dw only.
template <typename C, typename T>
struct RowPart {
  const T* dy;
  const T* x;
  const C* gamma;
  const T* add;
  T* dx;
  C* dw;
  C* db;
};

template <bool has_add, bool has_dw, bool has_db, typename C, typename T>
LIGATURE_SIMD void backward_part_of(const RowGradient<C>& gradient, const RowPart<C, T>& part,
                                    int64_t n) {
  const RowGradient<C> r = gradient;
  const RowPart<C, T> p = part;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const C dy = Cast<T, C>::apply(p.dy[i]);
    const C xhat = (Cast<T, C>::apply(p.x[i]) - r.s.mean) * r.s.rstd;
    C dx = (dy * p.gamma[i] - r.offset - xhat * r.along) * r.s.rstd;
    if constexpr (has_add) dx += Cast<T, C>::apply(p.add[i]);
    p.dx[i] = Cast<C, T>::apply(dx);
    if constexpr (has_dw) p.dw[i] += dy * xhat;
    if constexpr (has_db) p.db[i] += dy;
  }
}

template <bool has_add, typename C, typename T>
void backward_part_with(const RowGradient<C>& gradient, const RowPart<C, T>& part, int64_t n) {
  if (part.db != nullptr) {
    backward_part_of<has_add, true, true>(gradient, part, n);
  } else if (part.dw != nullptr) {
    backward_part_of<has_add, true, false>(gradient, part, n);
  } else {
    backward_part_of<has_add, false, false>(gradient, part, n);
  }
}

template <typename C, typename T>
void backward_part(const RowGradient<C>& gradient, const RowPart<C, T>& part, int64_t n) {
  if (part.add != nullptr) {
    backward_part_with<true>(gradient, part, n);
  } else {
    backward_part_with<false>(gradient, part, n);
  }
}

/// dw += dy * xhat.
template <typename C, typename T>
LIGATURE_SIMD void add_row_weight_grad(const T* dy, const T* x, RowStatistics<C> s, C* dw,
                                       int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    dw[i] += Cast<T, C>::apply(dy[i]) * ((Cast<T, C>::apply(x[i]) - s.mean) * s.rstd);
  }
}

}  // namespace ligature::cpu
