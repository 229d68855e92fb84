// FP4 codes of a tile: to nearest, by chance, how far off they are, and how they are packed. See
// quantize_tile.h.
#include <algorithm>

#include "ligature/backend/cpu/cast.h"
#include "ligature/backend/cpu/float8.h"
#include "ligature/backend/cpu/philox.h"
#include "ligature/backend/cpu/quantize_tile.h"

namespace ligature::cpu {
namespace {

constexpr int64_t kBlock = 16;

template <typename T>
LIGATURE_INLINE void encode_run(const T* x, int64_t n, float factor, uint8_t* codes) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) codes[i] = encode_fp4(Cast<T, float>::apply(x[i]) * factor);
}

template <typename T>
LIGATURE_WIDE_SIMD void encode_blocks(const Tile<T>& x, int64_t group, const float* factors,
                                      Codes codes) {
  const int64_t whole = x.columns / kBlock, blocks = ceil_div(x.columns, kBlock);
  for (int64_t r = 0; r < x.rows; ++r) {
    const T* row = x.data + r * x.stride;
    const float* factor = factors + r / group * blocks;
    uint8_t* out = codes.data + r * codes.stride;
    for (int64_t b = 0; b < whole; ++b) {
      encode_run(row + b * kBlock, kBlock, factor[b], out + b * kBlock);
    }
    const int64_t done = whole * kBlock;
    if (done < x.columns) encode_run(row + done, x.columns - done, factor[whole], out + done);
  }
}

template <typename T>
LIGATURE_INLINE void encode_run(const T* x, int64_t n, float factor, const uint32_t* random,
                                uint8_t* codes) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = encode_fp4(Cast<T, float>::apply(x[i]) * factor, random[i]);
  }
}

template <typename T>
LIGATURE_WIDE_SIMD void encode_random(const T* x, int64_t n, const float* factors,
                                      const uint32_t* random, uint8_t* codes) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    encode_run(x + i, kBlock, factors[i / kBlock], random + i, codes + i);
  }
  if (i < n) encode_run(x + i, n - i, factors[i / kBlock], random + i, codes + i);
}

LIGATURE_WIDE_SIMD void philox_words(uint64_t seed, uint64_t first, uint32_t stream, int64_t n,
                                     uint32_t* words) {
  const uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t counter = first + static_cast<uint64_t>(i);
    const auto four =
        philox({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), stream, 0},
               key0, key1);
    words[4 * i] = four[0];
    words[4 * i + 1] = four[1];
    words[4 * i + 2] = four[2];
    words[4 * i + 3] = four[3];
  }
}

// The sum as a tree over 16 terms, of which those beyond n are 0.
template <typename T>
LIGATURE_INLINE float run_error(const T* x, const uint8_t* codes, int64_t n, float scale,
                                float upper, bool square) {
  float e[kBlock] = {};
  for (int64_t i = 0; i < n; ++i) {
    const float d = Cast<T, float>::apply(x[i]) - decode_fp4(codes[i]) * scale * upper;
    e[i] = square ? d * d : std::bit_cast<float>(std::bit_cast<int32_t>(d) & kMagnitude);
  }
  for (int64_t half = kBlock / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) e[i] += e[i + half];
  }
  return e[0];
}

template <typename T>
LIGATURE_WIDE_SIMD void row_errors(const T* x, int64_t n, const uint8_t* codes,
                                   const uint8_t* scales, float upper, bool square, float* errors) {
  const int64_t whole = n / kBlock;
  for (int64_t b = 0; b < whole; ++b) {
    const float scale = decode_fp8<Element::E4M3>(scales[b]);
    errors[b] += run_error(x + b * kBlock, codes + b * kBlock, kBlock, scale, upper, square);
  }
  if (whole * kBlock < n) {
    const float scale = decode_fp8<Element::E4M3>(scales[whole]);
    errors[whole] += run_error(x + whole * kBlock, codes + whole * kBlock, n - whole * kBlock,
                               scale, upper, square);
  }
}

LIGATURE_WIDE_SIMD void pack_row(const uint8_t* codes, int64_t n, uint8_t* packed) {
  for (int64_t i = 0; i < n / 2; ++i) {
    packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
  if (n % 2 != 0) packed[n / 2] = codes[n - 1];
}

LIGATURE_WIDE_SIMD void unpack_row(const uint8_t* packed, int64_t n, uint8_t* codes) {
  for (int64_t i = 0; i < n / 2; ++i) {
    codes[2 * i] = packed[i] & 0xf;
    codes[2 * i + 1] = packed[i] >> 4;
  }
  if (n % 2 != 0) codes[n - 1] = packed[n / 2] & 0xf;
}

}  // namespace

template <typename T>
void encode_tile_fp4(const Tile<T>& x, Blocks blocks, const float* factors, Codes codes) {
  encode_blocks(x, blocks.group, factors, codes);
}

const uint32_t* random_words(uint64_t seed, uint64_t offset, uint32_t stream, uint64_t index,
                             int64_t n, uint32_t* buffer) {
  const int64_t within = static_cast<int64_t>(index % 4);
  philox_words(seed, offset + index / 4, stream, ceil_div(within + n, 4), buffer);
  return buffer + within;
}

template <typename T>
void encode_row_fp4(const T* x, int64_t n, const float* factors, const uint32_t* random,
                    uint8_t* codes) {
  encode_random(x, n, factors, random, codes);
}

template <typename T>
void block_errors(const Tile<T>& x, Blocks blocks, Codes codes, const uint8_t* scales,
                  const float* upper, int64_t step, bool square, float* errors) {
  const int64_t across = blocks.across(x.columns);
  std::fill_n(errors, across * blocks.down(x.rows), 0.0f);
  for (int64_t r = 0; r < x.rows; ++r) {
    const int64_t group = r / blocks.group;
    row_errors(x.data + r * x.stride, x.columns, codes.data + r * codes.stride,
               scales + group * across, upper[group * step], square, errors + group * across);
  }
}

void pack_fp4(Codes codes, int64_t rows, int64_t columns, uint8_t* packed, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    pack_row(codes.data + r * codes.stride, columns, packed + r * stride);
  }
}

void unpack_fp4(const uint8_t* packed, int64_t stride, int64_t rows, int64_t columns, Codes codes) {
  for (int64_t r = 0; r < rows; ++r) {
    unpack_row(packed + r * stride, columns, codes.data + r * codes.stride);
  }
}

#define LIGATURE_INSTANTIATE(T)                                                                    \
  template void encode_tile_fp4(const Tile<T>&, Blocks, const float*, Codes);                      \
  template void encode_row_fp4(const T*, int64_t, const float*, const uint32_t*, uint8_t*);        \
  template void block_errors(const Tile<T>&, Blocks, Codes, const uint8_t*, const float*, int64_t, \
                             bool, float*);
LIGATURE_INSTANTIATE(float)
LIGATURE_INSTANTIATE(at::BFloat16)
LIGATURE_INSTANTIATE(at::Half)
#undef LIGATURE_INSTANTIATE

}  // namespace ligature::cpu
