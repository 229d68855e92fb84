// The table from kind to loops. See activation_loops.h.
#include "ligature/backend/cpu/activation_loops.h"

#include "ligature/backend/cpu/activation_functors.h"
#include "ligature/check.h"

namespace ligature::cpu {
namespace {

using kernels::ActivationKind;

template <typename C, typename F>
LIGATURE_SIMD void plain_forward(const ActivationSpec& spec, const C* x, const C*, C* y,
                                 int64_t n) {
  const F f(spec);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = f.value(x[i]);
}

template <typename C, typename F>
LIGATURE_SIMD void plain_backward(const ActivationSpec& spec, const C* dy, const C* x, const C*,
                                  C* y, C* dx, C*, int64_t n) {
  const F f(spec);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const Derivative<C> d = f.derivative(x[i]);
    y[i] = d.y;
    dx[i] = dy[i] * d.dx;
  }
}

template <typename C, typename F>
LIGATURE_SIMD void gated_forward(const ActivationSpec& spec, const C* a, const C* b, C* y,
                                 int64_t n) {
  const F f(spec);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = f.value(a[i], b[i]);
}

template <typename C, typename F>
LIGATURE_SIMD void gated_backward(const ActivationSpec& spec, const C* dy, const C* a, const C* b,
                                  C* y, C* da, C* db, int64_t n) {
  const F f(spec);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const GatedDerivative<C> d = f.derivative(a[i], b[i]);
    y[i] = d.y;
    da[i] = dy[i] * d.da;
    db[i] = dy[i] * d.db;
  }
}

template <typename C, typename F>
constexpr ActivationLoops<C> plain{plain_forward<C, F>, plain_backward<C, F>};

template <typename C, typename F>
constexpr ActivationLoops<C> gated{gated_forward<C, F>, gated_backward<C, F>};

}  // namespace

template <typename C>
ActivationLoops<C> activation_loops(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::GELU:
      return plain<C, GELU<C>>;
    case ActivationKind::QGELU:
      return plain<C, QGELU<C>>;
    case ActivationKind::ReLU:
      return plain<C, ReLU<C>>;
    case ActivationKind::SReLU:
      return plain<C, SReLU<C>>;
    case ActivationKind::SiLU:
      return plain<C, SiLU<C>>;
    case ActivationKind::GLU:
      return gated<C, Gated<C, Sigmoid<C>>>;
    case ActivationKind::GEGLU:
      return gated<C, Gated<C, GELU<C>>>;
    case ActivationKind::QGEGLU:
      return gated<C, Gated<C, QGELU<C>>>;
    case ActivationKind::ReGLU:
      return gated<C, Gated<C, ReLU<C>>>;
    case ActivationKind::SReGLU:
      return gated<C, Gated<C, SReLU<C>>>;
    case ActivationKind::SwiGLU:
      return gated<C, Gated<C, SiLU<C>>>;
    case ActivationKind::ClampedSwiGLU:
      return gated<C, ClampedSwiGLU<C>>;
    case ActivationKind::SiTUGLU:
      return gated<C, SiTUGLU<C>>;
  }
  LIGATURE_CHECK(false, "[activation] wanted a known kind, got ", static_cast<int>(kind));
}

template ActivationLoops<float> activation_loops(ActivationKind kind);
template ActivationLoops<double> activation_loops(ActivationKind kind);

}  // namespace ligature::cpu
