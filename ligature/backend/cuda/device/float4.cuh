// NVFP4: the 4-bit element, the factor of a block of 16 below that of the tensor, and the choice
// between two of them; bit for bit as backend/cpu/float8.h and quantize_tile_fp4.cpp.
#pragma once

#include "ligature/backend/cuda/device/float8.cuh"
#include "ligature/backend/cuda/device/philox.cuh"

namespace ligature::cuda {

/// An E2M1 code; NaN is the caller's to prevent.
LIGATURE_BOTH uint32_t encode_fp4(float v) {
  const uint32_t bits = bits_of(v);
  return encode_magnitude<Element::E2M1>(bits & kMagnitudeBits) | ((bits >> 28) & 8u);
}

/// An E2M1 code: up to the next with the probability of how far the value lies towards it; `random`
/// is uniform over 32 bits.
LIGATURE_BOTH uint32_t encode_fp4(float v, uint32_t random) {
  constexpr uint32_t one = 0x3f800000u, largest = ElementBits<Element::E2M1>::max;
  const uint32_t bits = bits_of(v), given = bits & kMagnitudeBits;
  const uint32_t magnitude = given < largest ? given : largest;
  const uint32_t exponent = magnitude & kInfinityBits;
  const uint32_t binade = exponent > one ? exponent : one;
  // In steps of the binade, times two over its power: exact, as is taking the whole steps off.
  const float steps = rounded_product(float_of(magnitude), float_of((255u << 23) - binade));
  const uint32_t whole = static_cast<uint32_t>(steps);
  const float rest = rounded_sum(steps, -static_cast<float>(whole));
  const float u =
      rounded_product(static_cast<float>(random >> 8), 5.9604644775390625e-8f);  // 2^-24
  const uint32_t code = ((binade - one) >> 22) + whole + (u < rest ? 1u : 0u);
  return code | ((bits >> 28) & 8u);
}

LIGATURE_BOTH float decode_fp4(uint32_t code) {
  const uint32_t steps = code & 7u;
  // 0 and a half are below the normal numbers.
  const uint32_t bits = steps < 2u ? steps * 0x3f000000u : (steps << 22) + 0x3f000000u;
  return float_of(bits | ((code & 8u) << 28));
}

/// The factor above the blocks' own.
LIGATURE_BOTH float nv_upper(float amax, bool to_256) {
  const float quotient = rounded_quotient(amax, to_256 ? 1536.0f : 2688.0f);
  constexpr float least = 1.1754943508222875e-38f;  // 2^-126
  return quotient < least ? least : quotient;
}

/// A block's largest magnitude, of which the bits are given and which may be NaN, becomes `top`.
LIGATURE_BOTH BlockFactor nv_factor(uint32_t amax_bits, float upper, float top) {
  if (amax_bits > kInfinityBits) return {0.0f, 0.0f, 0x7fu};
  const float scale = rounded_quotient(rounded_quotient(float_of(amax_bits), top), upper);
  const uint32_t code = encode_fp8<Element::E4M3>(scale);
  const float f = rounded_product(decode_fp8<Element::E4M3>(code), upper);
  const float inverse = rounded_quotient(1.0f, f);
  return {f == 0.0f                           ? 0.0f
          : bits_of(inverse) == kInfinityBits ? float_of(kLargestBits)
                                              : inverse,
          0.0f, code};
}

constexpr int kNvBlock = 16;
constexpr int kNvWords = 20;

/// The random words of 16 elements in a row: element i of the matrix has word i % 4 of the counter
/// offset + i / 4.
LIGATURE_BOTH void nv_words(uint64_t first, uint64_t seed, uint64_t offset, uint64_t stream,
                            uint32_t (&words)[kNvWords]) {
  const uint64_t counter = offset + first / 4;
  LIGATURE_UNROLL
  for (int i = 0; i < kNvWords / 4; ++i) {
    philox(counter + static_cast<uint64_t>(i), stream, seed, words + 4 * i);
  }
  const int within = static_cast<int>(first % 4);
  LIGATURE_UNROLL
  for (int step = 0; step < 3; ++step) {
    LIGATURE_UNROLL
    for (int i = 0; i + 1 < kNvWords; ++i) words[i] = step < within ? words[i + 1] : words[i];
  }
}

/// Codes of a block, the first in the lowest bits. `words`: null to round to nearest.
LIGATURE_BOTH uint64_t encode_nv(const float (&v)[kNvBlock], float factor, const uint32_t* words) {
  uint64_t codes = 0;
  LIGATURE_UNROLL
  for (int i = 0; i < kNvBlock; ++i) {
    const float scaled = rounded_product(v[i], factor);
    const uint32_t code = words != nullptr ? encode_fp4(scaled, words[i]) : encode_fp4(scaled);
    codes |= static_cast<uint64_t>(code) << (4 * i);
  }
  return codes;
}

/// How far the codes are off: terms added as a tree, by distances of 8, 4, 2 and 1.
LIGATURE_BOTH float nv_error(const float (&v)[kNvBlock], uint64_t codes, uint32_t scale_code,
                             float upper, bool square) {
  const float scale = decode_fp8<Element::E4M3>(scale_code);
  float e[kNvBlock];
  LIGATURE_UNROLL
  for (int i = 0; i < kNvBlock; ++i) {
    const float element = decode_fp4(static_cast<uint32_t>(codes >> (4 * i)) & 15u);
    const float value = rounded_product(rounded_product(element, scale), upper);
    const float off = rounded_sum(v[i], -value);
    e[i] = square ? rounded_product(off, off) : float_of(bits_of(off) & kMagnitudeBits);
  }
  LIGATURE_UNROLL
  for (int step = kNvBlock / 2; step > 0; step /= 2) {
    LIGATURE_UNROLL
    for (int i = 0; i < step; ++i) e[i] = rounded_sum(e[i], e[i + step]);
  }
  return e[0];
}

/// The signed Hadamard transform / 4 of 16 values; `inverse` undoes it.
LIGATURE_BOTH void hadamard_16(float (&v)[kNvBlock], bool inverse) {
  constexpr uint32_t minus = 0xd7e8u;  // bit i: is sign i negative?
  if (!inverse) {
    LIGATURE_UNROLL
    for (int i = 0; i < kNvBlock; ++i) v[i] = (minus >> i & 1u) != 0 ? -v[i] : v[i];
  }
  LIGATURE_UNROLL
  for (int step = 1; step < kNvBlock; step *= 2) {
    LIGATURE_UNROLL
    for (int pair = 0; pair < kNvBlock / 2; ++pair) {
      const int i = pair / step * 2 * step + pair % step;
      const float a = v[i], b = v[i + step];
      v[i] = rounded_sum(a, b);
      v[i + step] = rounded_sum(a, -b);
    }
  }
  LIGATURE_UNROLL
  for (int i = 0; i < kNvBlock; ++i) {
    v[i] = rounded_product(v[i], inverse && (minus >> i & 1u) != 0 ? -0.25f : 0.25f);
  }
}

}  // namespace ligature::cuda
