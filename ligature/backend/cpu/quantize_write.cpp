// The steps of quantize_tile.h put together, for each scaling.
#include "ligature/backend/cpu/quantize_write.h"

#include <algorithm>

#include "ligature/backend/cpu/stream.h"

namespace ligature::cpu {
namespace {

constexpr uint8_t kNaNScale = 0x7f;

// Calls f(first_row, end_row, first_byte, bytes) with where block i has its FP4 codes in a tile.
template <typename F>
void block_bytes(int64_t i, Blocks blocks, int64_t rows, int64_t columns, const F& f) {
  const int64_t across = blocks.across(columns);
  const int64_t column = i % across * blocks.size, row = i / across * blocks.group;
  f(row, std::min(row + blocks.group, rows), column / 2,
    (std::min(blocks.size, columns - column) + 1) / 2);
}

// Where the second candidate is closer: its scale and its codes.
void take_better(TileScratch& s, Blocks blocks, int64_t rows, int64_t columns, Codes first,
                 Codes second) {
  for (int64_t i = 0; i < blocks.across(columns) * blocks.down(rows); ++i) {
    if (!(s.errors[1][i] < s.errors[0][i])) continue;
    s.scale_codes[0][i] = s.scale_codes[1][i];
    block_bytes(i, blocks, rows, columns, [&](int64_t r, int64_t end, int64_t byte, int64_t n) {
      for (; r < end; ++r) {
        std::copy_n(second.data + r * second.stride + byte, n,
                    first.data + r * first.stride + byte);
      }
    });
  }
}

void clear_nan_blocks(const uint8_t* scales, Blocks blocks, int64_t rows, int64_t columns,
                      Codes codes) {
  const int64_t count = blocks.across(columns) * blocks.down(rows);
  for (const uint8_t* s = scales; (s = std::find(s, scales + count, kNaNScale)) < scales + count;
       ++s) {
    block_bytes(s - scales, blocks, rows, columns,
                [&](int64_t r, int64_t end, int64_t byte, int64_t n) {
                  for (; r < end; ++r) std::fill_n(codes.data + r * codes.stride + byte, n, 0);
                });
  }
}

}  // namespace

TileWriter::TileWriter(const QuantizeArgs& args, const QuantizedMatrix& out, int64_t columns,
                       uint32_t stream)
    : args_(&args),
      blocks_{args.format.block_size(), args.format.block_2d ? args.format.block_size() : 1},
      data_(out.data.mutable_data_ptr<uint8_t>()),
      stride_(out.data.size(1)),
      per_byte_(args.format.element == Element::E2M1 ? 2 : 1),
      streams_(per_byte_ == 1 && out.data.numel() >= kStreamBytes),
      scale_(out.scale.mutable_data_ptr()),
      scale_stride_(out.scale.size(-1)),
      columns_(columns),
      stream_(stream) {}

void TileWriter::fetch(int64_t row, int64_t column, int64_t rows, int64_t columns) const {
  if (streams_) return;
  constexpr int64_t line = 64;
  const Codes codes = codes_at(row, column);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns / per_byte_; i += line) {
      __builtin_prefetch(codes.data + r * codes.stride + i, 1);
    }
  }
}

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
                           Codes packed) const {
  if (!args_->format.stochastic_rounding) return encode_tile_fp4(x, blocks_, factors, packed);
  const Draws draws{args_->seed, args_->offset, stream_, row * columns_ + column, columns_};
  encode_tile_fp4(x, blocks_, factors, draws, packed);
}

template <typename T>
void TileWriter::write_nv(const Tile<T>& x, int64_t row, int64_t column, Codes codes,
                          TileScratch& s) const {
  const FourOverSix choice = args_->format.four_over_six;
  const bool square = choice == FourOverSix::MeanSquare;
  const int64_t across = blocks_.across(x.columns), down = blocks_.down(x.rows);
  const float* upper = upper_ + row / blocks_.group * step_;
  block_amax(x, blocks_, true, s.amax);
  nv_factors(s.amax, down, across, upper, step_, 6.0f, s.factors, s.scale_codes[0]);
  encode_nv(x, row, column, s.factors, codes);
  if (choice != FourOverSix::None) {
    const Codes other{s.codes, ceil_div(x.columns, 2)};
    block_errors(x, blocks_, codes, s.scale_codes[0], upper, step_, square, s.errors[0]);
    nv_factors(s.amax, down, across, upper, step_, 4.0f, s.factors, s.scale_codes[1]);
    encode_nv(x, row, column, s.factors, other);
    block_errors(x, blocks_, other, s.scale_codes[1], upper, step_, square, s.errors[1]);
    take_better(s, blocks_, x.rows, x.columns, codes, other);
  }
  clear_nan_blocks(s.scale_codes[0], blocks_, x.rows, x.columns, codes);
  copy_scales(s.scale_codes[0], row, column, down, across);
}

template <typename T>
void TileWriter::write(const Tile<T>& x, int64_t row, int64_t column, bool held, Codes codes,
                       TileScratch& s) const {
  const Format& format = args_->format;
  if (format.scaling == Scaling::NV) return write_nv(x, row, column, codes, s);
  if (format.per_tensor()) {
    return encode_tile(x, format.element, {0, x.rows}, upper_, held, codes);
  }
  const int64_t across = blocks_.across(x.columns), down = blocks_.down(x.rows);
  block_amax(x, blocks_, true, s.amax);
  // A block's factor holds all of it, unless some of it is infinite or NaN.
  held = *std::max_element(s.amax, s.amax + across * down) < kInfinityBits;
  if (!held) block_amax(x, blocks_, false, s.amax);
  if (format.scaling == Scaling::Block) {
    block_factors(s.amax, across * down, format, s.factors, s.scales);
    copy_scales(s.scales, row, column, down, across);
  } else {
    mx_factors(s.amax, across * down, format.element, s.factors, s.scale_codes[0]);
    copy_scales(s.scale_codes[0], row, column, down, across);
  }
  encode_tile(x, format.element, blocks_, s.factors, held, codes);
}

#define LIGATURE_INSTANTIATE(T)                                                                \
  template void TileWriter::write(const Tile<T>&, int64_t, int64_t, bool, Codes, TileScratch&) \
      const;
LIGATURE_INSTANTIATE(float)
LIGATURE_INSTANTIATE(at::BFloat16)
LIGATURE_INSTANTIATE(at::Half)
#undef LIGATURE_INSTANTIATE

}  // namespace ligature::cpu
