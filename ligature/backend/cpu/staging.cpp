// The conversion loops behind Input and Output.
#include "ligature/backend/cpu/staging.h"

#include <algorithm>
#include <bit>

#include "ligature/backend/cpu/vector_math.h"
#include "ligature/check.h"

namespace ligature::cpu {
namespace {

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

template <typename From, typename To>
LIGATURE_SIMD void convert_block(const From* from, To* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Cast<From, To>::apply(from[i]);
}

template <typename F>
void dispatch_dtype(at::ScalarType dtype, const F& f) {
  switch (dtype) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    case at::kBFloat16:
      return f(at::BFloat16{});
    case at::kHalf:
      return f(at::Half{});
    default:
      LIGATURE_CHECK(false, "[cpu kernel] wanted a float, double, bfloat16 or half tensor, got ",
                     dtype);
  }
}

}  // namespace

template <typename C>
Input<C>::Input(const at::Tensor& t) {
  if (!t.defined()) return;
  LIGATURE_CHECK(t.is_contiguous(), "[cpu kernel] wanted a contiguous tensor, got shape ",
                 t.sizes(), " with strides ", t.strides());
  data_ = t.const_data_ptr();
  dtype_ = t.scalar_type();
  direct_ = dtype_ == c10::CppTypeToScalarType<C>::value;
}

template <typename C>
const C* Input<C>::convert(int64_t offset, int64_t n, C* buffer) const {
  dispatch_dtype(dtype_, [&](auto zero) {
    using T = decltype(zero);
    convert_block(static_cast<const T*>(data_) + offset, buffer, n);
  });
  return buffer;
}

template <typename C>
Output<C>::Output(const at::Tensor& t) {
  if (!t.defined()) return;
  LIGATURE_CHECK(t.is_contiguous(), "[cpu kernel] wanted a contiguous result, got strides ",
                 t.strides());
  data_ = t.mutable_data_ptr();
  dtype_ = t.scalar_type();
  direct_ = dtype_ == c10::CppTypeToScalarType<C>::value;
}

template <typename C>
void Output<C>::convert(int64_t offset, int64_t n, const C* values) const {
  dispatch_dtype(dtype_, [&](auto zero) {
    using T = decltype(zero);
    convert_block(values, static_cast<T*>(data_) + offset, n);
  });
}

template class Input<float>;
template class Input<double>;
template class Output<float>;
template class Output<double>;

}  // namespace ligature::cpu
