// Arithmetic the compiler can turn into vector code by itself: no branches, no libm calls for
// float, sums over independent lanes. `LIGATURE_SIMD` marks the loops that hold it; such a function
// is compiled for AVX2 and for AVX-512 too and the processor's version is chosen once, at load
// time.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define LIGATURE_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LIGATURE_SIMD
#endif
#define LIGATURE_INLINE [[gnu::always_inline]] inline

namespace ligature::cpu {

// A plain ?: would be turned into jumps, which keep a loop from being vectorized.
LIGATURE_INLINE float select(bool condition, float a, float b) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return std::bit_cast<float>((std::bit_cast<int32_t>(a) & mask) |
                              (std::bit_cast<int32_t>(b) & ~mask));
}

LIGATURE_INLINE double select(bool condition, double a, double b) { return condition ? a : b; }

/// exp(x) within 2 ulp for |x| <= 88, held at exp(-87) below and infinite from 88.4 on: a sigmoid
/// needs no more, and is 0 there, so that its product with -1e38 is too. NaN stays NaN. (Cephes'
/// polynomial.)
LIGATURE_INLINE float bounded_exp(float x) {
  x = select(x < -87.0f, -87.0f, x);
  x = select(x > 88.75f, 88.75f, x);           // rounds to 2^128
  constexpr float round_to_int = 12582912.0f;  // 1.5 * 2^23
  const float shifted = x * 1.44269504f + round_to_int;
  const float n = shifted - round_to_int;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t two_to_n = (std::bit_cast<uint32_t>(shifted) << 23) + (127u << 23);
  return p * std::bit_cast<float>(two_to_n);
}

LIGATURE_INLINE double bounded_exp(double x) { return std::exp(x); }

template <typename C>
LIGATURE_INLINE C sigmoid(C x) {
  return C(1) / (C(1) + bounded_exp(-x));
}

LIGATURE_INLINE float tanh(float x) {
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float near_zero = p * z * x + x;
  const float magnitude = select(x < 0.0f, -x, x);
  const float far = 1.0f - 2.0f / (bounded_exp(2.0f * magnitude) + 1.0f);
  return select(magnitude < 0.625f, near_zero, select(x < 0.0f, -far, far));
}

LIGATURE_INLINE double tanh(double x) { return std::tanh(x); }

/// What a loop that waits for memory alone reads before it writes: 32 bytes at a time and four of
/// them together are faster than one by one, and than 64 bytes.
template <typename C>
struct Wide {
  typedef C Vector __attribute__((vector_size(32), aligned(sizeof(C)), may_alias));
  static constexpr int64_t lanes = 32 / sizeof(C);
  static constexpr int64_t step = 4 * lanes;

  LIGATURE_INLINE static const Vector& at(const C* p, int64_t k) {
    return reinterpret_cast<const Vector*>(p)[k];
  }
  LIGATURE_INLINE static Vector& at(C* p, int64_t k) { return reinterpret_cast<Vector*>(p)[k]; }
};

/// y[i] = narrow(i) for i in [0, n); wide(i, k, v) sets v to the same of the k-th Wide<C> from i
/// on.
template <typename C, typename F, typename G>
LIGATURE_INLINE void wide_loop(C* y, int64_t n, const F& wide, const G& narrow) {
  using W = Wide<C>;
  int64_t i = 0;
  for (; i + W::step <= n; i += W::step) {
    typename W::Vector a, b, c, d;
    wide(i, 0, a);
    wide(i, 1, b);
    wide(i, 2, c);
    wide(i, 3, d);
    W::at(y + i, 0) = a;
    W::at(y + i, 1) = b;
    W::at(y + i, 2) = c;
    W::at(y + i, 3) = d;
  }
#pragma GCC ivdep
  for (; i < n; ++i) y[i] = narrow(i);
}

template <typename C>
struct SumPair {
  C first, second;
};

/// lanes[0] becomes the sum of all `count`, a power of two.
template <int64_t count, typename C>
LIGATURE_INLINE void fold_lanes(C* lanes) {
  constexpr int64_t half = count / 2;
  if constexpr (half > 0) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    fold_lanes<half>(lanes);
  }
}

/// The sums of first(i) and of second(i) over i in [0, n), in an order that depends on n alone. Two
/// AVX-512 registers of lanes per sum: with fewer, each addition would wait for the one before.
template <typename C, typename First, typename Second>
LIGATURE_INLINE SumPair<C> lane_sums(int64_t n, const First& first, const Second& second) {
  constexpr int64_t lanes = 32;
  C a[lanes] = {}, b[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
#pragma GCC unroll 1  // unrolled, GCC would not see vectors in it
    for (int64_t l = 0; l < lanes; ++l) {
      a[l] += first(i + l);
      b[l] += second(i + l);
    }
  }
  for (int64_t l = 0; i < n; ++i, ++l) {
    a[l] += first(i);
    b[l] += second(i);
  }
  fold_lanes<lanes>(a);
  fold_lanes<lanes>(b);
  return {a[0], b[0]};
}

/// One such sum, over as many registers.
template <typename C, typename Term>
LIGATURE_INLINE C lane_sum(int64_t n, const Term& term) {
  constexpr int64_t lanes = 64;
  C a[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
#pragma GCC unroll 1
    for (int64_t l = 0; l < lanes; ++l) a[l] += term(i + l);
  }
  for (int64_t l = 0; i < n; ++i, ++l) a[l] += term(i);
  fold_lanes<lanes>(a);
  return a[0];
}

}  // namespace ligature::cpu
