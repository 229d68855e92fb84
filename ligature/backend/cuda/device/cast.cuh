// How a thread casts the 8 rows of 8 columns that it has of a tile of 128x128 values, for every way
// of scaling. Row-wise codes go to memory from registers; column-wise codes meet in shared memory,
// a column after another, whose groups of 8 bytes are shifted so that neither side has conflicts.
// Values outside the matrix are copies of ones of the same row and column: they change no largest
// magnitude, and their codes are not written.
#pragma once

#include <type_traits>

#include "ligature/backend/cuda/device/float8.cuh"
#include "ligature/backend/cuda/device/memory.cuh"
#include "ligature/backend/cuda/device/tile.cuh"
#include "ligature/backend/cuda/quantize_launch.h"

namespace ligature::cuda {

/// What has a factor of its own.
enum class Factors { Tensor, Square128, Line128, Line32 };

constexpr int kCastThreads = 256;
constexpr int kSide = 8;  // rows and columns of a thread
constexpr int kTurnedBytes = kTile * kTile;

template <Element E>
constexpr float kMaxCode = E == Element::E4M3 ? 448.0f : 57344.0f;

template <typename T>
__device__ __forceinline__ uint32_t magnitudes(uint32_t pair) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __half>) {
    asm("abs.f16x2 %0, %1;" : "=r"(r) : "r"(pair));
  } else {
    asm("abs.bf16x2 %0, %1;" : "=r"(r) : "r"(pair));
  }
  return r;
}

/// Of two pairs; a NaN loses against a number.
template <typename T>
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}

/// The bits as a float of a magnitude in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t wide_bits(uint32_t narrow) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float_as_uint(__half2float(__ushort_as_half(static_cast<unsigned short>(narrow))));
  }
  return narrow << 16;
}

template <typename T>
__device__ __forceinline__ float low_value(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
  }
  return __uint_as_float(pair << 16);
}

template <typename T>
__device__ __forceinline__ float high_value(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  }
  return __uint_as_float(pair & 0xffff0000u);
}

template <Element E>
__device__ __forceinline__ uint32_t encode_4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t codes;
  if constexpr (E == Element::E4M3) {
    asm("{.reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n mov.b32 %0, {low, high};}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{.reg .b16 low, high;\n cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        " cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n mov.b32 %0, {low, high};}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return codes;
#else
  return encode_fp8_pair(a, b, E) | encode_fp8_pair(c, d, E) << 16;
#endif
}

/// Codes of 4 values in two words. A NaN loses its sign in arithmetic and gets it back.
template <typename T, Element E>
__device__ __forceinline__ uint32_t encode_words(uint32_t first, uint32_t second, float factor) {
  const uint32_t codes = encode_4<E>(
      __fmul_rn(low_value<T>(first), factor), __fmul_rn(high_value<T>(first), factor),
      __fmul_rn(low_value<T>(second), factor), __fmul_rn(high_value<T>(second), factor));
  return codes | (__byte_perm(first, second, 0x7531) & 0x80808080u);
}

/// Which of the tile's 16x16 groups of 8x8 values a thread has: a warp has 2 down and 16 across, so
/// that it writes rows of 128 bytes.
struct Seat {
  int across = static_cast<int>(threadIdx.x) % 16, down = static_cast<int>(threadIdx.x) / 16;
};

/// The first `count` of 16 codes.
static __device__ __noinline__ void store_bytes(uint8_t* to, uint4 codes, int64_t count) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < count) to[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
  }
}

/// 8 codes of column 8 * across + j.
__device__ __forceinline__ void put_turned(uint2* turned, Seat seat, int j, uint2 codes) {
  turned[(seat.across * kSide + j) * 16 + (seat.down ^ seat.across)] = codes;
}

/// The tile's columns, after a barrier.
__device__ __forceinline__ void write_turned(const QuantizeOutput& out, const uint2* turned,
                                             TilePlace place) {
  const int q = threadIdx.x % 8;
  const int64_t at = place.row + q * 16;
  const int64_t lines = at < out.columns ? out.rows - place.column : 0;
  const int end = static_cast<int>(min(lines, int64_t{kTile})) - static_cast<int>(threadIdx.x / 8);
  uint8_t* to = out.data + (place.column + threadIdx.x / 8) * out.stride + at;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = threadIdx.x / 8 + 32 * i;
    const int shift = column / kSide;
    uint4 codes = reinterpret_cast<const uint4*>(turned)[column * 8 + (q ^ (shift >> 1))];
    if ((shift & 1) != 0) codes = make_uint4(codes.z, codes.w, codes.x, codes.y);
    if (32 * i < end) {
      if (out.vectors) {
        *reinterpret_cast<uint4*>(to) = codes;
      } else {
        store_bytes(to, codes, out.columns - at);
      }
    }
    to += 32 * out.stride;
  }
}

/// 4x4 codes turned.
__device__ __forceinline__ void turn_4(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                       uint32_t (&t)[4]) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  t[0] = __byte_perm(ab_low, cd_low, 0x5410);
  t[1] = __byte_perm(ab_low, cd_low, 0x7632);
  t[2] = __byte_perm(ab_high, cd_high, 0x5410);
  t[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

/// A thread's 8x8 codes to the shared memory of the columns.
__device__ __forceinline__ void put_all_turned(uint2* turned, Seat seat,
                                               const uint32_t (&codes)[kSide][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t upper[4], lower[4];
    turn_4(codes[0][half], codes[1][half], codes[2][half], codes[3][half], upper);
    turn_4(codes[4][half], codes[5][half], codes[6][half], codes[7][half], lower);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      put_turned(turned, seat, half * 4 + j, make_uint2(upper[j], lower[j]));
    }
  }
}

using Words = uint32_t[kSide][4];

struct CastShared {
  uint32_t amax;
  uint32_t warps[8];
  alignas(16) uint16_t columns[8][kTile];
  alignas(16) float factors[4][kTile];     // of columns; Line32: of their blocks
  alignas(16) uint8_t codes[2][kTile][4];  // Line32: of the scales, by row and by column
};

/// Words that lanes 2^bit apart exchange: a lane keeps the half of them that its bit names.
template <int N>
__device__ __forceinline__ void halve(uint32_t* words, int distance) {
  const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const uint32_t kept = upper ? words[i + N / 2] : words[i];
    const uint32_t sent = upper ? words[i] : words[i + N / 2];
    words[i] = __vmaxu2(kept, __shfl_xor_sync(0xffffffffu, sent, distance));
  }
}

__device__ __forceinline__ void put_scale(const QuantizeOutput& out, int64_t line, int64_t block,
                                          float factor) {
  static_cast<float*>(out.scale)[line * out.scale_stride + block * out.scale_step] =
      __fdiv_rn(1.0f, factor);
}

/// A row's codes to memory.
template <typename T, Element E>
__device__ __forceinline__ uint2 encode_row(const uint32_t (&v)[4], float factor) {
  return make_uint2(encode_words<T, E>(v[0], v[1], factor), encode_words<T, E>(v[2], v[3], factor));
}

/// The codes of column j, each with the factor of the column: two rows to a conversion, so that
/// nothing has to be turned.
template <typename T, Element E>
__device__ __forceinline__ uint2 encode_column(const Words& v, int j, float factor) {
  uint32_t codes[2];
  const int i = j / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int k = half * 4;
    const auto value = [&](int r) {
      return __fmul_rn(j % 2 == 0 ? low_value<T>(v[k + r][i]) : high_value<T>(v[k + r][i]), factor);
    };
    const uint32_t selector = j % 2 == 0 ? 0x5151 : 0x7373;
    const uint32_t signs = __byte_perm(__byte_perm(v[k][i], v[k + 1][i], selector),
                                       __byte_perm(v[k + 2][i], v[k + 3][i], selector), 0x5410);
    codes[half] = encode_4<E>(value(0), value(1), value(2), value(3)) | (signs & 0x80808080u);
  }
  return make_uint2(codes[0], codes[1]);
}

/// Where a thread writes row-wise codes, and how many rows.
struct RowWriter {
  uint8_t* to;
  uint32_t stride;
  int rows;
  __device__ __forceinline__ void put(uint2 codes, int k) const {
    if (k < rows) {
      __stwb(reinterpret_cast<uint2*>(to + wide_product(static_cast<uint32_t>(k), stride)), codes);
    }
  }
};

/// `rows`: those of the thread that are in the matrix.
__device__ __forceinline__ RowWriter row_writer(const QuantizePlan& plan, TilePlace place,
                                                Seat seat, int rows) {
  const QuantizeOutput& out = plan.rowwise;
  uint8_t* to =
      out.data + (place.row + seat.down * kSide) * out.stride + place.column + seat.across * kSide;
  asm("" : "+l"(to));  // computed once and not for every row
  return {to, static_cast<uint32_t>(out.stride), out.data != nullptr ? rows : 0};
}

}  // namespace ligature::cuda
