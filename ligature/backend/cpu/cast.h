// Conversions between the dtypes as arithmetic that vector code can be made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <bit>

#include "ligature/backend/cpu/vector_math.h"

namespace ligature::cpu {

template <typename From, typename To>
struct Cast {
  LIGATURE_INLINE static To apply(From v) { return static_cast<To>(v); }
};

template <>
struct Cast<at::BFloat16, float> {
  LIGATURE_INLINE static float apply(at::BFloat16 v) {
    return std::bit_cast<float>(static_cast<uint32_t>(v.x) << 16);
  }
};

// To nearest, ties to even; NaN to a quiet NaN.
template <>
struct Cast<float, at::BFloat16> {
  LIGATURE_INLINE static at::BFloat16 apply(float v) {
    const uint32_t bits = std::bit_cast<uint32_t>(v);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t is_nan = -static_cast<uint32_t>(v != v);
    const uint32_t result = (rounded & ~is_nan) | (0x7fc0u & is_nan);
    return at::BFloat16(static_cast<uint16_t>(result), at::BFloat16::from_bits());
  }
};

// Normal numbers by shifting the exponent, subnormal ones by a subtraction that is exact.
template <>
struct Cast<at::Half, float> {
  LIGATURE_INLINE static float apply(at::Half v) {
    const int32_t magnitude = (v.x & 0x7fff) << 13;
    const uint32_t sign = (v.x & 0x8000u) << 16;
    const float normal = std::bit_cast<float>(magnitude + 0x70000000) * 0x1.0p-112f;
    const float subnormal = std::bit_cast<float>((magnitude >> 13) | 0x3f000000) - 0.5f;
    const float value = select(magnitude < (0x0400 << 13), subnormal, normal);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
};

// To nearest, ties to even: adding a power of two leaves the kept bits at the end of the mantissa,
// after scaling up and down has made infinities of what is too large.
template <>
struct Cast<float, at::Half> {
  LIGATURE_INLINE static at::Half apply(float v) {
    const int32_t bits = std::bit_cast<int32_t>(v);
    const int32_t magnitude = bits & 0x7fffffff;
    const float value = std::bit_cast<float>(magnitude) * 0x1.0p+112f * 0x1.0p-110f;
    const uint32_t exponent = std::max(magnitude & 0x7f800000, 0x38800000) + 0x07800000u;
    const int32_t sum = std::bit_cast<int32_t>(std::bit_cast<float>(exponent) + value);
    const int32_t rounded = ((sum >> 13) & 0x7c00) + (sum & 0x0fff);
    const int32_t is_nan = -static_cast<int32_t>(magnitude > 0x7f800000);
    const int32_t result = (rounded & ~is_nan) | (0x7e00 & is_nan);
    const int32_t sign = (bits >> 16) & 0x8000;
    return at::Half(static_cast<uint16_t>(result | sign), at::Half::from_bits());
  }
};

}  // namespace ligature::cpu
