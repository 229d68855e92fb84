// The activations, one row each. From a row follow the kind, its name, its operation and the
// dispatch of the CPU and ATen backends; each backend adds a formula. No torch here.
#pragma once

#include <cstdint>

// clang-format off

/// PLAIN(Name, Options): y = Name(x). GATED(Name, Options, Gate): y = Gate(a) * b, of the plain
/// formula Gate. OWN(Name, Options): y = Name(a, b). Options: those of the operation
/// (ops/activation.h). New rows go to the end.
#define LIGATURE_ACTIVATIONS(PLAIN, GATED, OWN)                          \
  /* gelu(x) in its tanh form */                                         \
  PLAIN(GELU, ActivationOptions)                                         \
  /* x * sigmoid(1.702 x) */                                             \
  PLAIN(QGELU, ActivationOptions)                                        \
  /* max(x, 0) */                                                        \
  PLAIN(ReLU, ActivationOptions)                                         \
  /* relu(x)^2 */                                                        \
  PLAIN(SReLU, ActivationOptions)                                        \
  /* x * sigmoid(x) */                                                   \
  PLAIN(SiLU, ActivationOptions)                                         \
  /* sigmoid(a) * b */                                                   \
  GATED(GLU, ActivationOptions, Sigmoid)                                 \
  /* gelu(a) * b */                                                      \
  GATED(GEGLU, ActivationOptions, GELU)                                  \
  /* qgelu(a) * b */                                                     \
  GATED(QGEGLU, ActivationOptions, QGELU)                                \
  /* relu(a) * b */                                                      \
  GATED(ReGLU, ActivationOptions, ReLU)                                  \
  /* relu(a)^2 * b */                                                    \
  GATED(SReGLU, ActivationOptions, SReLU)                                \
  /* silu(a) * b */                                                      \
  GATED(SwiGLU, SwiGLUOptions, SiLU)                                     \
  /* a = min(a, limit), b = clamp(b, ±limit) + glu_linear_offset,        \
     a * sigmoid(alpha * a) * b */                                       \
  OWN(ClampedSwiGLU, ClampedSwiGLUOptions)                               \
  /* beta1 * tanh(a / beta1) * sigmoid(a) * beta2 * tanh(b / beta2) */   \
  OWN(SiTUGLU, SiTUGLUOptions)
// clang-format on

namespace ligature::kernels {

#define LIGATURE_ACTIVATION(Name, ...) Name,
enum class ActivationKind {
  LIGATURE_ACTIVATIONS(LIGATURE_ACTIVATION, LIGATURE_ACTIVATION, LIGATURE_ACTIVATION)
};
#undef LIGATURE_ACTIVATION

#define LIGATURE_ACTIVATION(Name, ...) ActivationKind::Name,
inline constexpr ActivationKind kActivationKinds[] = {
    LIGATURE_ACTIVATIONS(LIGATURE_ACTIVATION, LIGATURE_ACTIVATION, LIGATURE_ACTIVATION)};
#undef LIGATURE_ACTIVATION

/// An activation with the options that its kernels compute with.
struct ActivationSpec {
  ActivationKind kind;
  double limit = 7.0;               // ClampedSwiGLU
  double alpha = 1.702;             // ClampedSwiGLU
  double glu_linear_offset = 1.0;   // ClampedSwiGLU
  double beta1 = 4.0;               // SiTUGLU
  double beta2 = 25.0;              // SiTUGLU
  int64_t glu_interleave_size = 0;  // n > 0: blocks of n gates, n linear units, alternating

  /// Calls f(name, value) for those of all kinds.
  template <class F>
  void options(F&& f) {
    f("limit", limit);
    f("alpha", alpha);
    f("glu_linear_offset", glu_linear_offset);
    f("beta1", beta1);
    f("beta2", beta2);
    f("glu_interleave_size", glu_interleave_size);
  }
};

constexpr bool is_known(ActivationKind kind) {
  return static_cast<unsigned>(kind) < sizeof(kActivationKinds) / sizeof(ActivationKind);
}

/// Does it take gates a and linear units b, the halves of the last dimension?
constexpr bool is_gated(ActivationKind kind) {
  switch (kind) {
#define LIGATURE_PLAIN(Name, ...) \
  case ActivationKind::Name:      \
    return false;
#define LIGATURE_GATED(Name, ...) \
  case ActivationKind::Name:      \
    return true;
    LIGATURE_ACTIVATIONS(LIGATURE_PLAIN, LIGATURE_GATED, LIGATURE_GATED)
#undef LIGATURE_PLAIN
#undef LIGATURE_GATED
  }
  return false;
}

constexpr const char* activation_name(ActivationKind kind) {
  switch (kind) {
#define LIGATURE_ACTIVATION(Name, ...) \
  case ActivationKind::Name:           \
    return #Name;
    LIGATURE_ACTIVATIONS(LIGATURE_ACTIVATION, LIGATURE_ACTIVATION, LIGATURE_ACTIVATION)
#undef LIGATURE_ACTIVATION
  }
  return "unknown activation";
}

}  // namespace ligature::kernels
