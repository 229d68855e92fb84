// The activations as formulas, those of the CPU backend. Every product and sum names its rounding,
// so that a value has the same bits in each kernel that computes it, whatever the compiler may fuse
// around it.
//   using F = ActivationFunctor<Activation::SwiGLU>;
//   F::gated                                 whether there is a b
//   float y = F::value(a, b, params)         b is not looked at unless gated
//   Gradient g = F::gradient(dy, a, b, params)   y, da = dy dy/da, db = dy dy/db (0 unless gated)
// with_activation(kind, f) calls f with the functor of a kind known at run time;
// AnyActivation<gated> is a functor like the others that goes by params.kind.
#pragma once

#include "ligature/backend/cuda/activation_params.h"

namespace ligature::cuda {

struct Gradient {
  float y, da, db;
};

namespace formula {

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

/// Held to [-87, 88.75]; NaN stays NaN.
__device__ __forceinline__ float bounded(float x) {
  float held;
  asm("min.NaN.f32 %0, %1, 0f42B18000;" : "=f"(held) : "f"(x));
  asm("max.NaN.f32 %0, %1, 0fC2AE0000;" : "=f"(held) : "f"(held));
  return held;
}

__device__ __forceinline__ float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

/// exp(x) within 2 ulp for |x| <= 88, held at exp(-87) below and infinite from 88.4 on: a sigmoid
/// is 0 there, so that its product with -1e38 is too.
__device__ __forceinline__ float bounded_exp(float x) {
  x = bounded(x);
  const float shifted = fma(x, 1.44269504f, 12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const float n = add(shifted, -12582912.0f);
  float fraction = fma(x, 1.44269504f, -n);
  fraction = fma(x, 1.92596299e-8f, fraction);
  return mul(power_of_2(fraction), __int_as_float((__float_as_int(shifted) << 23) + (127 << 23)));
}

__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(add(1.0f, bounded_exp(-x))); }

__device__ __forceinline__ float tanh(float x) {
  const float z = mul(x, x);
  float p = fma(-5.70498872745e-3f, z, 2.06390887954e-2f);
  p = fma(p, z, -5.37397155531e-2f);
  p = fma(p, z, 1.33314422036e-1f);
  p = fma(p, z, -3.33332819422e-1f);
  const float near_zero = fma(mul(p, z), x, x);
  const float magnitude = fabsf(x);
  // Here the exponential's error counts for a third at most, and less the larger it is.
  const float power = power_of_2(mul(2.88539008f, magnitude));  // 2 / log(2)
  const float far = fma(-2.0f, reciprocal(add(power, 1.0f)), 1.0f);
  return magnitude < 0.625f ? near_zero : copysignf(far, x);
}

struct Partial {
  float y, dx;
};

/// x sigmoid(k x).
__device__ __forceinline__ float scaled_silu(float x, float k) {
  return mul(x, sigmoid(mul(k, x)));
}

__device__ __forceinline__ Partial scaled_silu_partial(float x, float k) {
  const float s = sigmoid(mul(k, x));  // k x may be infinite where x is not
  const float y = mul(x, s);
  return {y, fma(k, mul(y, add(1.0f, -s)), s)};
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
struct GELU {
  static constexpr float k1 = 1.5957691216057308f;    // 2 sqrt(2/pi)
  static constexpr float k3 = 0.071354816272600248f;  // 0.044715 * 2 sqrt(2/pi)
  static __device__ __forceinline__ float value(float x) {
    return mul(x, sigmoid(mul(x, fma(mul(k3, x), x, k1))));
  }
  static __device__ __forceinline__ Partial partial(float x) {
    // Held where s is 0 or 1 already: infinity times zero would be no number.
    const float cubic = mul(mul(k3, x), x);
    const float held = cubic > 70.0f ? 70.0f : cubic;
    const float s = sigmoid(mul(x, fma(mul(k3, x), x, k1)));
    const float y = mul(x, s);
    return {y, fma(mul(y, add(1.0f, -s)), fma(3.0f, held, k1), s)};
  }
};

struct QGELU {
  static __device__ __forceinline__ float value(float x) { return scaled_silu(x, 1.702f); }
  static __device__ __forceinline__ Partial partial(float x) {
    return scaled_silu_partial(x, 1.702f);
  }
};

// scaled_silu with k = 1, without the products by it.
struct SiLU {
  static __device__ __forceinline__ float value(float x) { return mul(x, sigmoid(x)); }
  static __device__ __forceinline__ Partial partial(float x) {
    const float s = sigmoid(x);
    const float y = mul(x, s);
    return {y, fma(y, add(1.0f, -s), s)};
  }
};

// `x <= 0` and not `x > 0`, so that NaN passes through as in torch.
struct ReLU {
  static __device__ __forceinline__ float value(float x) { return x <= 0.0f ? 0.0f : x; }
  static __device__ __forceinline__ Partial partial(float x) {
    return {value(x), x <= 0.0f ? 0.0f : 1.0f};
  }
};

struct SReLU {
  static __device__ __forceinline__ float value(float x) {
    const float r = ReLU::value(x);
    return mul(r, r);
  }
  static __device__ __forceinline__ Partial partial(float x) {
    const float r = ReLU::value(x);
    return {mul(r, r), mul(2.0f, r)};
  }
};

struct Sigmoid {
  static __device__ __forceinline__ float value(float x) { return sigmoid(x); }
  static __device__ __forceinline__ Partial partial(float x) {
    const float s = sigmoid(x);
    return {s, mul(s, add(1.0f, -s))};
  }
};

template <typename Plain>
struct PlainFunctor {
  static constexpr bool gated = false;
  static __device__ __forceinline__ float value(float a, float, const ActivationParams&) {
    return Plain::value(a);
  }
  static __device__ __forceinline__ Gradient gradient(float dy, float a, float,
                                                      const ActivationParams&) {
    const Partial p = Plain::partial(a);
    return {p.y, mul(dy, p.dx), 0.0f};
  }
};

/// act(a) * b.
template <typename Plain>
struct GatedFunctor {
  static constexpr bool gated = true;
  static __device__ __forceinline__ float value(float a, float b, const ActivationParams&) {
    return mul(Plain::value(a), b);
  }
  static __device__ __forceinline__ Gradient gradient(float dy, float a, float b,
                                                      const ActivationParams&) {
    const Partial p = Plain::partial(a);
    return {mul(p.y, b), mul(dy, mul(p.dx, b)), mul(dy, p.y)};
  }
};

struct ClampedSwiGLU {
  static constexpr bool gated = true;
  static __device__ __forceinline__ float value(float a, float b, const ActivationParams& p) {
    const float gate = scaled_silu(a > p.limit ? p.limit : a, p.alpha);
    return mul(gate, add(held(b, p.limit), p.offset));
  }
  static __device__ __forceinline__ Gradient gradient(float dy, float a, float b,
                                                      const ActivationParams& p) {
    const Partial gate = scaled_silu_partial(a > p.limit ? p.limit : a, p.alpha);
    const float kept = held(b, p.limit);
    const float linear = add(kept, p.offset);
    return {mul(gate.y, linear), mul(dy, a > p.limit ? 0.0f : mul(gate.dx, linear)),
            mul(dy, kept != b ? 0.0f : gate.y)};
  }

 private:
  static __device__ __forceinline__ float held(float b, float limit) {
    return b > limit ? limit : (b < -limit ? -limit : b);
  }
};

struct SiTUGLU {
  static constexpr bool gated = true;
  static __device__ __forceinline__ float value(float a, float b, const ActivationParams& p) {
    const float gate = mul(mul(p.beta1, tanh(mul(a, p.inverse_beta1))), sigmoid(a));
    return mul(gate, mul(p.beta2, tanh(mul(b, p.inverse_beta2))));
  }
  static __device__ __forceinline__ Gradient gradient(float dy, float a, float b,
                                                      const ActivationParams& p) {
    const float ta = tanh(mul(a, p.inverse_beta1));
    const float tb = tanh(mul(b, p.inverse_beta2));
    const float s = sigmoid(a);
    const float gate = mul(mul(p.beta1, ta), s);
    const float linear = mul(p.beta2, tb);
    const float dgate = fma(fma(-ta, ta, 1.0f), s, mul(gate, add(1.0f, -s)));
    return {mul(gate, linear), mul(dy, mul(dgate, linear)), mul(dy, mul(gate, fma(-tb, tb, 1.0f)))};
  }
};

}  // namespace formula

template <Activation A>
struct ActivationFunctor;
template <>
struct ActivationFunctor<Activation::GELU> : formula::PlainFunctor<formula::GELU> {};
template <>
struct ActivationFunctor<Activation::QGELU> : formula::PlainFunctor<formula::QGELU> {};
template <>
struct ActivationFunctor<Activation::ReLU> : formula::PlainFunctor<formula::ReLU> {};
template <>
struct ActivationFunctor<Activation::SReLU> : formula::PlainFunctor<formula::SReLU> {};
template <>
struct ActivationFunctor<Activation::SiLU> : formula::PlainFunctor<formula::SiLU> {};
template <>
struct ActivationFunctor<Activation::GLU> : formula::GatedFunctor<formula::Sigmoid> {};
template <>
struct ActivationFunctor<Activation::GEGLU> : formula::GatedFunctor<formula::GELU> {};
template <>
struct ActivationFunctor<Activation::QGEGLU> : formula::GatedFunctor<formula::QGELU> {};
template <>
struct ActivationFunctor<Activation::ReGLU> : formula::GatedFunctor<formula::ReLU> {};
template <>
struct ActivationFunctor<Activation::SReGLU> : formula::GatedFunctor<formula::SReLU> {};
template <>
struct ActivationFunctor<Activation::SwiGLU> : formula::GatedFunctor<formula::SiLU> {};
template <>
struct ActivationFunctor<Activation::ClampedSwiGLU> : formula::ClampedSwiGLU {};
template <>
struct ActivationFunctor<Activation::SiTUGLU> : formula::SiTUGLU {};

/// Calls f(ActivationFunctor<A>()) for the kind; on both sides. In a kernel the choice costs a few
/// instructions, and the registers of the greediest kind.
#pragma nv_exec_check_disable
template <typename F>
__host__ __device__ __forceinline__ void with_activation(Activation kind, const F& f) {
  switch (kind) {
    case Activation::GELU:
      return f(ActivationFunctor<Activation::GELU>());
    case Activation::QGELU:
      return f(ActivationFunctor<Activation::QGELU>());
    case Activation::ReLU:
      return f(ActivationFunctor<Activation::ReLU>());
    case Activation::SReLU:
      return f(ActivationFunctor<Activation::SReLU>());
    case Activation::SiLU:
      return f(ActivationFunctor<Activation::SiLU>());
    case Activation::GLU:
      return f(ActivationFunctor<Activation::GLU>());
    case Activation::GEGLU:
      return f(ActivationFunctor<Activation::GEGLU>());
    case Activation::QGEGLU:
      return f(ActivationFunctor<Activation::QGEGLU>());
    case Activation::ReGLU:
      return f(ActivationFunctor<Activation::ReGLU>());
    case Activation::SReGLU:
      return f(ActivationFunctor<Activation::SReGLU>());
    case Activation::SwiGLU:
      return f(ActivationFunctor<Activation::SwiGLU>());
    case Activation::ClampedSwiGLU:
      return f(ActivationFunctor<Activation::ClampedSwiGLU>());
    case Activation::SiTUGLU:
      return f(ActivationFunctor<Activation::SiTUGLU>());
  }
}

/// Any kind of one family, chosen at run time by params.kind.
template <bool Gated>
struct AnyActivation {
  static constexpr bool gated = Gated;
  static __device__ __forceinline__ float value(float a, float b, const ActivationParams& p) {
    float y = 0.0f;
    with_activation(p.kind, [&](auto functor) {
      using F = decltype(functor);
      if constexpr (F::gated == Gated) y = F::value(a, b, p);
    });
    return y;
  }
  static __device__ __forceinline__ Gradient gradient(float dy, float a, float b,
                                                      const ActivationParams& p) {
    Gradient g{};
    with_activation(p.kind, [&](auto functor) {
      using F = decltype(functor);
      if constexpr (F::gated == Gated) g = F::gradient(dy, a, b, p);
    });
    return g;
  }
};

}  // namespace ligature::cuda
