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
    const C da = dy * d.dx;
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

template <typename T, typename F>
constexpr ActivationLoops<T> plain{plain_forward<T, F>, plain_backward<T, F, Besides::nothing>,
                                   plain_backward<T, F, Besides::y>,
                                   plain_backward<T, F, Besides::sums>};

template <typename T, typename F>
constexpr ActivationLoops<T> gated{gated_forward<T, F>, gated_backward<T, F, Besides::nothing>,
                                   gated_backward<T, F, Besides::y>,
                                   gated_backward<T, F, Besides::sums>};

}  // namespace

template <typename T>
ActivationLoops<T> activation_loops(ActivationKind kind) {
  using C = ComputeType<T>;
  switch (kind) {
    case ActivationKind::GELU:
      return plain<T, GELU<C>>;
    case ActivationKind::QGELU:
      return plain<T, QGELU<C>>;
    case ActivationKind::ReLU:
      return plain<T, ReLU<C>>;
    case ActivationKind::SReLU:
      return plain<T, SReLU<C>>;
    case ActivationKind::SiLU:
      return plain<T, SiLU<C>>;
    case ActivationKind::GLU:
      return gated<T, Gated<C, Sigmoid<C>>>;
    case ActivationKind::GEGLU:
      return gated<T, Gated<C, GELU<C>>>;
    case ActivationKind::QGEGLU:
      return gated<T, Gated<C, QGELU<C>>>;
    case ActivationKind::ReGLU:
      return gated<T, Gated<C, ReLU<C>>>;
    case ActivationKind::SReGLU:
      return gated<T, Gated<C, SReLU<C>>>;
    case ActivationKind::SwiGLU:
      return gated<T, Gated<C, SiLU<C>>>;
    case ActivationKind::ClampedSwiGLU:
      return gated<T, ClampedSwiGLU<C>>;
    case ActivationKind::SiTUGLU:
      return gated<T, SiTUGLU<C>>;
  }
  LIGATURE_CHECK(false, "[activation] wanted a known kind, got ", static_cast<int>(kind));
}

template ActivationLoops<float> activation_loops(ActivationKind kind);
template ActivationLoops<double> activation_loops(ActivationKind kind);
template ActivationLoops<at::BFloat16> activation_loops(ActivationKind kind);

}  // namespace ligature::cpu
