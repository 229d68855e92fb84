// The result is cut into columns of 32. A thread packs the part of b that belongs to one, which
// then stays in its second-level cache while the rows of a pass by, packed before: by all threads
// together, or few of them by each. Sums over k are never cut: each element is made by one loop, in
// registers.
#include "ligature/backend/cpu/product.h"

#include <algorithm>

#include "ligature/backend/cpu/product_scratch.h"
#include "ligature/backend/cpu/product_tile.h"
#include "ligature/backend/cpu/products.h"
#include "ligature/backend/cpu/shared_tasks.h"

namespace ligature::cpu {
namespace {

constexpr int64_t kFewUnits = 128;  // of k: products.h is faster
// A column less than a vector is not worth it. Of a vector and a matrix in float, MKL is faster.
constexpr int64_t kMinColumns = 16, kMinSizeFloat = 2;
constexpr int64_t kMaxUnits = 4096;       // of k: 512 KiB of b, half a cache
constexpr int64_t kBlockUnits = 3 << 19;  // of a, packed at a time: 6 MiB
constexpr int64_t kOwnUnits = 1 << 15;    // of a: each thread packs them for itself
// Of one task: what repays handing it to another thread.
constexpr int64_t kPackedUnits = 1 << 14;
constexpr int64_t kMultiplies = 1 << 18;
constexpr int64_t kTasksPerThread = 8;  // what the last one to be done may keep others waiting
constexpr int64_t kPanelsPerTask = 8;   // of rows, with which packing b is repaid

bool is_bfloat16(const Matrix& m) { return m.dtype == at::kBFloat16; }

ProductMatrix place_of(const Matrix& m) { return {m.data, m.row_stride, is_bfloat16(m)}; }

/// The result's rows [first, first + rows).
struct RowBlock {
  int64_t first, rows, n, k;
};

void multiply_rows(const ProductSide& a, const ProductSide& b, const RowBlock& block,
                   const ProductTerms& terms) {
  static thread_local Scratch left_scratch, right_scratch;
  const int64_t units = a.units(block.k);
  const int64_t row_units = padded(units);
  const Parts panels(block.rows, kTileRows);
  uint32_t* shared = nullptr;
  if (block.rows * row_units > kOwnUnits) {
    shared = left_scratch.get(block.rows * row_units);
    const int64_t grain = std::max<int64_t>(1, kPackedUnits / (row_units * kTileRows));
    at::parallel_for(0, panels.count, grain, [&](int64_t begin, int64_t end) {
      pack_left(a, block.first, panels, begin, end, block.k, shared);
    });
  }
  const int64_t columns = (block.n + kTileColumns - 1) / kTileColumns;
  // Where columns are few, rows are cut too, and b is packed more than once.
  const int64_t cuts = std::clamp<int64_t>(kTasksPerThread * at::get_num_threads() / columns, 1,
                                           std::max<int64_t>(1, panels.count / kPanelsPerTask));
  const int64_t task = std::max<int64_t>(1, block.rows * kTileColumns * block.k / cuts);
  SharedTasks tasks(columns * cuts, kMultiplies / task);
  tasks.run([&](const auto& next) {
    int64_t i = next();
    if (i < 0) return;
    uint32_t* packed = shared;
    if (packed == nullptr) {
      packed = left_scratch.get(block.rows * row_units);
      pack_left(a, block.first, panels, 0, panels.count, block.k, packed);
    }
    uint32_t* const right = right_scratch.get(units * kTileColumns);
    for (; i >= 0; i = next()) {
      const int64_t column = i / cuts * kTileColumns;
      const int64_t width = std::min(kTileColumns, block.n - column);
      pack_right(b, column, width, block.k, right);
      const int64_t last = (i % cuts + 1) * panels.count / cuts;
      for (int64_t p = i % cuts * panels.count / cuts; p < last; ++p) {
        multiply_tile(packed + panels.begin(p) * row_units, right, panels.size(p), width, units,
                      a.bfloat16, terms, block.first + panels.begin(p), column);
      }
    }
  });
}

bool is_operand(const Matrix& m, at::ScalarType dtype) {
  return m.valid && m.dtype == dtype && (m.row_stride == 1 || m.column_stride == 1);
}

bool is_result(const Matrix& m, const Product& p) {
  return m.valid && m.rows == p.a.rows && m.columns == p.b.rows && m.column_stride == 1 &&
         (m.dtype == p.a.dtype || m.dtype == at::kFloat);
}

}  // namespace

Matrix::Matrix(const Tensor& t) {
  if (!t.defined()) return;
  valid = (t.is_cpu() || t.is_meta()) && t.layout() == at::kStrided && t.dim() > 0 &&
          (t.dim() == 2 || t.is_contiguous()) && !t.is_neg() && !t.is_conj();
  dtype = t.scalar_type();
  if (!valid) return;
  columns = t.size(-1);
  const bool two = t.dim() == 2;
  rows = two ? t.size(0) : columns > 0 ? t.numel() / columns : 0;
  row_stride = two ? t.stride(0) : columns;
  column_stride = two ? t.stride(1) : 1;
  if (!t.is_meta()) data = const_cast<void*>(t.const_data_ptr());
}

Matrix Matrix::of_result(const Tensor& t) {
  Matrix out(t);
  if (out.data != nullptr) out.data = t.mutable_data_ptr();
  return out;
}

Matrix Matrix::transposed() const {
  Matrix out = *this;
  std::swap(out.rows, out.columns);
  std::swap(out.row_stride, out.column_stride);
  return out;
}

Matrix Matrix::copied() const {
  Matrix out = *this;
  out.row_stride = columns;
  out.column_stride = 1;
  return out;
}

bool needs_copy(const Tensor& t) {
  if (!t.defined() || t.layout() != at::kStrided || t.dim() == 0 || t.is_neg() || t.is_conj()) {
    return false;
  }
  if (t.dim() != 2) return !t.is_contiguous();
  return t.stride(0) != 1 && t.stride(1) != 1;
}

ProductSide side_of(const Matrix& m) {
  return {m.data, m.row_stride, m.column_stride, is_bfloat16(m)};
}

bool can_multiply(const Product& p) {
  const at::ScalarType dtype = p.a.dtype;
  if (dtype != at::kFloat && dtype != at::kBFloat16) return false;
  if (!has_product_tiles(dtype == at::kBFloat16)) return false;
  if (!is_operand(p.a, dtype) || !is_operand(p.b, dtype) || p.b.columns != p.a.columns) {
    return false;
  }
  const bool takes_bias =
      !p.bias.defined() || (p.bias.valid && p.bias.rows == 1 && p.bias.columns == p.b.rows &&
                            p.bias.column_stride == 1 && p.bias.dtype == dtype);
  return takes_bias && (!p.add.defined() || is_result(p.add, p));
}

bool has_memory(const Product& p) {
  const auto has = [](const Matrix& m) { return !m.defined() || m.data != nullptr; };
  return has(p.a) && has(p.b) && has(p.bias) && has(p.add);
}

bool gains_by_multiply(at::ScalarType dtype, int64_t m, int64_t n, int64_t k) {
  if (dtype != at::kFloat && dtype != at::kBFloat16) return false;
  const bool bfloat16 = dtype == at::kBFloat16;
  if (!has_product_tiles(bfloat16) || !gains_by_product_tiles()) return false;
  return std::min(m, k) >= (bfloat16 ? 1 : kMinSizeFloat) && n >= kMinColumns &&
         ProductSide{.bfloat16 = bfloat16}.units(k) <= kMaxUnits;
}

bool runs_multiply(const Product& p) {
  return can_multiply(p) && gains_by_multiply(p.a.dtype, p.a.rows, p.b.rows, p.a.columns);
}

bool runs_multiply(const Product& p, const Matrix& out) {
  return is_result(out, p) && runs_multiply(p);
}

void multiply(const Product& p, const Matrix& out) {
  const ProductSide a = side_of(p.a), b = side_of(p.b);
  const ProductTerms terms{place_of(out), place_of(p.add), place_of(p.bias),
                           static_cast<float>(p.alpha)};
  const int64_t row_units = padded(a.units(p.a.columns));
  if (p.a.rows <= kTileRows || row_units <= kFewUnits) {
    return multiply({{a, b, terms, p.a.rows, p.b.rows, p.a.columns}});
  }
  const Parts blocks(p.a.rows, std::max<int64_t>(256, kBlockUnits / row_units));
  for (int64_t i = 0; i < blocks.count; ++i) {
    multiply_rows(a, b, {blocks.begin(i), blocks.size(i), p.b.rows, p.a.columns}, terms);
  }
}

}  // namespace ligature::cpu
