// The table from kind to loops. See activation_loops.h.
#include "ligature/backend/cpu/activation_loops.h"

#include "ligature/backend/cpu/activation_functors.h"
#include "ligature/backend/cpu/cast.h"
#include "ligature/check.h"

namespace ligature::cpu {
namespace {

using kernels::ActivationKind;

template <typename T, typename F>
LIGATURE_SIMD void plain_forward(const ActivationSpec& spec, const T* x, const T*, T* y,
                                 int64_t n) {
  using C = ComputeType<T>;
  const F f(spec);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = Cast<C, T>::apply(f.value(Cast<T, C>::apply(x[i])));
}

template <typename T, typename F>
LIGATURE_SIMD void gated_forward(const ActivationSpec& spec, const T* a, const T* b, T* y,
                                 int64_t n) {
  using C = ComputeType<T>;
  const F f(spec);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    y[i] = Cast<C, T>::apply(f.value(Cast<T, C>::apply(a[i]), Cast<T, C>::apply(b[i])));
  }
}

enum class Besides { nothing, y, sums };

template <typename T, typename F, Besides besides>
LIGATURE_SIMD void plain_backward(const ActivationSpec& spec, const BackwardPiece<T>& piece,
                                  int64_t n) {
  using C = ComputeType<T>;
  const F f(spec);
  const BackwardPiece<T> p = piece;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const C dy = Cast<T, C>::apply(p.dy[i]);
    const Derivative<C> d = f.derivative(Cast<T, C>::apply(p.a[i]));
    C da = dy * d.dx;
    if constexpr (requires { f.gradient(dy, d); }) da = f.gradient(dy, d);
    p.da[i] = Cast<C, T>::apply(da);
    if constexpr (besides == Besides::y) p.y[i] = Cast<C, T>::apply(d.y);
    if constexpr (besides == Besides::sums) p.da_sums[i] += da;
  }
}

template <typename T, typename F, Besides besides>
LIGATURE_SIMD void gated_backward(const ActivationSpec& spec, const BackwardPiece<T>& piece,
                                  int64_t n) {
  using C = ComputeType<T>;
  const F f(spec);
  const BackwardPiece<T> p = piece;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const C dy = Cast<T, C>::apply(p.dy[i]);
    const GatedDerivative<C> d = f.derivative(Cast<T, C>::apply(p.a[i]), Cast<T, C>::apply(p.b[i]));
    const C da = dy * d.da, db = dy * d.db;
    p.da[i] = Cast<C, T>::apply(da);
    p.db[i] = Cast<C, T>::apply(db);
    if constexpr (besides == Besides::y) p.y[i] = Cast<C, T>::apply(d.y);
    if constexpr (besides == Besides::sums) {
      p.da_sums[i] += da;
      p.db_sums[i] += db;
    }
  }
}

// ReLU does so little that the loop's own work counts, and it need not look at more than the bits.
LIGATURE_INLINE float relu(float x) { return select(x <= 0.0f, 0.0f, x); }
LIGATURE_INLINE double relu(double x) { return select(x <= 0.0, 0.0, x); }
LIGATURE_INLINE at::BFloat16 relu(at::BFloat16 x) {
  const uint16_t negative = -static_cast<uint16_t>(static_cast<uint16_t>(x.x - 0x8000) <= 0x7f80);
  return at::BFloat16(static_cast<uint16_t>(x.x & ~negative), at::BFloat16::from_bits());
}

LIGATURE_INLINE float relu_grad(float dy, float x) { return select(x <= 0.0f, 0.0f, dy); }
LIGATURE_INLINE double relu_grad(double dy, double x) { return select(x <= 0.0, 0.0, dy); }
LIGATURE_INLINE at::BFloat16 relu_grad(at::BFloat16 dy, at::BFloat16 x) {
  const uint16_t negative = -static_cast<uint16_t>(static_cast<uint16_t>(x.x - 0x8000) <= 0x7f80);
  const uint16_t zero = -static_cast<uint16_t>(x.x == 0);
  return at::BFloat16(static_cast<uint16_t>(dy.x & ~(negative | zero)), at::BFloat16::from_bits());
}

template <typename T>
LIGATURE_SIMD void relu_forward(const ActivationSpec&, const T* x, const T*, T* y, int64_t n) {
  if constexpr (std::is_same_v<T, ComputeType<T>>) {
    using W = Wide<T>;
    wide_loop(
        y, n,
        [&](int64_t i, int64_t k, auto& v) {
          v = W::at(x + i, k);
          v = v <= T(0) ? typename W::Vector{} : v;
        },
        [&](int64_t i) { return relu(x[i]); });
  } else {
#pragma GCC ivdep
#pragma GCC unroll 4
    for (int64_t i = 0; i < n; ++i) y[i] = relu(x[i]);
  }
}

template <typename T>
LIGATURE_SIMD void relu_backward(const ActivationSpec&, const BackwardPiece<T>& piece, int64_t n) {
  const BackwardPiece<T> p = piece;
  if constexpr (std::is_same_v<T, ComputeType<T>>) {
    using W = Wide<T>;
    wide_loop(
        p.da, n,
        [&](int64_t i, int64_t k, auto& v) {
          v = W::at(p.a + i, k) <= T(0) ? typename W::Vector{} : W::at(p.dy + i, k);
        },
        [&](int64_t i) { return relu_grad(p.dy[i], p.a[i]); });
  } else {
#pragma GCC ivdep
#pragma GCC unroll 4
    for (int64_t i = 0; i < n; ++i) p.da[i] = relu_grad(p.dy[i], p.a[i]);
  }
}

template <typename T, typename F>
constexpr ActivationLoops<T> plain{plain_forward<T, F>, plain_backward<T, F, Besides::nothing>,
                                   plain_backward<T, F, Besides::y>,
                                   plain_backward<T, F, Besides::sums>};

template <typename T>
constexpr ActivationLoops<T> plain<T, ReLU<ComputeType<T>>>{
    relu_forward<T>, relu_backward<T>, plain_backward<T, ReLU<ComputeType<T>>, Besides::y>,
    plain_backward<T, ReLU<ComputeType<T>>, Besides::sums>};

template <typename T, typename F>
constexpr ActivationLoops<T> gated{gated_forward<T, F>, gated_backward<T, F, Besides::nothing>,
                                   gated_backward<T, F, Besides::y>,
                                   gated_backward<T, F, Besides::sums>};

}  // namespace

template <typename T>
ActivationLoops<T> activation_loops(ActivationKind kind) {
  using C = ComputeType<T>;
  switch (kind) {
#define LIGATURE_PLAIN(Name, ...) \
  case ActivationKind::Name:      \
    return plain<T, Name<C>>;
#define LIGATURE_GATED(Name, Options, Gate) \
  case ActivationKind::Name:                \
    return gated<T, Gated<C, Gate<C>>>;
#define LIGATURE_OWN(Name, ...) \
  case ActivationKind::Name:    \
    return gated<T, Name<C>>;
    LIGATURE_ACTIVATIONS(LIGATURE_PLAIN, LIGATURE_GATED, LIGATURE_OWN)
#undef LIGATURE_PLAIN
#undef LIGATURE_GATED
#undef LIGATURE_OWN
  }
  LIGATURE_CHECK(false, "[activation] wanted a known kind, got ", static_cast<int>(kind));
}

template ActivationLoops<float> activation_loops(ActivationKind kind);
template ActivationLoops<double> activation_loops(ActivationKind kind);
template ActivationLoops<at::BFloat16> activation_loops(ActivationKind kind);

}  // namespace ligature::cpu
