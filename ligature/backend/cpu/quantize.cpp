// Quantization of a matrix: cut into units of rows and columns that threads share, each unit taken
// row-wise from where it lies, and column-wise in tiles turned on their side.
#include "ligature/backend/cpu/quantize.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <cfloat>
#include <cmath>

#include "ligature/backend/cpu/float8.h"
#include "ligature/backend/cpu/quantize_write.h"
#include "ligature/backend/cpu/row_chunks.h"
#include "ligature/backend/cpu/stream.h"

namespace ligature::cpu {
namespace {

// Columns of the tiles that are turned on their side, and of the units that threads take.
constexpr int64_t kTransposedColumns = 64;
constexpr int64_t kUnitColumns = 512;
constexpr int64_t kUnitRows = 16;

void raise(uint32_t& amax, uint32_t value) {
  std::atomic_ref<uint32_t> shared(amax);
  uint32_t before = shared.load(std::memory_order_relaxed);
  while (before < value && !shared.compare_exchange_weak(before, value)) {
  }
}

// Only where some value is no number.
template <typename T>
uint32_t finite_amax(const Tile<T>& tile) {
  uint32_t largest = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const T* row = tile.data + r * tile.stride;
    for (int64_t c = 0; c < tile.columns; ++c) {
      const uint32_t bits = std::bit_cast<uint32_t>(std::fabs(static_cast<float>(row[c])));
      if (bits < kInfinityBits) largest = std::max(largest, bits);
    }
  }
  return largest;
}

// Rows [first_row, end_row) and columns [first_column, end_column) of the matrix.
struct Range {
  int64_t first_row, end_row, first_column, end_column;

  int64_t rows() const { return end_row - first_row; }
  int64_t columns() const { return end_column - first_column; }
};

// The matrix as a grid of units, walked down a column of units before the next.
struct Grid {
  int64_t rows, columns, unit_rows, unit_columns, down, count;

  Grid(int64_t rows_, int64_t columns_, int64_t unit_rows_, int64_t unit_columns_)
      : rows(rows_),
        columns(columns_),
        unit_rows(unit_rows_),
        unit_columns(unit_columns_),
        down(ceil_div(rows, unit_rows)),
        count(down * ceil_div(columns, unit_columns)) {}

  Range unit(int64_t i) const {
    const int64_t row = i % down * unit_rows, column = i / down * unit_columns;
    return {row, std::min(row + unit_rows, rows), column, std::min(column + unit_columns, columns)};
  }
};

template <typename T>
class Quantization {
 public:
  Quantization(RowSource& source, const QuantizeArgs& args)
      : source_(source),
        args_(args),
        format_(args.format),
        result_(shapes::empty_pair({source.rows, source.columns}, args, at::kCPU)) {
    if (args.rowwise) rowwise_ = TileWriter(args, result_.rowwise, source.columns, 0);
    if (args.columnwise) {
      const int64_t columns = format_.hadamard ? ceil_div(source.rows, 16) * 16 : source.rows;
      columnwise_ = TileWriter(args, result_.columnwise, columns, 1);
    }
  }

  QuantizedPair run() {
    if (needs_amax_first(args_)) {
      prepare_amax();
      walk(false, args_.columnwise && (format_.hadamard || format_.row_scaled),
           [&](const T* x, int64_t stride, const Range& range, Scratch& s) {
             find_amax(x, stride, range, s);
           });
      use_amax();
    } else if (format_.scaling == Scaling::Delayed) {
      use_factor(args_.scale.const_data_ptr<float>()[0]);
    }
    walk(needs_amax_first(args_), args_.columnwise,
         [&](const T* x, int64_t stride, const Range& range, Scratch& s) {
           write(x, stride, range, s);
         });
    if (format_.scaling == Scaling::Delayed && args_.amax.defined()) {
      float* amax = args_.amax.mutable_data_ptr<float>();
      amax[0] = std::max(amax[0], std::bit_cast<float>(amax_));
    }
    if (turn_codes_ && !format_.per_tensor()) turn_scales();
    return std::move(result_);
  }

 private:
  struct Scratch {
    TileScratch tile;
    // Of the ways to column-wise data, a quantization takes one.
    union {
      T transposed[kTransposed * kTransposed];
      uint8_t codes[2 * kTransposed * kTransposed];
      struct {
        float values[kTransposed * kTransposedColumns];
        float transposed[kTransposed * kTransposedColumns];
      } transformed;
      uint32_t column_amax[kUnitColumns];
    };
    std::unique_ptr<T[]> staged;
    std::unique_ptr<uint8_t[]> row_codes;  // of a unit, before they are turned and taken to memory
    const T* next = nullptr;               // where the rows of the next unit begin

    Scratch() {}
  };

  // Calls f(values, stride, range, scratch) for all of the matrix, in parallel. Units are as wide
  // as the matrix, so that memory is read from end to end, unless that leaves a thread idle or f
  // works along columns: then a unit is what fits into a cache.
  template <typename F>
  void walk(bool again, bool along_columns, const F& f) const {
    const int64_t columns = source_.columns, unit_rows = rows_of_unit(along_columns);
    if (!source_.stored) return walk_computed(again, along_columns, unit_rows, f);
    const bool narrow = along_columns || source_.rows < unit_rows * at::get_num_threads();
    const Grid grid(source_.rows, columns, unit_rows,
                    narrow ? kUnitColumns : std::max<int64_t>(columns, 1));
    const int64_t unit = unit_rows * std::min(columns, grid.unit_columns);
    at::parallel_for(0, grid.count, grain(unit), [&](int64_t first, int64_t last) {
      const auto scratch = std::unique_ptr<Scratch>(new Scratch);
      const T* x = static_cast<const T*>(source_.values);
      for (int64_t i = first; i < last; ++i) {
        const Range range = grid.unit(i);
        const bool more = i + 1 < last && grid.unit(i + 1).first_column == range.first_column;
        scratch->next = more ? x + range.end_row * columns + range.first_column : nullptr;
        walk_range(x + range.first_row * columns, range, along_columns, *scratch, f);
      }
      stream_end();
    });
  }

  template <typename F>
  void walk_computed(bool again, bool along_columns, int64_t unit_rows, const F& f) const {
    const int64_t columns = source_.columns, units = ceil_div(source_.rows, unit_rows);
    at::parallel_for(0, units, grain(unit_rows * columns), [&](int64_t first, int64_t last) {
      const auto scratch = std::unique_ptr<Scratch>(new Scratch);
      const auto slab = make_buffer<T>(unit_rows * columns);
      const int64_t end = std::min(last * unit_rows, source_.rows);
      const auto rows = source_.walk(first * unit_rows, end, again);
      for (int64_t row = first * unit_rows; row < end; row += unit_rows) {
        const Range range{row, std::min(row + unit_rows, end), 0, columns};
        rows->next(range.end_row, slab.get());
        walk_range(slab.get(), range, along_columns, *scratch, f);
      }
      rows->finish();
      stream_end();
    });
  }

  // x: where the range's rows begin. Along columns, rows that are far apart are first copied
  // together: they are often a power of two apart, and would push each other out of the cache.
  template <typename F>
  void walk_range(const T* x, Range range, bool along_columns, Scratch& s, const F& f) const {
    const int64_t columns = source_.columns, end = range.end_column;
    const int64_t width = along_columns ? kUnitColumns : kTileElements;
    const bool stage = along_columns && columns > kUnitColumns;
    if (stage && s.staged == nullptr) s.staged = make_buffer<T>(kTransposed * kUnitColumns);
    for (; range.first_column < end; range.first_column += width) {
      range.end_column = std::min(range.first_column + width, end);
      if (!stage) {
        f(x + range.first_column, columns, range, s);
        continue;
      }
      for (int64_t r = 0; r < range.rows(); ++r) {
        std::copy_n(x + r * columns + range.first_column, range.columns(),
                    s.staged.get() + r * kUnitColumns);
      }
      f(s.staged.get(), kUnitColumns, range, s);
    }
  }

  // A whole number of blocks in either orientation: for column-wise data enough to fill cache lines
  // with, unless threads would be idle.
  int64_t rows_of_unit(bool along_columns) const {
    int64_t rows = std::max(kUnitRows, format_.block_2d ? format_.block_size() : 1);
    if (!along_columns) return rows;
    rows = std::max(rows, format_.block_size());
    while (rows < kTransposed && source_.rows > rows * at::get_num_threads()) rows *= 2;
    return rows;
  }

  static int64_t grain(int64_t unit) {
    return ceil_div(kChunkElements, std::max<int64_t>(unit, 1));
  }

  bool plain_amax() const { return args_.rowwise || (args_.columnwise && !format_.hadamard); }

  void prepare_amax() {
    if (!format_.row_scaled) return;
    if (args_.rowwise) row_amax_.assign(source_.rows, 0);
    if (args_.columnwise) column_amax_.assign(source_.columns, 0);
  }

  void find_amax(const T* x, int64_t stride, const Range& range, Scratch& s) {
    const Tile<T> tile{x, stride, range.rows(), range.columns()};
    if (format_.row_scaled && args_.rowwise) {
      uint32_t largest[kTransposed] = {};
      row_amax(tile, largest);
      for (int64_t r = 0; r < tile.rows; ++r) raise(row_amax_[range.first_row + r], largest[r]);
    }
    if (format_.row_scaled && args_.columnwise && !format_.hadamard) {
      uint32_t* largest = s.column_amax;
      std::fill_n(largest, tile.columns, 0);
      column_amax(tile, largest);
      for (int64_t c = 0; c < tile.columns; ++c) {
        raise(column_amax_[range.first_column + c], largest[c]);
      }
    }
    if (!format_.row_scaled && plain_amax()) {
      uint32_t largest = tile_amax(tile, true);
      if (largest >= kInfinityBits) {
        raise(special_, 1);
        largest = args_.fit_to > 0 ? finite_amax(tile) : tile_amax(tile, false);
      }
      raise(amax_, largest);
    }
    if (args_.columnwise && format_.hadamard) find_transformed_amax(tile, range, s);
  }

  void find_transformed_amax(const Tile<T>& tile, const Range& range, Scratch& s) {
    for (int64_t c = 0; c < tile.columns; c += kTransposedColumns) {
      const int64_t n = std::min(kTransposedColumns, tile.columns - c);
      hadamard_columns(Tile<T>{tile.data + c, tile.stride, tile.rows, n}, false,
                       s.transformed.values, kTransposedColumns);
      const Tile<float> transformed{s.transformed.values, kTransposedColumns,
                                    ceil_div(tile.rows, 16) * 16, n};
      if (!format_.row_scaled) {
        raise(transformed_amax_, tile_amax(transformed, false));
        continue;
      }
      uint32_t largest[kTransposedColumns] = {};
      column_amax(transformed, largest);
      for (int64_t i = 0; i < n; ++i) raise(column_amax_[range.first_column + c + i], largest[i]);
    }
  }

  // Shares what was found with other processes, and sets the factors that it gives.
  void use_amax() {
    if (format_.per_tensor()) {
      float amax = std::bit_cast<float>(amax_);
      if (args_.reduce_amax) {
        Tensor shared = at::empty({1}, at::kFloat);
        shared.mutable_data_ptr<float>()[0] = amax;
        args_.reduce_amax(shared);
        amax = shared.const_data_ptr<float>()[0];
      }
      held_ = special_ == 0 && amax >= std::bit_cast<float>(amax_);
      return use_factor(factor_of(amax,
                                  args_.fit_to > 0 ? args_.fit_to : max_value(format_.element),
                                  format_.amax_epsilon, format_.power_of_2_scales));
    }
    const bool shared =
        args_.rowwise && args_.columnwise && !format_.hadamard && !format_.row_scaled;
    if (args_.rowwise) {
      use_upper(rowwise_, result_.rowwise.amax, format_.row_scaled ? row_amax_.data() : &amax_,
                row_upper_);
    }
    if (shared) return columnwise_.set_factors(row_upper_.data(), 0);
    if (args_.columnwise) {
      use_upper(columnwise_, result_.columnwise.amax,
                format_.row_scaled ? column_amax_.data()
                : format_.hadamard ? &transformed_amax_
                                   : &amax_,
                column_upper_);
    }
  }

  void use_factor(float factor) {
    factor_ = factor;
    const QuantizedMatrix& any = args_.rowwise ? result_.rowwise : result_.columnwise;
    any.scale.mutable_data_ptr<float>()[0] = 1.0f / factor;
    rowwise_.set_factors(&factor_, 0);
    columnwise_.set_factors(&factor_, 0);
  }

  void use_upper(TileWriter& writer, Tensor& amax, const uint32_t* found,
                 std::vector<float>& upper) {
    const int64_t n = amax.numel();
    float* values = amax.mutable_data_ptr<float>();
    for (int64_t i = 0; i < n; ++i) values[i] = std::min(std::bit_cast<float>(found[i]), FLT_MAX);
    if (args_.reduce_amax) args_.reduce_amax(amax);
    values = amax.mutable_data_ptr<float>();
    upper.resize(n);
    for (int64_t i = 0; i < n; ++i) upper[i] = nv_upper(values[i], format_);
    writer.set_factors(upper.data(), format_.row_scaled ? 1 : 0);
  }

  void write(const T* x, int64_t stride, const Range& range, Scratch& s) {
    const Tile<T> tile{x, stride, range.rows(), range.columns()};
    Codes rows{};
    if (args_.rowwise) rows = write_rows(tile, range, s);
    if (!args_.columnwise) return;
    const int64_t step = std::max(kTransposedColumns, columnwise_.blocks().group);
    for (int64_t c = 0; c < tile.columns; c += step) {
      const int64_t n = std::min(step, tile.columns - c);
      const int64_t column = range.first_column + c;
      const Tile<T> piece{x + c, stride, tile.rows, n};
      columnwise_.fetch(column, range.first_row, n, tile.rows);
      fetch_next(s, tile, c, c + n);
      if (turn_codes_) {
        const Codes codes{rows.data + c / rowwise_.per_byte(), rows.stride};
        transpose_codes(codes, tile.rows, n, format_.element == Element::E2M1,
                        columnwise_.codes_at(column, range.first_row), s.codes);
      } else if (format_.hadamard) {
        write_transformed(piece, range.first_row, column, s);
      } else {
        transpose_tile(piece, s.transposed, kTransposed);
        const Tile<T> transposed{s.transposed, kTransposed, n, tile.rows};
        columnwise_.write(transposed, column, range.first_row, is_held(transposed),
                          columnwise_.codes_at(column, range.first_row), s.tile);
      }
    }
  }

  // Asks for as much of the next unit as the columns [first, last) are of this one.
  void fetch_next(const Scratch& s, const Tile<T>& tile, int64_t first, int64_t last) const {
    if (s.next == nullptr) return;
    constexpr int64_t line = 64 / sizeof(T);
    for (int64_t r = first * tile.rows / tile.columns; r < last * tile.rows / tile.columns; ++r) {
      for (int64_t c = 0; c < tile.columns; c += line) {
        __builtin_prefetch(s.next + r * source_.columns + c, 0, 2);
      }
    }
  }

  // Returns where the codes can be read.
  Codes write_rows(const Tile<T>& tile, const Range& range, Scratch& s) {
    const Codes result = rowwise_.codes_at(range.first_row, range.first_column);
    const int64_t per_byte = rowwise_.per_byte();
    Codes codes = result;
    if (turn_codes_ && result.stream) {
      if (s.row_codes == nullptr) s.row_codes = make_buffer<uint8_t>(kTransposed * kUnitColumns);
      codes = {s.row_codes.get(), kUnitColumns};
    }
    const bool square = rowwise_.blocks().group > 1;
    const int64_t columns = square ? kSquareTileColumns : kTileElements;
    for (int64_t c = 0; c < tile.columns; c += columns) {
      const int64_t n = std::min(columns, tile.columns - c);
      const int64_t rows = square ? rowwise_.blocks().group : kTileBlocks / ceil_div(n, 16);
      for (int64_t r = 0; r < tile.rows; r += rows) {
        const Tile<T> piece{tile.data + r * tile.stride + c, tile.stride,
                            std::min(rows, tile.rows - r), n,
                            source_.stored && !args_.columnwise ? rows * tile.stride : 0};
        if (args_.columnwise)
          rowwise_.fetch(range.first_row + r, range.first_column + c, piece.rows, n);
        const Codes place{codes.data + r * codes.stride + c / per_byte, codes.stride, codes.stream};
        rowwise_.write(piece, range.first_row + r, range.first_column + c, is_held(piece), place,
                       s.tile);
      }
    }
    if (codes.data != result.data) {
      copy_codes(codes, tile.rows, ceil_div(tile.columns, per_byte), result);
    }
    return codes;
  }

  // Does one factor hold all of the tile? For Delayed, its largest magnitude is noted as well.
  bool is_held(const Tile<T>& tile) {
    if (format_.scaling != Scaling::Delayed || args_.fit_to > 0) return held_;
    uint32_t largest = tile_amax(tile, true);
    const bool special = largest >= kInfinityBits;
    if (special) largest = tile_amax(tile, false);
    raise(amax_, largest);
    return !special &&
           std::fabs(std::bit_cast<float>(largest) * factor_) <= max_value(format_.element);
  }

  void turn_scales() {
    const Tensor& from = result_.rowwise.scale;
    const Tensor& to = result_.columnwise.scale;
    if (from.scalar_type() == at::kFloat) {
      transpose_tile(
          Tile<float>{from.const_data_ptr<float>(), from.size(1), from.size(0), from.size(1)},
          to.mutable_data_ptr<float>(), to.size(1));
    } else {
      transpose_tile(
          Tile<uint8_t>{from.const_data_ptr<uint8_t>(), from.size(1), from.size(0), from.size(1)},
          to.mutable_data_ptr<uint8_t>(), to.size(1));
    }
  }

  void write_transformed(const Tile<T>& x, int64_t row, int64_t column, Scratch& s) {
    const int64_t rows = ceil_div(x.rows, 16) * 16;
    hadamard_columns(x, false, s.transformed.values, kTransposedColumns);
    transpose_tile(Tile<float>{s.transformed.values, kTransposedColumns, rows, x.columns},
                   s.transformed.transposed, kTransposed);
    columnwise_.write(Tile<float>{s.transformed.transposed, kTransposed, x.columns, rows}, column,
                      row, false, columnwise_.codes_at(column, row), s.tile);
  }

  RowSource& source_;
  const QuantizeArgs& args_;
  const Format& format_;
  QuantizedPair result_;
  TileWriter rowwise_, columnwise_;
  const bool turn_codes_ = args_.rowwise && args_.columnwise && format_.orientations_agree();
  uint32_t amax_ = 0, transformed_amax_ = 0;
  uint32_t special_ = 0;  // is there an infinity or NaN?
  bool held_ = false;     // per tensor: see encode_tile
  std::vector<uint32_t> row_amax_, column_amax_;
  float factor_ = 1;
  std::vector<float> row_upper_, column_upper_;
};

template <typename F>
auto dispatch(at::ScalarType dtype, const F& f) {
  if (dtype == at::kBFloat16) return f(at::BFloat16{});
  if (dtype == at::kHalf) return f(at::Half{});
  return f(float{});
}

class StoredRows : public RowSource {
 public:
  explicit StoredRows(const Tensor& x) {
    const auto shape = shapes::matrix_shape(x.sizes());
    rows = shape.rows;
    columns = shape.columns;
    dtype = x.scalar_type();
    stored = true;
    values = x.const_data_ptr();
  }
  std::unique_ptr<Walk> walk(int64_t, int64_t, bool) override { return nullptr; }
};

}  // namespace

QuantizedPair quantize(RowSource& source, const QuantizeArgs& args) {
  return dispatch(source.dtype,
                  [&](auto zero) { return Quantization<decltype(zero)>(source, args).run(); });
}

QuantizedPair quantize(const Tensor& x, const QuantizeArgs& args) {
  const Tensor values = x.scalar_type() == at::kDouble ? x.to(at::kFloat) : x;
  StoredRows rows(values);
  return quantize(rows, args);
}

void update_amax(const Tensor& x, Tensor& amax) {
  const Tensor values = x.scalar_type() == at::kDouble ? x.to(at::kFloat) : x;
  uint32_t largest = 0;
  dispatch(values.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* data = values.const_data_ptr<T>();
    at::parallel_for(0, values.numel(), kChunkElements, [&](int64_t first, int64_t last) {
      raise(largest, tile_amax(Tile<T>{data + first, 0, 1, last - first}, false));
    });
  });
  float* out = amax.mutable_data_ptr<float>();
  out[0] = std::max(out[0], std::bit_cast<float>(largest));
}

}  // namespace ligature::cpu
