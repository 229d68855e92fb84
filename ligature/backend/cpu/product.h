// Matrix products of the CPU's own, where they are faster than those of the libraries that ATen
// calls: one call with everything that is added, no views, no copies.
#pragma once

#include <ATen/core/Tensor.h>

#include "ligature/backend/cpu/product_tile.h"

namespace ligature::cpu {

using at::Tensor;

/// A tensor as a matrix [all dimensions but the last, the last].
struct Matrix {
  Matrix() = default;
  /// One that is no such matrix, or has no memory that could be read as it is, is not valid. An
  /// undefined tensor gives one that is valid, but not defined. A tensor without memory counts as
  /// one on the CPU.
  explicit Matrix(const Tensor& t);
  /// The same, to be written to.
  static Matrix of_result(const Tensor& t);

  Matrix transposed() const;
  /// As if its elements had been copied.
  Matrix copied() const;
  bool defined() const { return dtype != at::ScalarType::Undefined; }

  void* data = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool valid = true;
};

/// Is it one that a copy would make a valid Matrix with a stride of 1?
bool needs_copy(const Tensor& t);
ProductSide side_of(const Matrix& m);

/// alpha * a b^T + bias + add, for a [m, k] and b [n, k] of one dtype.
struct Product {
  Matrix a, b;
  Matrix bias;  ///< [1, n] of the operands' dtype; may be undefined
  Matrix add;   ///< [m, n] of the operands' dtype or float; likewise
  double alpha = 1.0;
};

/// The rule: are tiles the faster way to a result [m, n] of sums of k, operands of this dtype? It
/// is the same for a GEMM alone and for that of a group, so their bits are too.
bool gains_by_multiply(at::ScalarType dtype, int64_t m, int64_t n, int64_t k);
/// Can `multiply` do it?
bool can_multiply(const Product& product);
/// Is everything that it would read there?
bool has_memory(const Product& product);
/// Can it, and is it the faster way? With an `out` that is given, is that one it can write to?
bool runs_multiply(const Product& product);
bool runs_multiply(const Product& product, const Matrix& out);

/// `out` [m, n] is of the operands' dtype or float, and may be `add`. Sums are made in float and in
/// the order of k, whatever the number of threads, and rounded once.
void multiply(const Product& product, const Matrix& out);

}  // namespace ligature::cpu
