// Quantizes a tile into its place in one orientation of a result. The tile starts at a border of
// blocks in both directions and, except at the matrix's end, ends at one.
#pragma once

#include "ligature/backend/cpu/quantize_tile.h"
#include "ligature/kernels/quantized_shapes.h"

namespace ligature::cpu {

using kernels::QuantizeArgs;
using kernels::QuantizedMatrix;

/// The most a tile may hold where its blocks are one row high; where they are square, the most
/// columns of a tile that is one block high.
constexpr int64_t kTileElements = 16 * 1024;
constexpr int64_t kSquareTileColumns = 1024;
/// Which makes so many blocks and bytes of FP4 codes.
constexpr int64_t kTileBlocks = kTileElements / 16;
constexpr int64_t kTileBytes = kTileElements / 2;

struct TileScratch {
  uint32_t amax[kTileBlocks];
  float factors[kTileBlocks];
  float scales[kTileBlocks];
  uint8_t scale_codes[2][kTileBlocks];
  float errors[2][kTileBlocks];
  uint8_t codes[kTileBytes];
};

class TileWriter {
 public:
  TileWriter() = default;
  /// `columns`: of the logical matrix. `stream`: which random numbers are this orientation's.
  TileWriter(const QuantizeArgs& args, const QuantizedMatrix& out, int64_t columns,
             uint32_t stream);

  /// Per tensor: one factor for everything. NV: the upper factors, `step` apart from row to row.
  void set_factors(const float* factors, int64_t step) {
    upper_ = factors;
    step_ = step;
  }

  /// Rows and columns of a block; per tensor 0 columns.
  Blocks blocks() const { return blocks_; }

  /// Where the code of an element goes.
  Codes codes_at(int64_t row, int64_t column) const {
    return {data_ + row * stride_ + column / per_byte_, stride_, streams_};
  }
  /// Elements to a byte of codes.
  int64_t per_byte() const { return per_byte_; }

  /// Asks for the memory that the codes of a tile will go to, unless it is not read first.
  void fetch(int64_t row, int64_t column, int64_t rows, int64_t columns) const;

  /// `held`: see encode_tile; of use where there is one factor per tensor. `codes`: where they go,
  /// codes_at(row, column) or memory that they are taken there from.
  template <typename T>
  void write(const Tile<T>& x, int64_t row, int64_t column, bool held, Codes codes,
             TileScratch& s) const;

 private:
  template <typename T>
  void write_nv(const Tile<T>& x, int64_t row, int64_t column, Codes codes, TileScratch& s) const;
  template <typename T>
  void encode_nv(const Tile<T>& x, int64_t row, int64_t column, const float* factors,
                 Codes packed) const;
  template <typename S>
  void copy_scales(const S* scales, int64_t row, int64_t column, int64_t down,
                   int64_t across) const;

  const QuantizeArgs* args_ = nullptr;
  Blocks blocks_{0, 1};
  uint8_t* data_ = nullptr;
  int64_t stride_ = 0;
  int64_t per_byte_ = 1;
  bool streams_ = false;
  void* scale_ = nullptr;
  int64_t scale_stride_ = 0;
  int64_t columns_ = 0;
  uint32_t stream_ = 0;
  const float* upper_ = nullptr;
  int64_t step_ = 0;
};

}  // namespace ligature::cpu
