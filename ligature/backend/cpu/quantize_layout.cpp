// Tiles turned on their side, and the Hadamard transform along their columns. See quantize_tile.h.
#include <algorithm>
#include <cstring>
#include <utility>

#include "ligature/backend/cpu/cast.h"
#include "ligature/backend/cpu/quantize_tile.h"
#include "ligature/backend/cpu/stream.h"

namespace ligature::cpu {
namespace {

// Square blocks as large as a vector of 16 bytes, whose rows are interleaved until they are
// columns.
template <typename U>
struct Square {
  static constexpr int64_t n = 16 / sizeof(U);
  typedef U Row __attribute__((vector_size(16)));

  template <size_t... lane>
  LIGATURE_INLINE static Row first_halves(Row a, Row b, std::index_sequence<lane...>) {
    return __builtin_shufflevector(a, b, (lane / 2 + lane % 2 * n)...);
  }
  template <size_t... lane>
  LIGATURE_INLINE static Row second_halves(Row a, Row b, std::index_sequence<lane...>) {
    return __builtin_shufflevector(a, b, (n / 2 + lane / 2 + lane % 2 * n)...);
  }

  LIGATURE_INLINE static void transpose(const U* x, int64_t stride, U* out, int64_t out_stride) {
    constexpr auto lanes = std::make_index_sequence<n>();
    Row v[n], t[n];
    for (int64_t i = 0; i < n; ++i) std::memcpy(&v[i], x + i * stride, sizeof(Row));
#pragma GCC unroll 4
    for (int64_t half = n / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < n / 2; ++i) {
        t[2 * i] = first_halves(v[i], v[i + n / 2], lanes);
        t[2 * i + 1] = second_halves(v[i], v[i + n / 2], lanes);
      }
#pragma GCC unroll 16
      for (int64_t i = 0; i < n; ++i) v[i] = t[i];
    }
    for (int64_t i = 0; i < n; ++i) std::memcpy(out + i * out_stride, &v[i], sizeof(Row));
  }
};

template <typename U>
void transpose_bits(const U* x, int64_t x_stride, int64_t rows, int64_t columns, U* out,
                    int64_t stride) {
  constexpr int64_t n = Square<U>::n;
  const int64_t square_rows = rows / n * n, square_columns = columns / n * n;
  for (int64_t r = 0; r < square_rows; r += n) {
    for (int64_t c = 0; c < square_columns; c += n) {
      Square<U>::transpose(x + r * x_stride + c, x_stride, out + c * stride + r, stride);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < square_rows ? square_columns : 0; c < columns; ++c) {
      out[c * stride + r] = x[r * x_stride + c];
    }
  }
}

constexpr int64_t kGroup = 16;
constexpr float kSigns[kGroup] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};

template <typename T, bool inverse>
LIGATURE_SIMD void hadamard_group(const T* x, int64_t x_stride, int64_t columns, float* out,
                                  int64_t stride) {
#pragma GCC ivdep
  for (int64_t c = 0; c < columns; ++c) {
    float v[kGroup];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kGroup; ++i) {
      v[i] = Cast<T, float>::apply(x[i * x_stride + c]) * (inverse ? 1.0f : kSigns[i]);
    }
#pragma GCC unroll 4
    for (int64_t stage = 0; stage < 4; ++stage) {
      const int64_t step = int64_t{1} << stage;
#pragma GCC unroll 8
      for (int64_t pair = 0; pair < kGroup / 2; ++pair) {
        const int64_t i = pair / step * 2 * step + pair % step;
        const float a = v[i], b = v[i + step];
        v[i] = a + b;
        v[i + step] = a - b;
      }
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kGroup; ++i) {
      out[i * stride + c] = v[i] * 0.25f * (inverse ? kSigns[i] : 1.0f);
    }
  }
}

}  // namespace

template <typename T>
void transpose_tile(const Tile<T>& x, T* out, int64_t stride) {
  using U = std::conditional_t<sizeof(T) == 1, uint8_t,
                               std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
  transpose_bits(reinterpret_cast<const U*>(x.data), x.stride, x.rows, x.columns,
                 reinterpret_cast<U*>(out), stride);
}

void transpose_codes(Codes codes, int64_t rows, int64_t columns, bool fp4, Codes out,
                     uint8_t* scratch) {
  uint8_t* transposed = scratch + kTransposed * kTransposed;
  // Not straight into `out`: its rows are often a power of two apart, and would push each other out
  // of the cache before they are full.
  if (fp4) {
    unpack_fp4(codes.data, codes.stride, rows, columns, {scratch, kTransposed});
    transpose_tile(Tile<uint8_t>{scratch, kTransposed, rows, columns}, transposed, kTransposed);
    pack_fp4({transposed, kTransposed}, columns, rows, scratch, kTransposed);
    copy_codes({scratch, kTransposed}, columns, ceil_div(rows, 2), out);
  } else {
    transpose_tile(Tile<uint8_t>{codes.data, codes.stride, rows, columns}, transposed, kTransposed);
    copy_codes({transposed, kTransposed}, columns, rows, out);
  }
}

void copy_codes(Codes from, int64_t rows, int64_t bytes, Codes to) {
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* out = to.data + r * to.stride;
    const uint8_t* row = from.data + r * from.stride;
    to.stream ? stream_copy(out, row, bytes) : static_cast<void>(std::copy_n(row, bytes, out));
  }
}

template <typename T>
void hadamard_columns(const Tile<T>& x, bool inverse, float* out, int64_t stride) {
  constexpr int64_t width = 64;
  const auto run = inverse ? hadamard_group<T, true> : hadamard_group<T, false>;
  const int64_t whole = x.rows / kGroup * kGroup;
  for (int64_t r = 0; r < whole; r += kGroup) {
    run(x.data + r * x.stride, x.stride, x.columns, out + r * stride, stride);
  }
  if (whole == x.rows) return;
  for (int64_t c = 0; c < x.columns; c += width) {
    T last[kGroup * width] = {};
    const int64_t n = std::min(width, x.columns - c);
    for (int64_t r = whole; r < x.rows; ++r) {
      std::copy_n(x.data + r * x.stride + c, n, last + (r - whole) * width);
    }
    run(last, width, n, out + whole * stride + c, stride);
  }
}

template void transpose_tile(const Tile<uint8_t>&, uint8_t*, int64_t);

#define LIGATURE_INSTANTIATE(T)                              \
  template void transpose_tile(const Tile<T>&, T*, int64_t); \
  template void hadamard_columns(const Tile<T>&, bool, float*, int64_t);
LIGATURE_INSTANTIATE(float)
LIGATURE_INSTANTIATE(at::BFloat16)
LIGATURE_INSTANTIATE(at::Half)
#undef LIGATURE_INSTANTIATE

}  // namespace ligature::cpu
