// The other orientation of quantized data, and the Hadamard transform of a whole tensor.
#include "ligature/backend/cuda/device/float4.cuh"
#include "ligature/backend/cuda/device/memory.cuh"
#include "ligature/backend/cuda/quantize_launch.h"

namespace ligature::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;
constexpr int kWords = kTile / 4;  // of a row of the tile, a code to a byte

// As in device/tile.cuh: the words that a warp reads of eight groups of 16 rows lie in 32 banks.
__device__ __forceinline__ uint32_t* tile_word(uint32_t* tile, int row, int word) {
  return tile + row * kWords + (word ^ ((row >> 4) << 2));
}

/// A byte for each of the lower eight codes of 4 bits.
__device__ __forceinline__ uint2 unpack_8(uint32_t packed) {
  const uint32_t even = packed & 0x0f0f0f0fu, odd = packed >> 4 & 0x0f0f0f0fu;
  return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

/// Four codes in a row, `count` of which there are.
__device__ __forceinline__ uint32_t read_4(const uint8_t* row, int64_t column, int count,
                                           bool fp4) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= count) break;
    const uint32_t byte = row[fp4 ? (column + i) / 2 : column + i];
    word |= (!fp4 ? byte : i % 2 == 0 ? byte & 15u : byte >> 4) << (8 * i);
  }
  return word;
}

// `from_vectors`: rows of `data` are whole vectors of 16 codes; `to_vectors` likewise of `out`.
template <bool kFp4>
__global__ void __launch_bounds__(kThreads)
    transpose_codes(const uint8_t* data, int64_t rows, int64_t columns, uint8_t* out,
                    uint32_t across, bool from_vectors, bool to_vectors) {
  __shared__ uint4 memory[kTile * kTile / 16];
  uint32_t* tile = reinterpret_cast<uint32_t*>(memory);
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / across) * kTile;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x % across) * kTile;
  const int64_t stride = kFp4 ? (columns + 1) / 2 : columns;
  const int p = threadIdx.x % 8;
#pragma unroll
  for (int i = threadIdx.x / 8; i < kTile; i += kThreads / 8) {
    const int64_t r = row0 + i, c = column0 + p * 16;
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (r < rows && c < columns) {
      const uint8_t* row = data + r * stride;
      if (from_vectors && kFp4) {
        const uint2 packed = *reinterpret_cast<const uint2*>(row + c / 2);
        const uint2 low = unpack_8(packed.x), high = unpack_8(packed.y);
        codes = make_uint4(low.x, low.y, high.x, high.y);
      } else if (from_vectors) {
        codes = *reinterpret_cast<const uint4*>(row + c);
      } else {
        const int count = static_cast<int>(columns - c < 16 ? columns - c : 16);
        codes =
            make_uint4(read_4(row, c, count, kFp4), read_4(row, c + 4, count - 4, kFp4),
                       read_4(row, c + 8, count - 8, kFp4), read_4(row, c + 12, count - 12, kFp4));
      }
    }
    *reinterpret_cast<uint4*>(tile_word(tile, i, p * 4)) = codes;
  }
  __syncthreads();
  const int64_t out_stride = kFp4 ? (rows + 1) / 2 : rows;
  // 16 rows of four columns at a time.
  const int word = threadIdx.x / 8;
  uint32_t turned[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t a = *tile_word(tile, p * 16 + 4 * k, word);
    const uint32_t b = *tile_word(tile, p * 16 + 4 * k + 1, word);
    const uint32_t c = *tile_word(tile, p * 16 + 4 * k + 2, word);
    const uint32_t d = *tile_word(tile, p * 16 + 4 * k + 3, word);
    const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    turned[0][k] = __byte_perm(ab_low, cd_low, 0x5410);
    turned[1][k] = __byte_perm(ab_low, cd_low, 0x7632);
    turned[2][k] = __byte_perm(ab_high, cd_high, 0x5410);
    turned[3][k] = __byte_perm(ab_high, cd_high, 0x7632);
  }
  const int64_t at = row0 + p * 16;
  const int count = static_cast<int>(rows - at < 16 ? rows - at : 16);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t line = column0 + word * 4 + j;
    if (line >= columns || count <= 0) continue;
    if constexpr (kFp4) {
      uint64_t packed = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        packed |= static_cast<uint64_t>(turned[j][i / 4] >> (8 * (i % 4)) & 15u) << (4 * i);
      }
      uint8_t* to = out + line * out_stride + at / 2;
      for (int i = 0; 2 * i < count; ++i) to[i] = static_cast<uint8_t>(packed >> (8 * i));
    } else {
      uint8_t* to = out + line * out_stride + at;
      if (to_vectors) {
        *reinterpret_cast<uint4*>(to) =
            make_uint4(turned[j][0], turned[j][1], turned[j][2], turned[j][3]);
      } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (i < count) to[i] = static_cast<uint8_t>(turned[j][i / 4] >> (8 * (i % 4)));
        }
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    hadamard_kernel(const T* x, int64_t columns, int64_t groups, int64_t count, bool inverse,
                    T* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    const int64_t row = i / groups, column = (i - row * groups) * kNvBlock;
    const T* from = x + row * columns + column;
    float v[kNvBlock];
#pragma unroll
    for (int j = 0; j < kNvBlock; ++j) v[j] = column + j < columns ? to_float(from[j]) : 0.0f;
    hadamard_16(v, inverse);
    T* to = out + i * kNvBlock;
#pragma unroll
    for (int j = 0; j < kNvBlock; ++j) to[j] = from_float<T>(v[j]);
  }
}

}  // namespace

void launch_transpose_codes(const uint8_t* data, int64_t rows, int64_t columns, bool fp4,
                            uint8_t* out, Stream stream) {
  if (rows == 0 || columns == 0) return;
  const int64_t across = (columns + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
  const auto blocks = static_cast<unsigned>(across * down);
  const auto is_aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool from_vectors = columns % 16 == 0 && is_aligned(data);
  const bool to_vectors = rows % 16 == 0 && is_aligned(out);
  const auto kernel = fp4 ? transpose_codes<true> : transpose_codes<false>;
  kernel<<<blocks, kThreads, 0, stream>>>(data, rows, columns, out, static_cast<uint32_t>(across),
                                          from_vectors, to_vectors);
}

void launch_hadamard(const void* x, Type type, int64_t rows, int64_t columns, bool inverse,
                     void* out, Stream stream) {
  const int64_t groups = (columns + kNvBlock - 1) / kNvBlock, count = rows * groups;
  if (count == 0) return;
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    hadamard_kernel<T>
        <<<static_cast<unsigned>(blocks < 65536 ? blocks : 65536), kThreads, 0, stream>>>(
            static_cast<const T*>(x), columns, groups, count, inverse, static_cast<T*>(out));
  });
}

}  // namespace ligature::cuda
