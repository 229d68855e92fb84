// Torch tensors as operands and results of a product: which memory can be read and written where it
// lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ligature/backend/cuda/gemm.h"
#include "ligature/backend/cuda/gemm_plan.h"

namespace ligature::cuda {

/// A tensor as a matrix [rows, columns]: the columns are its last dimension.
struct Matrix {
  const void* data = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t ld = 0;
  bool transposed = false;  ///< memory holds the transpose, row-major
};

/// The matrix where it lies, if its strides are those of one.
std::optional<Matrix> matrix_in_place(const Tensor& t);
/// A result's memory: row-major.
std::optional<Matrix> rows_in_place(const Tensor& t);

GemmType gemm_type(at::ScalarType dtype);

inline Tensor as_dtype(const Tensor& t, at::ScalarType dtype) {
  return !t.defined() || t.scalar_type() == dtype ? t : t.to(dtype);
}

/// Gives a product its alpha and beta: from the host, or from factors on the device, which the
/// returned tensor holds.
Tensor set_coefficients(Gemm& gemm, const ProductTerms& terms, float beta, Stream stream);

}  // namespace ligature::cuda
