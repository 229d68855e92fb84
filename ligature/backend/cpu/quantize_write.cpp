// The steps of quantize_tile.h put together, for each scaling.
#include "ligature/backend/cpu/quantize_write.h"

#include <algorithm>

namespace ligature::cpu {
namespace {

constexpr uint8_t kNaNScale = 0x7f;

// Where the second candidate is closer: its scale and its codes.
void take_better(TileScratch& s, Blocks blocks, int64_t rows, int64_t columns, int64_t stride) {
  const int64_t across = blocks.across(columns);
  for (int64_t i = 0; i < across * blocks.down(rows); ++i) {
    if (!(s.errors[1][i] < s.errors[0][i])) continue;
    s.scale_codes[0][i] = s.scale_codes[1][i];
    const int64_t column = i % across * blocks.size, row = i / across * blocks.group;
    const int64_t n = std::min(blocks.size, columns - column);
    for (int64_t r = row; r < std::min(row + blocks.group, rows); ++r) {
      std::copy_n(s.codes[1] + r * stride + column, n, s.codes[0] + r * stride + column);
    }
  }
}

void clear_nan_blocks(TileScratch& s, Blocks blocks, int64_t rows, int64_t columns,
                      int64_t stride) {
  const int64_t across = blocks.across(columns), count = across * blocks.down(rows);
  for (int64_t i = 0; i < count; ++i) {
    if (s.scale_codes[0][i] != kNaNScale) continue;
    const int64_t column = i % across * blocks.size, row = i / across * blocks.group;
    const int64_t n = std::min(blocks.size, columns - column);
    for (int64_t r = row; r < std::min(row + blocks.group, rows); ++r) {
      std::fill_n(s.codes[0] + r * stride + column, n, uint8_t{0});
    }
  }
}

}  // namespace

TileWriter::TileWriter(const QuantizeArgs& args, const QuantizedMatrix& out, int64_t columns,
                       uint32_t stream)
    : args_(&args),
      blocks_{args.format.block_size(), args.format.block_2d ? args.format.block_size() : 1},
      data_(out.data.mutable_data_ptr<uint8_t>()),
      stride_(out.data.size(1)),
      scale_(out.scale.mutable_data_ptr()),
      scale_stride_(out.scale.size(-1)),
      columns_(columns),
      stream_(stream) {}

template <typename S>
void TileWriter::copy_scales(const S* scales, int64_t row, int64_t column, int64_t down,
                             int64_t across) const {
  S* out = static_cast<S*>(scale_) + row / blocks_.group * scale_stride_ + column / blocks_.size;
  for (int64_t i = 0; i < down; ++i) {
    std::copy_n(scales + i * across, across, out + i * scale_stride_);
  }
}

template <typename T>
void TileWriter::encode_nv(const Tile<T>& x, int64_t row, int64_t column, const float* factors,
                           Codes codes, uint32_t* random) const {
  if (!args_->format.stochastic_rounding) return encode_tile_fp4(x, blocks_, factors, codes);
  const int64_t across = blocks_.across(x.columns);
  for (int64_t r = 0; r < x.rows; ++r) {
    const uint64_t index = static_cast<uint64_t>((row + r) * columns_ + column);
    const uint32_t* words =
        random_words(args_->seed, args_->offset, stream_, index, x.columns, random);
    encode_row_fp4(x.data + r * x.stride, x.columns, factors + r / blocks_.group * across, words,
                   codes.data + r * codes.stride);
  }
}

template <typename T>
void TileWriter::write_nv(const Tile<T>& x, int64_t row, int64_t column, TileScratch& s) const {
  const FourOverSix choice = args_->format.four_over_six;
  const int64_t across = blocks_.across(x.columns), down = blocks_.down(x.rows);
  const float* upper = upper_ + row / blocks_.group * step_;
  block_amax(x, blocks_, true, s.amax);
  const int candidates = choice == FourOverSix::None ? 1 : 2;
  for (int i = 0; i < candidates; ++i) {
    const Codes codes{s.codes[i], x.columns};
    nv_factors(s.amax, down, across, upper, step_, i == 0 ? 6.0f : 4.0f, s.factors[i],
               s.scale_codes[i]);
    encode_nv(x, row, column, s.factors[i], codes, s.random);
    if (candidates == 2) {
      block_errors(x, blocks_, codes, s.scale_codes[i], upper, step_,
                   choice == FourOverSix::MeanSquare, s.errors[i]);
    }
  }
  if (candidates == 2) take_better(s, blocks_, x.rows, x.columns, x.columns);
  clear_nan_blocks(s, blocks_, x.rows, x.columns, x.columns);
  copy_scales(s.scale_codes[0], row, column, down, across);
  pack_fp4({s.codes[0], x.columns}, x.rows, x.columns, data_ + row * stride_ + column / 2, stride_);
}

template <typename T>
void TileWriter::write(const Tile<T>& x, int64_t row, int64_t column, TileScratch& s) const {
  const Format& format = args_->format;
  if (format.scaling == Scaling::NV) return write_nv(x, row, column, s);
  const Codes codes{data_ + row * stride_ + column, stride_};
  if (format.per_tensor()) {
    return encode_tile(x, format.element, {0, x.rows}, upper_, codes);
  }
  const int64_t across = blocks_.across(x.columns), down = blocks_.down(x.rows);
  block_amax(x, blocks_, false, s.amax);
  if (format.scaling == Scaling::Block) {
    block_factors(s.amax, across * down, format, s.factors[0], s.scales);
    copy_scales(s.scales, row, column, down, across);
  } else {
    mx_factors(s.amax, across * down, format.element, s.factors[0], s.scale_codes[0]);
    copy_scales(s.scale_codes[0], row, column, down, across);
  }
  encode_tile(x, format.element, blocks_, s.factors[0], codes);
}

template void TileWriter::write(const Tile<float>&, int64_t, int64_t, TileScratch&) const;
template void TileWriter::write(const Tile<at::BFloat16>&, int64_t, int64_t, TileScratch&) const;
template void TileWriter::write(const Tile<at::Half>&, int64_t, int64_t, TileScratch&) const;

}  // namespace ligature::cpu
