// The loops of quantization over a tile, a piece of a matrix's rows, in steps: the largest
// magnitude of every block, the blocks' factors from them, and the codes. A block of `block`
// columns belongs to `group` rows at once where blocks are square; arrays over blocks hold, for
// each group of rows in turn, one entry per block along the columns.
#pragma once

#include <cstdint>

#include "ligature/quantization/format.h"

namespace ligature::cpu {

template <typename T>
struct Tile {
  const T* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
};

struct Codes {
  uint8_t* data;
  int64_t stride;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// How a tile is cut into blocks.
struct Blocks {
  int64_t size;   ///< columns of a block
  int64_t group;  ///< rows of a block

  int64_t across(int64_t columns) const { return ceil_div(columns, size); }
  int64_t down(int64_t rows) const { return ceil_div(rows, group); }
};

// Magnitudes are handed on as the bits of a float: they compare like the numbers, and NaN as the
// largest.

/// The largest magnitude; NaNs do not count.
template <typename T>
uint32_t tile_amax(const Tile<T>& x);

/// The same of every row, or of every column: raises `amax`.
template <typename T>
void row_amax(const Tile<T>& x, uint32_t* amax);
template <typename T>
void column_amax(const Tile<T>& x, uint32_t* amax);

/// Of every block. With `keep_nan` a block with a NaN has NaN.
template <typename T>
void block_amax(const Tile<T>& x, Blocks blocks, bool keep_nan, uint32_t* amax);

/// Block: what values are multiplied by, and the inverse to be stored.
void block_factors(const uint32_t* amax, int64_t n, const Format& format, float* factors,
                   float* scales);

/// MX: the same with E8M0 scales.
void mx_factors(const uint32_t* amax, int64_t n, Element element, float* factors, uint8_t* scales);

/// NV: the same with E4M3 scales below the upper factor of each of `rows` groups of `n` blocks,
/// that is `upper[row * step]`. A block's largest magnitude becomes `top`, 6 or 4.
void nv_factors(const uint32_t* amax, int64_t rows, int64_t n, const float* upper, int64_t step,
                float top, float* factors, uint8_t* scales);

template <typename T>
void encode_tile(const Tile<T>& x, Element element, Blocks blocks, const float* factors,
                 Codes codes);

/// FP4 codes, one to a byte.
template <typename T>
void encode_tile_fp4(const Tile<T>& x, Blocks blocks, const float* factors, Codes codes);

/// The random words of the elements from `index` on. They are within `buffer`, of n + 6 words.
const uint32_t* random_words(uint64_t seed, uint64_t offset, uint32_t stream, uint64_t index,
                             int64_t n, uint32_t* buffer);

/// FP4 codes of one row, rounded up or down by chance.
template <typename T>
void encode_row_fp4(const T* x, int64_t n, const float* factors, const uint32_t* random,
                    uint8_t* codes);

/// How far FP4 codes are from the values, for every block. `upper` as above.
template <typename T>
void block_errors(const Tile<T>& x, Blocks blocks, Codes codes, const uint8_t* scales,
                  const float* upper, int64_t step, bool square, float* errors);

/// Two codes to a byte; and back.
void pack_fp4(Codes codes, int64_t rows, int64_t columns, uint8_t* packed, int64_t stride);
void unpack_fp4(const uint8_t* packed, int64_t stride, int64_t rows, int64_t columns, Codes codes);

/// Each group of 16 rows times the signed Hadamard matrix / 4, or its inverse, in float. Rows that
/// x has not are zeros: `out` gets a multiple of 16 rows.
template <typename T>
void hadamard_columns(const Tile<T>& x, bool inverse, float* out, int64_t stride);

/// out[column][row] = x[row][column].
template <typename T>
void transpose_tile(const Tile<T>& x, T* out, int64_t stride);

}  // namespace ligature::cpu
