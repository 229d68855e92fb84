// Values from codes: dequantization, and the operand of a matrix product, which leaves some of the
// factors out.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "ligature/backend/cpu/cast.h"
#include "ligature/backend/cpu/float8.h"
#include "ligature/backend/cpu/quantize.h"
#include "ligature/backend/cpu/quantize_tile.h"
#include "ligature/backend/cpu/row_chunks.h"

namespace ligature::cpu {
namespace {

constexpr int64_t kColumns = 1024;

template <Element E, typename T>
LIGATURE_INLINE void decode_run(const uint8_t* codes, int64_t n, float factor, T* out) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Cast<float, T>::apply(decode_fp8<E>(codes[i]) * factor);
  }
}

template <Element E, int64_t size, typename T>
LIGATURE_WIDE_SIMD void decode_row(const uint8_t* codes, int64_t n, const float* factors, T* out) {
  const int64_t whole = size == 0 ? 0 : n / size;
  for (int64_t b = 0; b < whole; ++b) {
    decode_run<E>(codes + b * size, size, factors[b], out + b * size);
  }
  const int64_t done = whole * size;
  if (done < n) decode_run<E>(codes + done, n - done, factors[whole], out + done);
}

template <typename T>
LIGATURE_INLINE void decode_fp4_run(const uint8_t* codes, int64_t n, float scale, float upper,
                                    T* out) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Cast<float, T>::apply(decode_fp4(codes[i]) * scale * upper);
  }
}

template <typename T>
LIGATURE_WIDE_SIMD void decode_fp4_row(const uint8_t* codes, int64_t n, const float* scales,
                                       float upper, T* out) {
  constexpr int64_t size = 16;
  const int64_t whole = n / size, done = whole * size;
  for (int64_t b = 0; b < whole; ++b) {
    decode_fp4_run(codes + b * size, size, scales[b], upper, out + b * size);
  }
  if (done < n) decode_fp4_run(codes + done, n - done, scales[whole], upper, out + done);
}

LIGATURE_WIDE_SIMD void decode_e8m0_scales(const uint8_t* codes, int64_t n, float* scales) {
  for (int64_t i = 0; i < n; ++i) scales[i] = decode_e8m0(codes[i]);
}

LIGATURE_WIDE_SIMD void decode_e4m3_scales(const uint8_t* codes, int64_t n, float* scales) {
  for (int64_t i = 0; i < n; ++i) scales[i] = decode_fp8<Element::E4M3>(codes[i]);
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
    decode_e4m3_scales(static_cast<const uint8_t*>(scale_) + at, blocks, factors);
    const float upper = operand_ ? 1.0f : nv_upper(amax_[format_.row_scaled ? r : 0], format_);
    uint8_t codes[kColumns];
    unpack_fp4(data + column / 2, 0, 1, n, {codes, 0});
    decode_fp4_row(codes, n, factors, upper, out);
  }

 private:
  template <int64_t size>
  void fp8(const uint8_t* codes, int64_t n, const float* factors, T* out) const {
    format_.element == Element::E4M3 ? decode_row<Element::E4M3, size>(codes, n, factors, out)
                                     : decode_row<Element::E5M2, size>(codes, n, factors, out);
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

}  // namespace

void dequantize(const Tensor& out, const QuantizedMatrix& q, const Format& format) {
  decode(out, q, format, false);
}

void expand(const Tensor& out, const QuantizedMatrix& q, const Format& format) {
  decode(out, q, format, true);
}

}  // namespace ligature::cpu
