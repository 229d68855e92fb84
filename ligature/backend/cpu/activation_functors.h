// The activations as formulas, named as in the rows of kernels/activation_kind.h. Each plain one
// gives its value, and value and derivative together since they share the transcendental; it may
// give the gradient too where that is not dy times the derivative. One of gates and linear units
// gives both partial derivatives.
#pragma once

#include "ligature/backend/cpu/vector_math.h"
#include "ligature/kernels/activation.h"

namespace ligature::cpu {

using kernels::ActivationSpec;

template <typename C>
struct Derivative {
  C y, dx;
};

template <typename C>
struct GatedDerivative {
  C y, da, db;
};

// 0.5 x (1 + tanh(u)) = x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
template <typename C>
struct GELU {
  static constexpr C k1 = C(1.5957691216057308);    // 2 sqrt(2/pi)
  static constexpr C k3 = C(0.071354816272600248);  // 0.044715 * 2 sqrt(2/pi)
  explicit GELU(const ActivationSpec&) {}
  LIGATURE_INLINE C value(C x) const { return x * sigmoid(x * (k1 + k3 * x * x)); }
  LIGATURE_INLINE Derivative<C> derivative(C x) const {
    const C s = sigmoid(x * (k1 + k3 * x * x));
    // By then s is 0 or 1, and infinity times zero would be no number.
    const C square = x * x;
    const C held = select(square > C(1000), C(1000), square);
    return {x * s, s + x * s * (C(1) - s) * (k1 + C(3) * k3 * held)};
  }
};

// x sigmoid(k x). k x may be infinite where x is not.
template <typename C>
LIGATURE_INLINE Derivative<C> scaled_silu(C x, C k) {
  const C s = sigmoid(k * x);
  const C y = x * s;
  return {y, s + k * (y * (C(1) - s))};
}

template <typename C>
struct QGELU {
  static constexpr C k = C(1.702);
  explicit QGELU(const ActivationSpec&) {}
  LIGATURE_INLINE C value(C x) const { return x * sigmoid(k * x); }
  LIGATURE_INLINE Derivative<C> derivative(C x) const { return scaled_silu(x, k); }
};

template <typename C>
struct SiLU {
  explicit SiLU(const ActivationSpec&) {}
  LIGATURE_INLINE C value(C x) const { return x * sigmoid(x); }
  LIGATURE_INLINE Derivative<C> derivative(C x) const { return scaled_silu(x, C(1)); }
};

// `x <= 0` and not `x > 0`, so that NaN passes through as in torch.
template <typename C>
struct ReLU {
  explicit ReLU(const ActivationSpec&) {}
  LIGATURE_INLINE C value(C x) const { return select(x <= C(0), C(0), x); }
  LIGATURE_INLINE Derivative<C> derivative(C x) const {
    return {value(x), select(x <= C(0), C(0), C(1))};
  }
  LIGATURE_INLINE C gradient(C dy, const Derivative<C>& d) const {
    return select(d.dx == C(0), C(0), dy);  // infinity times zero would be no number
  }
};

template <typename C>
struct SReLU {
  explicit SReLU(const ActivationSpec&) {}
  LIGATURE_INLINE C value(C x) const {
    const C r = select(x <= C(0), C(0), x);
    return r * r;
  }
  LIGATURE_INLINE Derivative<C> derivative(C x) const {
    const C r = select(x <= C(0), C(0), x);
    return {r * r, C(2) * r};
  }
};

template <typename C>
struct Sigmoid {
  explicit Sigmoid(const ActivationSpec&) {}
  LIGATURE_INLINE C value(C x) const { return sigmoid(x); }
  LIGATURE_INLINE Derivative<C> derivative(C x) const {
    const C s = sigmoid(x);
    return {s, s * (C(1) - s)};
  }
};

/// act(a) * b.
template <typename C, typename Activation>
struct Gated {
  Activation activation;
  explicit Gated(const ActivationSpec& spec) : activation(spec) {}
  LIGATURE_INLINE C value(C a, C b) const { return activation.value(a) * b; }
  LIGATURE_INLINE GatedDerivative<C> derivative(C a, C b) const {
    const Derivative<C> gate = activation.derivative(a);
    return {gate.y * b, gate.dx * b, gate.y};
  }
};

template <typename C>
struct ClampedSwiGLU {
  C limit, alpha, offset;
  explicit ClampedSwiGLU(const ActivationSpec& spec)
      : limit(static_cast<C>(spec.limit)),
        alpha(static_cast<C>(spec.alpha)),
        offset(static_cast<C>(spec.glu_linear_offset)) {}
  LIGATURE_INLINE C value(C a, C b) const { return derivative(a, b).y; }
  LIGATURE_INLINE GatedDerivative<C> derivative(C a, C b) const {
    const Derivative<C> gate = scaled_silu(select(a > limit, limit, a), alpha);
    const C held = select(b > limit, limit, select(b < -limit, -limit, b));
    const C linear = held + offset;
    return {gate.y * linear, select(a > limit, C(0), gate.dx * linear),
            select(held != b, C(0), gate.y)};
  }
};

template <typename C>
struct SiTUGLU {
  C beta1, beta2;
  explicit SiTUGLU(const ActivationSpec& spec)
      : beta1(static_cast<C>(spec.beta1)), beta2(static_cast<C>(spec.beta2)) {}
  LIGATURE_INLINE C value(C a, C b) const { return derivative(a, b).y; }
  LIGATURE_INLINE GatedDerivative<C> derivative(C a, C b) const {
    const C ta = tanh(a / beta1);
    const C tb = tanh(b / beta2);
    const C s = sigmoid(a);
    const C gate = beta1 * ta * s;
    const C linear = beta2 * tb;
    const C dgate = (C(1) - ta * ta) * s + gate * (C(1) - s);
    return {gate * linear, dgate * linear, gate * (C(1) - tb * tb)};
  }
};

}  // namespace ligature::cpu
