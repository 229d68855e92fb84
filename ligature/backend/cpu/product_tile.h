// The inner parts of the CPU's own matrix products, in AVX-512. Everything is done in units of 32
// bits, a float or two bfloat16 that follow each other along k, so that both types share one way of
// packing and one loop.
#pragma once

#include <cstdint>

namespace ligature::cpu {

constexpr int64_t kTileRows = 14;     ///< 28 sums, 2 vectors of the right and 1 of the left operand
constexpr int64_t kTileColumns = 32;  ///< two vectors
constexpr int kLanes = 16;            ///< units of a vector

inline uint32_t first_bits(int64_t n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

/// Does this processor have what float, or bfloat16, needs?
bool has_product_tiles(bool bfloat16);
/// Are products made of them known to be faster on it than those of the libraries?
bool gains_by_product_tiles();

/// A matrix [rows, k]; one of its strides is 1. The right operand's rows are the result's columns.
struct ProductSide {
  const void* data = nullptr;
  int64_t row_stride = 1;
  int64_t k_stride = 1;
  bool bfloat16 = false;
  /// Where it is not null, the matrix is gathered as it is packed: row i, or with `gathers_k` the
  /// i-th along k, is the one with this number. The other stride is then 1.
  const int32_t* index = nullptr;
  bool gathers_k = false;

  int64_t units(int64_t k) const { return bfloat16 ? (k + 1) / 2 : k; }
  bool follows_k() const { return k_stride == 1 && !gathers_k; }
};

/// Rows in parts of nearly the same size, at most `most`.
struct Parts {
  Parts(int64_t rows_, int64_t most) : rows(rows_), count((rows_ + most - 1) / most) {}
  int64_t begin(int64_t i) const { return i * rows / count; }
  int64_t size(int64_t i) const { return begin(i + 1) - begin(i); }

  int64_t rows;
  int64_t count;
};

/// Units that a packed row of the left operand takes.
inline int64_t padded(int64_t units) { return (units + 15) / 16 * 16; }

/// Parts [begin, end) of the left operand's rows from `first` on, each as [units / 16, rows, 16],
/// at the place in `to` that belongs to its rows.
void pack_left(const ProductSide& side, int64_t first, const Parts& parts, int64_t begin,
               int64_t end, int64_t k, uint32_t* to);
/// Rows of the right operand, at most kTileColumns, as [units, 16 or 32].
void pack_right(const ProductSide& side, int64_t first, int64_t rows, int64_t k, uint32_t* to);
/// Only units [unit, unit + units), of which the first is a multiple of 16; the same ones of the
/// next columns follow.
void pack_right_part(const ProductSide& side, int64_t first, int64_t rows, int64_t k, int64_t unit,
                     int64_t units, uint32_t* to);

/// A matrix of floats or of bfloat16, whose columns follow each other.
struct ProductMatrix {
  void* data = nullptr;
  int64_t stride = 0;
  bool bfloat16 = false;
};

/// out = alpha * left right^T + row_scale * bias + add, all in float, rounded once. `add` may be
/// `out`.
struct ProductTerms {
  ProductMatrix out;
  ProductMatrix add;   ///< its data may be null
  ProductMatrix bias;  ///< one row; likewise
  float alpha = 1.0f;
  const float* row_scale = nullptr;  ///< by which the bias is multiplied in each row; likewise
  /// Whole tiles are written past the caches: `out`'s rows begin at lines of the cache.
  bool streams = false;
};

/// Sums over k of a tile, or of a part of k that follows another one, in rows of floats.
struct TileSums {
  float* data;
  int64_t stride;  ///< at least `columns`, rounded up to whole vectors
};

/// rows <= kTileRows, columns <= kTileColumns. `more`: added to what is in `sums`.
void sum_tile(const uint32_t* left, const uint32_t* right, int64_t rows, int64_t columns,
              int64_t units, bool bfloat16, const TileSums& sums, bool more);
/// What is made of all sums, at [row, column] of the result.
void write_tile(const TileSums& sums, int64_t rows, int64_t columns, const ProductTerms& terms,
                int64_t row, int64_t column);
/// Both.
void multiply_tile(const uint32_t* left, const uint32_t* right, int64_t rows, int64_t columns,
                   int64_t units, bool bfloat16, const ProductTerms& terms, int64_t row,
                   int64_t column);

}  // namespace ligature::cpu
