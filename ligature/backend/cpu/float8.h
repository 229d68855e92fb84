// The low-precision elements and scales as arithmetic without branches. Encoding rounds to nearest,
// ties to even, and holds what is too large at the largest value; docs/low_precision.md.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "ligature/backend/cpu/vector_math.h"
#include "ligature/format/format.h"

namespace ligature::cpu {

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kNaN = 0x7fc00000;

/// Of an element type: bits of the mantissa, exponent of the least normal number, largest value.
template <Element>
struct ElementBits;
template <>
struct ElementBits<Element::E4M3> {
  static constexpr int mantissa = 3, least_exponent = -6;
  static constexpr float max = 448.0f;
};
template <>
struct ElementBits<Element::E5M2> {
  static constexpr int mantissa = 2, least_exponent = -14;
  static constexpr float max = 57344.0f;
};
template <>
struct ElementBits<Element::E2M1> {
  static constexpr int mantissa = 1, least_exponent = 0;
  static constexpr float max = 6.0f;
};

/// The code of a value in the lowest 8 bits or 4; what is above them means nothing. Adding the
/// power of two whose last bit is worth a step of the element at the value's exponent leaves the
/// number of steps at the end of the mantissa; a constant even number of steps more makes the
/// exponent and it add up to the code. Held: the value is no NaN and not so large that it would be
/// rounded to more than the largest.
template <Element E, bool held>
LIGATURE_INLINE uint32_t encode_bits(float v) {
  using B = ElementBits<E>;
  constexpr int shift = 23 - B::mantissa;
  constexpr int32_t sign = E == Element::E2M1 ? 8 : 0x80, below = sign - 1;
  constexpr int32_t least = (127 + B::least_exponent) << 23;
  constexpr int32_t more = -((127 + B::least_exponent + shift) << B::mantissa) & below;
  static_assert(more % 2 == 0);
  const int32_t bits = std::bit_cast<int32_t>(v);
  const int32_t given = bits & kMagnitude;
  const int32_t magnitude =
      held ? given : std::min(given, std::bit_cast<int32_t>(ElementBits<E>::max));
  const int32_t power = std::max(magnitude & kInfinity, least) + ((shift << 23) + more);
  const int32_t sum =
      std::bit_cast<int32_t>(std::bit_cast<float>(power) + std::bit_cast<float>(magnitude));
  int32_t code = (sum >> shift) + sum;
  if constexpr (!held && E != Element::E2M1) {
    code |= -static_cast<int32_t>(given > kInfinity) & 0x7f;
  }
  constexpr int to_sign = E == Element::E2M1 ? 28 : 24;
  const int32_t signs = bits >> to_sign;
  return static_cast<uint32_t>(((code ^ signs) & below) ^ signs);
}

/// An FP8 code. NaN: 0x7f and the sign.
template <Element E>
LIGATURE_INLINE uint8_t encode_fp8(float v) {
  return static_cast<uint8_t>(encode_bits<E, false>(v));
}

/// An E2M1 code; NaN is the caller's to prevent.
LIGATURE_INLINE uint8_t encode_fp4(float v) {
  return static_cast<uint8_t>(encode_bits<Element::E2M1, false>(v) & 15);
}

/// An E2M1 code: up to the next with the probability of how far the value lies towards it; `random`
/// is uniform over 32 bits.
LIGATURE_INLINE uint32_t encode_fp4_bits(float v, uint32_t random) {
  constexpr int32_t largest = std::bit_cast<int32_t>(6.0f);
  constexpr int32_t one = std::bit_cast<int32_t>(1.0f);
  const int32_t bits = std::bit_cast<int32_t>(v);
  const int32_t magnitude = std::min(bits & kMagnitude, largest);
  // std::max would be turned into jumps here.
  const int32_t beyond = (magnitude & kInfinity) - one;
  const int32_t binade = one + (beyond & ~(beyond >> 31));
  // In steps of the binade, times two over its power: exact, as is taking the whole steps off.
  const float per_step = std::bit_cast<float>((255 << 23) - binade);
  const float steps = std::bit_cast<float>(magnitude) * per_step;
  const int32_t whole = static_cast<int32_t>(steps);
  const float rest = steps - static_cast<float>(whole);
  const float u = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1.0p-24f;
  // The sign of the difference: a comparison would keep a loop from being vectorized.
  const int32_t up = static_cast<int32_t>(std::bit_cast<uint32_t>(u - rest) >> 31);
  const int32_t code = ((binade - one) >> 22) + whole + up;
  return static_cast<uint32_t>(code | ((bits >> 28) & 8));
}

template <Element E>
LIGATURE_INLINE float decode_fp8(uint8_t code) {
  using B = ElementBits<E>;
  constexpr int shift = 23 - B::mantissa;
  constexpr int32_t bias = 126 + B::least_exponent;
  const int32_t magnitude = (code & 0x7f) << shift;
  const int32_t sign = (code & 0x80) << 24;
  const float below =
      std::bit_cast<float>(magnitude + ((bias + 1) << 23)) - std::bit_cast<float>((bias + 1) << 23);
  const float value =
      select(magnitude < (1 << 23), below, std::bit_cast<float>(magnitude + (bias << 23)));
  int32_t bits = std::bit_cast<int32_t>(value) | sign;
  if constexpr (E == Element::E4M3) {
    bits |= -static_cast<int32_t>(magnitude == (0x7f << shift)) & kNaN;
  } else {
    bits |= -static_cast<int32_t>(magnitude >= (0x7c << shift)) & kInfinity;
  }
  return std::bit_cast<float>(bits);
}

LIGATURE_INLINE float decode_fp4(uint8_t code) {
  constexpr int32_t one = std::bit_cast<int32_t>(1.0f);
  const int32_t magnitude = (code & 7) << 22;
  const float below = std::bit_cast<float>(magnitude + one) - 1.0f;
  const float value =
      select(magnitude < (1 << 23), below, std::bit_cast<float>(magnitude + one - (1 << 23)));
  return std::bit_cast<float>(std::bit_cast<int32_t>(value) | ((code & 8) << 28));
}

/// The least power of two at or above q >= 0, as its exponent + 127.
LIGATURE_INLINE int32_t encode_e8m0(float q) {
  const int32_t bits = std::bit_cast<int32_t>(q);
  const int32_t code = std::min((bits + 0x7fffff) >> 23, 254);
  return code & -static_cast<int32_t>(bits > 0x400000);
}

/// 2^(code - 127); 2^-127 is not a normal number.
LIGATURE_INLINE float decode_e8m0(int32_t code) {
  const int32_t nan = -static_cast<int32_t>(code == 255) & kNaN;
  const int32_t least = -static_cast<int32_t>(code == 0) & 0x400000;
  return std::bit_cast<float>((code << 23) | nan | least);
}

/// What a value is multiplied by to be quantized with this E8M0 scale: 2^(127 - code).
LIGATURE_INLINE float e8m0_factor(int32_t code) { return decode_e8m0(254 - code); }

/// Current and Block: what values of this largest magnitude are multiplied by.
LIGATURE_INLINE float factor_of(float amax, float max, float epsilon, bool power_of_2) {
  const float held = select(amax < epsilon, epsilon, amax);
  const int32_t held_bits = std::bit_cast<int32_t>(held);
  const bool none = held_bits <= 0 || held_bits >= kInfinity;
  const float quotient = max / held;
  const float finite = select(std::bit_cast<int32_t>(quotient) >= kInfinity,
                              std::bit_cast<float>(kInfinity - 1), quotient);
  const int32_t kept = std::bit_cast<int32_t>(finite) & (power_of_2 ? kInfinity : -1);
  return select(none, 1.0f, std::bit_cast<float>(kept));
}

/// NV: the factor above the blocks' own.
LIGATURE_INLINE float nv_upper(float amax, const Format& format) {
  const float largest = format.nv_range();
  return std::max(amax / largest, 0x1.0p-126f);
}

}  // namespace ligature::cpu
