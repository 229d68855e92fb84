// A tile of 128x128 values in shared memory, and how it is written in FP8, row-wise and
// column-wise. A source fills the tile with values as they would have been rounded; then a line of
// 128 values along a row, or along a column, is the work of eight lanes with 16 values each. So
// both orientations are the same code, stores are 16 bytes wide and fill lines of 128 bytes, and a
// group of 16 rows, which NVFP4 and its Hadamard transform work on, is in one thread.
//
// A row of the tile lies in words of 4 bytes, whose places are shifted by the row's sixteenth: then
// the 32 words that a warp reads of eight groups of 16 rows lie in 32 banks.
#pragma once

#include <type_traits>

#include "ligature/backend/cuda/device/float8.cuh"
#include "ligature/backend/cuda/device/memory.cuh"
#include "ligature/backend/cuda/quantize_launch.h"

namespace ligature::cuda {

constexpr int kTile = 128;
constexpr int kTileThreads = 256;
constexpr int kPart = 16;  // values of a lane
constexpr int kLineLanes = kTile / kPart;
constexpr int kLines = kTileThreads / kLineLanes;  // lines at once

template <typename T>
constexpr int kRowWords = kTile * static_cast<int>(sizeof(T)) / 4;
template <typename T>
constexpr int kTileBytes = kTile * kTile * static_cast<int>(sizeof(T));

struct TileShared {
  uint32_t amax;
  uint32_t squares[64];  // largest magnitudes of square blocks, row by row
};

template <typename T>
__device__ __forceinline__ uint32_t* tile_word(uint32_t* tile, int row, int word) {
  return tile + row * kRowWords<T> + (word ^ ((row >> 4) << 2));
}

/// 16 bytes of a row from column `column` on.
template <typename T>
__device__ __forceinline__ uint4* tile_vector(uint32_t* tile, int row, int column) {
  return reinterpret_cast<uint4*>(
      tile_word<T>(tile, row, column * static_cast<int>(sizeof(T)) / 4));
}

// ---- Values in a row

/// N values, as words.
template <typename T, int N>
struct Part {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];

  /// The value's bits at the upper end of a word.
  __device__ __forceinline__ uint32_t bits(int i) const {
    if constexpr (sizeof(T) == 4) return words[i];
    return i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u;
  }
  __device__ __forceinline__ float value(int i) const {
    if constexpr (std::is_same_v<T, __half>) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits(i) >> 16)));
    }
    return __uint_as_float(bits(i));
  }
  __device__ __forceinline__ bool is_nan(int i) const {
    constexpr uint32_t infinity = std::is_same_v<T, __half> ? 0x7c000000u : kInfinityBits;
    return (bits(i) & kMagnitudeBits) > infinity;
  }
};

/// 16 bytes of them. They stay words until they are used, which takes fewer registers than values.
template <typename T>
__device__ __forceinline__ Part<T, kVector<T>> load_words(const T* p) {
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}

/// The largest magnitude as a float's bits, without NaN; `special`: is there one?
template <typename T, int N>
__device__ __forceinline__ uint32_t part_amax(const Part<T, N>& part, bool& special) {
  uint32_t largest = 0;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) largest = max(largest, part.words[i] & kMagnitudeBits);
    special = largest > kInfinityBits;
  } else {
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pair = __vmaxu2(pair, part.words[i] & 0x7fff7fffu);
    largest = max(pair & 0xffffu, pair >> 16);
    if constexpr (std::is_same_v<T, __half>) {
      special = largest > 0x7c00u;
      largest = __float_as_uint(__half2float(__ushort_as_half(static_cast<uint16_t>(largest))));
    } else {
      special = largest > 0x7f80u;
      largest <<= 16;
    }
  }
  if (special) {
    largest = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t magnitude = __float_as_uint(part.value(i)) & kMagnitudeBits;
      if (magnitude <= kInfinityBits) largest = max(largest, magnitude);
    }
  }
  return largest;
}

/// FP8 codes of the values times a factor, four to a word.
template <typename T, int N>
__device__ __forceinline__ void encode_part(const Part<T, N>& part, float factor, Element element,
                                            bool special, uint32_t (&codes)[N / 4]) {
  const auto encode = [&](Element e) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint32_t low = encode_fp8_pair(__fmul_rn(part.value(i), factor),
                                           __fmul_rn(part.value(i + 1), factor), e);
      const uint32_t high = encode_fp8_pair(__fmul_rn(part.value(i + 2), factor),
                                            __fmul_rn(part.value(i + 3), factor), e);
      codes[i / 4] = __byte_perm(low, high, 0x5410);
    }
  };
  if (element == Element::E4M3) {
    encode(Element::E4M3);
  } else {
    encode(Element::E5M2);
  }
  if (!special) return;
  // A NaN keeps its sign, which arithmetic drops.
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (!part.is_nan(i)) continue;
    const int shift = i % 4 * 8;
    const uint32_t code = 0x7fu | (part.bits(i) >> 24 & 0x80u);
    codes[i / 4] = (codes[i / 4] & ~(0xffu << shift)) | code << shift;
  }
}

/// A part of a row of the tile.
template <typename T>
__device__ __forceinline__ Part<T, kPart> row_part(uint32_t* tile, int row, int p) {
  Part<T, kPart> part;
  constexpr int kVectors = Part<T, kPart>::kWords / 4;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint4 v = *tile_vector<T>(tile, row, p * kPart + i * kVector<T>);
    part.words[4 * i] = v.x;
    part.words[4 * i + 1] = v.y;
    part.words[4 * i + 2] = v.z;
    part.words[4 * i + 3] = v.w;
  }
  return part;
}

/// Parts of the columns in one word of the rows: of two columns where values have two bytes.
template <typename T>
__device__ __forceinline__ void column_parts(uint32_t* tile, int word, int p,
                                             Part<T, kPart> (&parts)[4 / sizeof(T)]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) parts[0].words[i] = *tile_word<T>(tile, p * kPart + i, word);
  } else {
#pragma unroll
    for (int i = 0; i < kPart; i += 2) {
      const uint32_t first = *tile_word<T>(tile, p * kPart + i, word);
      const uint32_t second = *tile_word<T>(tile, p * kPart + i + 1, word);
      parts[0].words[i / 2] = __byte_perm(first, second, 0x5410);
      parts[1].words[i / 2] = __byte_perm(first, second, 0x7632);
    }
  }
}

// ---- Largest values

/// Raises a float >= 0 in memory. Most calls find it high enough.
__device__ __forceinline__ void raise_amax(float* amax, uint32_t bits) {
  int* word = reinterpret_cast<int*>(amax);
  const int wanted = static_cast<int>(bits);
  if (wanted > *static_cast<volatile int*>(word)) atomicMax(word, wanted);
}

/// Over the block, into `amax`; all threads call it. `shared` is zero before.
__device__ __forceinline__ void raise_by_block(uint32_t bits, uint32_t* shared, float* amax) {
  const uint32_t largest = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0) atomicMax(shared, largest);
  __syncthreads();
  if (threadIdx.x == 0) raise_amax(amax, *shared);
}

/// One factor of the whole tensor; 1 for the other formats.
__device__ __forceinline__ float tensor_factor(const QuantizePlan& plan) {
  if (plan.find_amax) return 1.0f;
  if (plan.format.scaling == Scaling::Delayed) return *plan.factor;
  if (plan.format.scaling != Scaling::Current) return 1.0f;
  return factor_of(__float_as_uint(*plan.amax),
                   plan.fit_to > 0 ? plan.fit_to : largest_of(plan.format.element),
                   plan.format.amax_epsilon, plan.format.power_of_2_scales);
}

/// By the first thread of a launch.
__device__ __forceinline__ void write_tensor_scale(const QuantizePlan& plan, float factor) {
  if (plan.format.scaling != Scaling::Delayed && plan.format.scaling != Scaling::Current) return;
  // Without elements there is a scale all the same.
  void* scale = plan.rowwise.scale != nullptr ? plan.rowwise.scale : plan.columnwise.scale;
  *static_cast<float*>(scale) = __fdiv_rn(1.0f, factor);
}

// ---- FP8

/// Elements along a block as a power of two, so that places in blocks are shifts; 0 with one factor
/// per tensor. Not for NV.
__device__ __forceinline__ int fp8_block_log(const Format& format) {
  return format.scaling == Scaling::Block ? 7 : format.scaling == Scaling::MX ? 5 : 0;
}

/// The factor of a block from its largest magnitude; its scale is stored where `to` >= 0.
__device__ __forceinline__ float fp8_factor(const Format& format, uint32_t largest, void* scale,
                                            int64_t to) {
  const float max = largest_of(format.element);
  if (format.scaling == Scaling::Block) {
    const float factor = factor_of(largest, max, format.amax_epsilon, format.power_of_2_scales);
    if (to >= 0) static_cast<float*>(scale)[to] = __fdiv_rn(1.0f, factor);
    return factor;
  }
  const BlockFactor made = mx_factor(largest, max);
  if (to >= 0) static_cast<uint8_t*>(scale)[to] = static_cast<uint8_t>(made.code);
  return made.factor;
}

/// Where a tile is in the matrix.
struct TilePlace {
  int64_t row, column;
};

/// Part `p` of line `i` of the tile, which is at [line, at] of the orientation's matrix. `square`:
/// which square block it is in. Whole warps call it together.
template <typename T>
__device__ __forceinline__ void write_fp8(const QuantizePlan& plan, const QuantizeOutput& out,
                                          const Part<T, kPart>& part, int i, int p, int64_t line,
                                          int64_t at, float factor, const uint32_t* square,
                                          uint32_t& amax) {
  const Format& format = plan.format;
  bool special;
  uint32_t largest = part_amax(part, special);
  amax = max(amax, largest);
  const bool inside = line < out.rows && at < out.columns;
  const int log = fp8_block_log(format);
  if (log != 0) {
    if (format.block_2d) {
      largest = *square;
    } else {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      if (log == 7) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 4));
      }
    }
    const int height = format.block_2d ? log : 0;
    const bool first =
        inside && (p * kPart & ((1 << log) - 1)) == 0 && (i & ((1 << height) - 1)) == 0;
    factor =
        fp8_factor(format, largest, out.scale,
                   first ? (line >> height) * out.scale_stride + (at >> log) * out.scale_step : -1);
  }
  uint32_t codes[kPart / 4];
  encode_part(part, factor, format.element, special, codes);
  if (!inside) return;
  uint8_t* to = out.data + line * out.stride + at;
  const int64_t count = out.columns - at;
  if (out.vectors && count >= kPart) {
    *reinterpret_cast<uint4*>(to) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kPart; ++j) {
    if (j < count) to[j] = static_cast<uint8_t>(codes[j / 4] >> (j % 4 * 8));
  }
}

/// Which square block a place in the tile is in; `log` as above.
__device__ __forceinline__ int square_at(int row, int column, int log) {
  return (row >> log << (7 - log)) + (column >> log);
}

/// Largest magnitudes of the tile's square blocks, without NaN.
template <typename T>
__device__ __forceinline__ void find_squares(uint32_t* tile, int log, uint32_t* squares) {
  const int p = threadIdx.x % kLineLanes;
  for (int i = threadIdx.x / kLineLanes; i < kTile; i += kLines) {
    bool special;
    const uint32_t largest = part_amax(row_part<T>(tile, i, p), special);
    atomicMax(squares + square_at(i, p * kPart, log), largest);
  }
}

/// All of a tile, or only its largest magnitude into `amax`. All threads call it, after a barrier.
template <typename T>
__device__ __forceinline__ void write_tile_fp8(const QuantizePlan& plan, uint32_t* tile,
                                               TilePlace place, float factor, TileShared& shared,
                                               uint32_t& amax) {
  const int p = threadIdx.x % kLineLanes, first = threadIdx.x / kLineLanes;
  if (plan.find_amax) {
    for (int i = first; i < kTile; i += kLines) {
      bool special;
      amax = max(amax, part_amax(row_part<T>(tile, i, p), special));
    }
    return;
  }
  const int log = plan.format.block_2d ? fp8_block_log(plan.format) : 7;
  if (plan.format.block_2d) {
    find_squares<T>(tile, log, shared.squares);
    __syncthreads();
  }
  if (plan.rowwise.data != nullptr) {
    for (int i = first; i < kTile; i += kLines) {
      write_fp8<T>(plan, plan.rowwise, row_part<T>(tile, i, p), i, p, place.row + i,
                   place.column + p * kPart, factor, shared.squares + square_at(i, p * kPart, log),
                   amax);
    }
  }
  if (plan.columnwise.data == nullptr) return;
  constexpr int kColumns = 4 / sizeof(T);
  for (int word = first; word < kRowWords<T>; word += kLines) {
    Part<T, kPart> parts[kColumns];
    column_parts<T>(tile, word, p, parts);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = word * kColumns + c;
      write_fp8<T>(plan, plan.columnwise, parts[c], i, p, place.column + i, place.row + p * kPart,
                   factor, shared.squares + square_at(p * kPart, i, log), amax);
    }
  }
}

__device__ __forceinline__ TilePlace tile_place(const QuantizePlan& plan) {
  return {static_cast<int64_t>(blockIdx.x / plan.tiles_across) * kTile,
          static_cast<int64_t>(blockIdx.x % plan.tiles_across) * kTile};
}

/// A source has: `Value`, the dtype values are rounded to; `kTiles`, how many tiles it fills at
/// once, which lie Source::apart(plan) columns from each other; `kResident`, how many blocks should
/// fit on a multiprocessor; `Arguments`; and fill().
template <typename Source>
__global__ void __launch_bounds__(kTileThreads, Source::kResident)
    quantize_tiles_fp8(const __grid_constant__ QuantizePlan plan,
                       const __grid_constant__ typename Source::Arguments source) {
  using T = typename Source::Value;
  extern __shared__ uint4 dynamic_memory[];
  __shared__ TileShared shared;
  uint32_t* tile = reinterpret_cast<uint32_t*>(dynamic_memory);
  if (threadIdx.x < 64) shared.squares[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.amax = 0;
  const TilePlace place = tile_place(plan);
  const float factor = tensor_factor(plan);
  Source::fill(source, plan, place, tile);
  __syncthreads();
  uint32_t amax = 0;
#pragma unroll 1
  for (int t = 0; t < Source::kTiles; ++t) {
    if (t > 0 && plan.format.block_2d) {
      __syncthreads();
      if (threadIdx.x < 64) shared.squares[threadIdx.x] = 0;
      __syncthreads();
    }
    write_tile_fp8<T>(plan, tile + t * (kTileBytes<T> / 4),
                      {place.row, place.column + t * Source::apart(plan)}, factor, shared, amax);
  }
  if (plan.amax != nullptr && (plan.find_amax || plan.format.scaling == Scaling::Delayed)) {
    raise_by_block(amax, &shared.amax, plan.amax);
  }
  if (!plan.find_amax && blockIdx.x == 0 && threadIdx.x == 0) write_tensor_scale(plan, factor);
}

// ---- Launch

constexpr int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

/// `columns`: those that tiles are counted along. `bytes`: of shared memory, the tiles' and more.
template <typename Kernel, typename Arguments>
void launch_tiles(Kernel kernel, QuantizePlan plan, const Arguments& source, int64_t columns,
                  int bytes, Stream stream) {
  const int64_t across = tiles_of(columns) > 0 ? tiles_of(columns) : 1;
  const int64_t count = tiles_of(plan.rows) * across;
  plan.tiles_across = static_cast<uint32_t>(across);
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
  kernel<<<static_cast<unsigned>(count > 0 ? count : 1), kTileThreads, bytes, stream>>>(plan,
                                                                                        source);
}

}  // namespace ligature::cuda
