// The loops of quantization over a tile, a piece of a matrix's rows, in steps: the largest
// magnitude of every block, the blocks' factors from them, and the codes. A block of `block`
// columns belongs to `group` rows at once where blocks are square; arrays over blocks hold, for
// each group of rows in turn, one entry per block along the columns.
#pragma once

#include <cstdint>

#include "ligature/format/format.h"

namespace ligature::cpu {

template <typename T>
struct Tile {
  const T* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
  /// How far on the values are that will be wanted next, or 0: they are fetched while these, which
  /// have been read before, are encoded. Else the memory would be idle meanwhile.
  int64_t ahead = 0;
};

struct Codes {
  uint8_t* data;
  int64_t stride;
  bool stream = false;  ///< written past the caches: see stream.h
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
// largest of all.
constexpr uint32_t kInfinityBits = 0x7f800000;

/// The largest magnitude. Without `keep_nan` NaNs do not count, else one makes it NaN, which is
/// faster.
template <typename T>
uint32_t tile_amax(const Tile<T>& x, bool keep_nan);

/// The same of every row, or of every column, without NaNs: raises `amax`.
template <typename T>
void row_amax(const Tile<T>& x, uint32_t* amax);
template <typename T>
void column_amax(const Tile<T>& x, uint32_t* amax);

/// Of every block.
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

/// FP8 codes. `held`: no value is NaN, or so large that the factor takes it beyond the largest.
template <typename T>
void encode_tile(const Tile<T>& x, Element element, Blocks blocks, const float* factors, bool held,
                 Codes codes);

/// FP4 codes, two to a byte.
template <typename T>
void encode_tile_fp4(const Tile<T>& x, Blocks blocks, const float* factors, Codes packed);

/// Which random numbers belong to a tile: element i of the matrix that the tile is a part of has
/// word i % 4 of the counter `offset` + i / 4.
struct Draws {
  uint64_t seed;
  uint64_t offset;
  uint32_t stream;
  int64_t first;   ///< index of the tile's first element
  int64_t stride;  ///< from a row to the next
};

/// FP4 codes, two to a byte, rounded up or down by chance.
template <typename T>
void encode_tile_fp4(const Tile<T>& x, Blocks blocks, const float* factors, const Draws& draws,
                     Codes packed);

/// How far FP4 codes are from the values, for every block. `upper` and `step` as above.
template <typename T>
void block_errors(const Tile<T>& x, Blocks blocks, Codes packed, const uint8_t* scales,
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

/// The same of codes, packed where `fp4`, in at most kTurned rows and columns. `scratch`: two tiles
/// of that size.
constexpr int64_t kTransposed = 128;
void transpose_codes(Codes codes, int64_t rows, int64_t columns, bool fp4, Codes out,
                     uint8_t* scratch);

void copy_codes(Codes from, int64_t rows, int64_t bytes, Codes to);

}  // namespace ligature::cpu
