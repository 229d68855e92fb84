// Low precision for tensors without memory: the shapes of what its kernels give. The CPU backend
// makes its results with them too.
#pragma once

#include "ligature/kernels/quantize.h"

namespace ligature::shapes {

using at::Tensor;
using kernels::QuantizeArgs;
using kernels::QuantizedMatrix;
using kernels::QuantizedPair;

/// A tensor as a matrix whose columns are its last dimension.
struct MatrixShape {
  int64_t rows;
  int64_t columns;
};
MatrixShape matrix_shape(at::IntArrayRef sizes);

/// Row-wise data of a matrix, not filled in; `amax` is defined for NV. `own_scale`: with factors.
QuantizedMatrix empty_matrix(MatrixShape shape, const Format& format, at::TensorOptions options,
                             bool own_scale);

/// Both orientations, as far as wanted. Where they have the same factors of the whole tensor, they
/// share them.
QuantizedPair empty_pair(MatrixShape shape, const QuantizeArgs& args, at::TensorOptions options);

QuantizedPair quantize(at::IntArrayRef sizes, const QuantizeArgs& args, at::TensorOptions options);

/// The values of a matrix of so many columns.
Tensor decoded(const QuantizedMatrix& q, int64_t columns, at::ScalarType dtype);

/// A matrix given its data, and how many columns it has.
QuantizedMatrix transpose(const QuantizedMatrix& q, const Format& format, int64_t columns);

/// x with its last dimension filled up to a multiple of 16.
Tensor hadamard(const Tensor& x);

}  // namespace ligature::shapes
