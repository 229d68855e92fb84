// The 8-bit elements and the scales of blocks, bit for bit as the CPU backend has them
// (backend/cpu/float8.h, docs/low_precision.md). Every operation is rounded on its own: products
// and quotients are written so that the compiler cannot join them. What is pure arithmetic runs on
// the host too, where it can be compared code by code.
#pragma once

#include <cstdint>
#include <cstring>

#include "ligature/format/format.h"

#define LIGATURE_BOTH __host__ __device__ __forceinline__
#ifdef __CUDA_ARCH__
#define LIGATURE_UNROLL _Pragma("unroll")
#else
#define LIGATURE_UNROLL
#endif

namespace ligature::cuda {

constexpr uint32_t kMagnitudeBits = 0x7fffffffu;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kLargestBits = 0x7f7fffffu;

LIGATURE_BOTH uint32_t bits_of(float v) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(v);
#else
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  return bits;
#endif
}

LIGATURE_BOTH float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
#endif
}

LIGATURE_BOTH float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

LIGATURE_BOTH float rounded_sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

LIGATURE_BOTH float rounded_quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

/// Said outright: from a product of 64 bits the compiler makes one more addition.
LIGATURE_BOTH uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

LIGATURE_BOTH float largest_of(Element element) {
  return element == Element::E4M3 ? 448.0f : element == Element::E5M2 ? 57344.0f : 6.0f;
}

/// Of an element type: bits of the mantissa, exponent of the least normal number, largest value.
template <Element>
struct ElementBits;
template <>
struct ElementBits<Element::E4M3> {
  static constexpr int mantissa = 3, least_exponent = -6;
  static constexpr uint32_t max = 0x43e00000u;  // 448
};
template <>
struct ElementBits<Element::E5M2> {
  static constexpr int mantissa = 2, least_exponent = -14;
  static constexpr uint32_t max = 0x47600000u;  // 57344
};
template <>
struct ElementBits<Element::E2M1> {
  static constexpr int mantissa = 1, least_exponent = 0;
  static constexpr uint32_t max = 0x40c00000u;  // 6
};

/// The magnitude's code, without the sign: to nearest, ties to even, held at the largest. Adding
/// the power of two whose last bit is worth a step of the element at the value's exponent leaves
/// the number of steps at the end of the mantissa. NaN is held at the largest too.
template <Element E>
LIGATURE_BOTH uint32_t encode_magnitude(uint32_t magnitude) {
  using B = ElementBits<E>;
  constexpr int shift = 23 - B::mantissa;
  constexpr uint32_t least = static_cast<uint32_t>(127 + B::least_exponent) << 23;
  const uint32_t held = magnitude < B::max ? magnitude : B::max;
  const uint32_t exponent = held & kInfinityBits;
  const uint32_t binade = exponent < least ? least : exponent;
  const uint32_t power = binade + (static_cast<uint32_t>(shift) << 23);
  const uint32_t sum = bits_of(rounded_sum(float_of(power), float_of(held)));
  // Steps counted from the binade's beginning below the least normal number's, else from zero: the
  // code is the binade's number times the steps of one, plus the steps.
  return ((binade - least) >> shift) + (sum - power);
}

/// An FP8 code. NaN: 0x7f and the sign.
template <Element E>
LIGATURE_BOTH uint32_t encode_fp8(float v) {
  const uint32_t bits = bits_of(v), magnitude = bits & kMagnitudeBits;
  const uint32_t code = magnitude > kInfinityBits ? 0x7fu : encode_magnitude<E>(magnitude);
  return code | ((bits >> 24) & 0x80u);
}

template <Element E>
LIGATURE_BOTH float decode_fp8(uint32_t code) {
  using B = ElementBits<E>;
  constexpr int shift = 23 - B::mantissa;
  constexpr uint32_t bias = static_cast<uint32_t>(126 + B::least_exponent) << 23;
  constexpr uint32_t least = bias + (1u << 23);
  const uint32_t magnitude = (code & 0x7fu) << shift;
  uint32_t bits = magnitude + bias;
  if (magnitude < (1u << 23)) {
    bits = bits_of(rounded_sum(float_of(magnitude + least), -float_of(least)));
  } else if (E == Element::E4M3 ? (code & 0x7fu) == 0x7fu : (code & 0x7fu) >= 0x7cu) {
    bits = E == Element::E4M3 || (code & 3u) != 0 ? 0x7fc00000u : kInfinityBits;
  }
  return float_of(bits | ((code & 0x80u) << 24));
}

/// 2^(code - 127); 2^-127 is not a normal number.
LIGATURE_BOTH float decode_e8m0(uint32_t code) {
  return float_of(code == 255u ? 0x7fc00000u : code == 0u ? 0x400000u : code << 23);
}

/// What a block's values are multiplied by, and what is stored to get them back.
struct BlockFactor {
  float factor;
  float scale;    // Block
  uint32_t code;  // MX, NV
};

/// Current and Block: from the bits of a largest magnitude.
LIGATURE_BOTH float factor_of(uint32_t amax_bits, float max, float epsilon, bool power_of_2) {
  const float amax = float_of(amax_bits);
  const float held = amax < epsilon ? epsilon : amax;
  const uint32_t held_bits = bits_of(held);
  if ((held_bits & kMagnitudeBits) == 0 || held_bits >= kInfinityBits) return 1.0f;
  uint32_t bits = bits_of(rounded_quotient(max, held));
  if (bits >= kInfinityBits) bits = kLargestBits;
  return float_of(power_of_2 ? bits & kInfinityBits : bits);
}

/// The code of the least power of two at or above amax / max, as the quotient is rounded. Both
/// largest values are 1.75 times a power of two: whether the mantissa is above 1.75 decides, but at
/// 2^-127, the least code, where the quotient has a bit less than amax.
LIGATURE_BOTH BlockFactor mx_factor(uint32_t amax_bits, float max) {
  if (amax_bits >= kInfinityBits) return {float_of(0x400000u), 0.0f, 254u};
  const uint32_t exponent = (bits_of(max) >> 23) - 127u;
  const uint32_t code =
      amax_bits <= ((exponent << 23) | 0x600001u) ? 0u : ((amax_bits + 0x1fffffu) >> 23) - exponent;
  return {float_of((254u - code) << 23), 0.0f, code};
}

#ifdef __CUDACC__

// From 8.9 on a GPU converts two at a time: to nearest even, subnormals kept, held at the largest;
// only a NaN loses its sign.
__device__ __forceinline__ uint32_t encode_fp8_pair(float low, float high, Element element) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  if (element == Element::E4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  if (element == Element::E4M3) {
    return encode_fp8<Element::E4M3>(low) | encode_fp8<Element::E4M3>(high) << 8;
  }
  return encode_fp8<Element::E5M2>(low) | encode_fp8<Element::E5M2>(high) << 8;
#endif
}

/// The values of two codes, the lower one first: exact, as every one is a float16 too.
__device__ __forceinline__ float2 decode_fp8_pair(uint32_t pair, Element element) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  const uint16_t codes = static_cast<uint16_t>(pair);
  if (element == Element::E4M3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
  }
  float2 values;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(halves));
  return values;
#else
  if (element == Element::E4M3) {
    return {decode_fp8<Element::E4M3>(pair & 0xffu), decode_fp8<Element::E4M3>(pair >> 8 & 0xffu)};
  }
  return {decode_fp8<Element::E5M2>(pair & 0xffu), decode_fp8<Element::E5M2>(pair >> 8 & 0xffu)};
#endif
}

#endif  // __CUDACC__

}  // namespace ligature::cuda
