// Values from codes: dequantization, and the operand of a matrix product, which leaves some of the
// factors out.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "ligature/backend/cpu/cast.h"
#include "ligature/backend/cpu/float8.h"
#include "ligature/backend/cpu/quantize.h"
#include "ligature/backend/cpu/quantize_tile.h"
#include "ligature/backend/cpu/row_chunks.h"

namespace ligature::cpu {
namespace {

// Columns decoded at once.
constexpr int64_t kColumns = 1024;

// The magnitude of a code without NaN or infinity, which comes shifted to where a float has its
// exponent and mantissa. With the bias made good a normal number is right, and one below them is
// half of it plus half the least normal: the lesser of the two ways to read it is the right one.
template <Element E>
LIGATURE_INLINE int32_t plain_magnitude(int32_t shifted) {
  using B = ElementBits<E>;
  constexpr float least = std::bit_cast<float>((127 + B::least_exponent) << 23);
  const int32_t normal = shifted + ((126 + B::least_exponent) << 23);
  const float value = std::bit_cast<float>(normal);
  return std::min(std::bit_cast<int32_t>(value + (value - least)), normal);
}

// How results get into their dtype.
enum class Rounding { Any, Finite, None };

template <Rounding rounding>
LIGATURE_INLINE uint32_t bfloat16_pair(float first, float second) {
  uint32_t low = std::bit_cast<uint32_t>(first), high = std::bit_cast<uint32_t>(second);
  if constexpr (rounding == Rounding::Any) {
    return Cast<float, at::BFloat16>::apply(first).x |
           static_cast<uint32_t>(Cast<float, at::BFloat16>::apply(second).x) << 16;
  }
  if constexpr (rounding == Rounding::Finite) {
    low += 0x7fffu + ((low >> 16) & 1u);
    high += 0x7fffu + ((high >> 16) & 1u);
  }
  return (low >> 16) | (high & 0xffff0000u);
}

template <Rounding rounding, typename T>
LIGATURE_INLINE void write_pair(float first, float second, T* out) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    const uint32_t both = bfloat16_pair<rounding>(first, second);
    std::memcpy(static_cast<void*>(out), &both, sizeof(both));
  } else {
    out[0] = Cast<float, T>::apply(first);
    out[1] = Cast<float, T>::apply(second);
  }
}

// n pairs, at most kColumns / 2; factor_of(i) is that of pair i. With a rounding other than Any no
// code is NaN or infinite.
template <Element E, Rounding rounding, typename T, typename Factors>
LIGATURE_INLINE void decode_pairs(const uint8_t* codes, int64_t n, const Factors& factor_of,
                                  T* out) {
  constexpr int shift = 23 - ElementBits<E>::mantissa;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float factor = factor_of(i);
    if constexpr (rounding == Rounding::Any) {
      write_pair<rounding>(decode_fp8<E>(codes[2 * i]) * factor,
                           decode_fp8<E>(codes[2 * i + 1]) * factor, out + 2 * i);
    } else {
      uint16_t pair;
      std::memcpy(&pair, codes + 2 * i, sizeof(pair));
      const int32_t both = pair;
      const int32_t first = plain_magnitude<E>((both & 0x7f) << shift);
      const int32_t second = plain_magnitude<E>((both & 0x7f00) << (shift - 8));
      const int32_t first_sign = (both << 24) & ~kMagnitude,
                    second_sign = (both << 16) & ~kMagnitude;
      write_pair<rounding>(std::bit_cast<float>(first | first_sign) * factor,
                           std::bit_cast<float>(second | second_sign) * factor, out + 2 * i);
    }
  }
}

// A `size` of 0: one factor for everything.
template <Element E, int64_t size, Rounding rounding, typename T>
LIGATURE_SIMD void decode_row(const uint8_t* codes, int64_t n, const float* factors, T* out) {
  if constexpr (size == 0) {
    const float one = *factors;
    decode_pairs<E, rounding>(codes, n / 2, [=](int64_t) { return one; }, out);
  } else {
    float each[kColumns / 2];
    for (int64_t i = 0; i < n / 2; i += size / 2) {
      const float one = factors[2 * i / size];
      for (int64_t j = 0; j < size / 2; ++j) each[i + j] = one;
    }
    decode_pairs<E, rounding>(codes, n / 2, [&](int64_t i) { return each[i]; }, out);
  }
  if (n % 2 != 0) {
    const float factor = factors[size == 0 ? 0 : (n - 1) / size];
    out[n - 1] = Cast<float, T>::apply(decode_fp8<E>(codes[n - 1]) * factor);
  }
}

// Is any code NaN or infinite?
template <Element E>
LIGATURE_SIMD bool any_special(const uint8_t* codes, int64_t n) {
  constexpr int8_t first = E == Element::E4M3 ? 0x7f : 0x7c;
  int8_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, static_cast<int8_t>(codes[i] & 0x7f));
  }
  return largest >= first;
}

template <Rounding rounding, typename T>
LIGATURE_SIMD void decode_fp4_row(const uint8_t* packed, int64_t n, const float* scales,
                                  float upper, T* out) {
  constexpr int64_t size = 16;
  const int64_t pairs = n / 2;
  float each[kColumns / 2];
  for (int64_t i = 0; i < pairs; i += size / 2) {
    const float one = scales[2 * i / size];
    for (int64_t j = 0; j < size / 2; ++j) each[i + j] = one;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t both = packed[i];
    const int32_t first = plain_magnitude<Element::E2M1>((both & 7) << 22);
    const int32_t second = plain_magnitude<Element::E2M1>((both & 0x70) << 18);
    const int32_t first_sign = (both << 28) & ~kMagnitude, second_sign = (both << 24) & ~kMagnitude;
    write_pair<rounding>(std::bit_cast<float>(first | first_sign) * each[i] * upper,
                         std::bit_cast<float>(second | second_sign) * each[i] * upper, out + 2 * i);
  }
  if (n % 2 != 0) {
    out[n - 1] =
        Cast<float, T>::apply(decode_fp4(packed[n / 2] & 15) * scales[(n - 1) / size] * upper);
  }
}

// Which rounding the products of normal elements and these factors need: None where they are powers
// of two, or so few bits, that nothing is lost.
Rounding rounding_of(const float* factors, int64_t n, bool exact) {
  constexpr uint32_t fraction = 0x7fffff;
  uint32_t largest = 0, least = ~0u, fractions = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(factors[i]) & kMagnitude;
    largest = std::max(largest, bits);
    least = std::min(least, bits);
    fractions |= bits & fraction;
  }
  if (largest >= kInfinityBits) return Rounding::Any;
  constexpr uint32_t enough = (127 - 100) << 23;
  return (exact || fractions == 0) && least >= enough ? Rounding::None : Rounding::Finite;
}

LIGATURE_SIMD void decode_e8m0_scales(const uint8_t* codes, int64_t n, float* scales) {
  for (int64_t i = 0; i < n; ++i) scales[i] = decode_e8m0(codes[i]);
}

// A row has few of them, too few for vectors. Tells what rounding_of(scales, n, true) does.
Rounding decode_e4m3_scales(const uint8_t* codes, int64_t n, float* scales) {
  static const auto values = [] {
    std::array<float, 256> all{};
    for (int code = 0; code < 256; ++code) {
      all[code] = decode_fp8<Element::E4M3>(static_cast<uint8_t>(code));
    }
    return all;
  }();
  uint8_t least = 0xff, largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t magnitude = codes[i] & 0x7f;
    least = std::min(least, magnitude);
    largest = std::max(largest, magnitude);
  }
  const float* const value = values.data();
  for (int64_t i = 0; i < n; ++i) scales[i] = value[codes[i]];
  if (largest == 0x7f) return Rounding::Any;
  return least == 0 ? Rounding::Finite : Rounding::None;
}

template <typename T>
class Decoding {
 public:
  Decoding(const QuantizedMatrix& q, const Format& format, bool operand)
      : format_(format),
        data_(q.data.const_data_ptr<uint8_t>()),
        stride_(q.data.size(1)),
        scale_(q.scale.const_data_ptr()),
        scale_stride_(q.scale.size(-1)),
        amax_(q.amax.defined() ? q.amax.const_data_ptr<float>() : nullptr),
        operand_(operand) {}

  void row(int64_t r, int64_t column, int64_t n, T* out) const {
    const int64_t block = format_.block_size();
    const uint8_t* data = data_ + r * stride_;
    if (format_.per_tensor()) {
      const float factor = operand_ ? 1.0f : *static_cast<const float*>(scale_);
      return fp8<0>(data + column, n, &factor, out);
    }
    const int64_t at = (format_.block_2d ? r / block : r) * scale_stride_ + column / block;
    const int64_t blocks = ceil_div(n, block);
    float factors[kColumns / 16];
    switch (format_.scaling) {
      case Scaling::Block:
        if (operand_ && !format_.power_of_2_scales) {
          std::fill_n(factors, blocks, 1.0f);
        } else {
          std::copy_n(static_cast<const float*>(scale_) + at, blocks, factors);
        }
        return fp8<128>(data + column, n, factors, out);
      case Scaling::MX:
        decode_e8m0_scales(static_cast<const uint8_t*>(scale_) + at, blocks, factors);
        return fp8<32>(data + column, n, factors, out);
      default:
        break;
    }
    Rounding rounding =
        decode_e4m3_scales(static_cast<const uint8_t*>(scale_) + at, blocks, factors);
    const float upper = operand_ ? 1.0f : nv_upper(amax_[format_.row_scaled ? r : 0], format_);
    data += column / 2;
    if (!operand_ && rounding == Rounding::None) rounding = Rounding::Finite;  // by `upper`
    switch (rounding) {
      case Rounding::Any:
        return decode_fp4_row<Rounding::Any>(data, n, factors, upper, out);
      case Rounding::Finite:
        return decode_fp4_row<Rounding::Finite>(data, n, factors, upper, out);
      case Rounding::None:
        return decode_fp4_row<Rounding::None>(data, n, factors, upper, out);
    }
  }

 private:
  template <int64_t size>
  void fp8(const uint8_t* codes, int64_t n, const float* factors, T* out) const {
    format_.element == Element::E4M3 ? fp8<Element::E4M3, size>(codes, n, factors, out)
                                     : fp8<Element::E5M2, size>(codes, n, factors, out);
  }

  template <Element E, int64_t size>
  void fp8(const uint8_t* codes, int64_t n, const float* factors, T* out) const {
    const int64_t blocks = size == 0 ? 1 : ceil_div(n, size);
    const Rounding rounding = rounding_of(factors, blocks, false);
    if (rounding == Rounding::Any || any_special<E>(codes, n)) {
      return decode_row<E, size, Rounding::Any>(codes, n, factors, out);
    }
    rounding == Rounding::None ? decode_row<E, size, Rounding::None>(codes, n, factors, out)
                               : decode_row<E, size, Rounding::Finite>(codes, n, factors, out);
  }

  const Format& format_;
  const uint8_t* data_;
  int64_t stride_;
  const void* scale_;
  int64_t scale_stride_;
  const float* amax_;
  bool operand_;
};

template <typename T>
void decode_into(const Tensor& out, const QuantizedMatrix& q, const Format& format, bool operand) {
  const int64_t rows = out.size(0), columns = out.size(1);
  const Decoding<T> decoding(q, format, operand);
  T* values = out.mutable_data_ptr<T>();
  const int64_t grain = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(columns, 1));
  at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = 0; c < columns; c += kColumns) {
        decoding.row(r, c, std::min(kColumns, columns - c), values + r * columns + c);
      }
    }
  });
}

void decode(const Tensor& out, const QuantizedMatrix& q, const Format& format, bool operand) {
  switch (out.scalar_type()) {
    case at::kBFloat16:
      return decode_into<at::BFloat16>(out, q, format, operand);
    case at::kHalf:
      return decode_into<at::Half>(out, q, format, operand);
    case at::kFloat:
      return decode_into<float>(out, q, format, operand);
    default:
      const Tensor values = at::empty(out.sizes(), at::kFloat);
      decode_into<float>(values, q, format, operand);
      out.copy_(values);
  }
}

LIGATURE_SIMD uint8_t largest_code(const uint8_t* codes, int64_t n, uint8_t last) {
  uint8_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t magnitude = codes[i] & 0x7f;
    const uint8_t counted = magnitude <= last ? magnitude : 0;
    largest = counted > largest ? counted : largest;
  }
  return largest;
}

}  // namespace

// Codes without their sign are in the order of their values, NaN at the end.
void update_amax(const QuantizedMatrix& q, const Format& format, Tensor& amax) {
  const uint8_t* codes = q.data.const_data_ptr<uint8_t>();
  const bool e4m3 = format.element == Element::E4M3;
  std::atomic<uint8_t> found{0};
  at::parallel_for(0, q.data.numel(), 8 * kChunkElements, [&](int64_t first, int64_t end) {
    const uint8_t largest = largest_code(codes + first, end - first, e4m3 ? 0x7e : 0x7c);
    uint8_t before = found.load(std::memory_order_relaxed);
    while (before < largest && !found.compare_exchange_weak(before, largest)) {
    }
  });
  const uint8_t code = found.load();
  const float value = e4m3 ? decode_fp8<Element::E4M3>(code) : decode_fp8<Element::E5M2>(code);
  float* out = amax.mutable_data_ptr<float>();
  out[0] = std::max(out[0], value * q.scale.const_data_ptr<float>()[0]);
}

namespace {

/// A GPU writes the scales of lines of 128 column after column, as its GEMMs want them, and they
/// may have come from there.
QuantizedMatrix with_rows_of_scales(const QuantizedMatrix& q) {
  return {q.data, q.scale.contiguous(), q.amax};
}

}  // namespace

void dequantize(const Tensor& out, const QuantizedMatrix& q, const Format& format) {
  decode(out, with_rows_of_scales(q), format, false);
}

void expand(const Tensor& out, const QuantizedMatrix& q, const Format& format) {
  decode(out, with_rows_of_scales(q), format, true);
}

}  // namespace ligature::cpu
