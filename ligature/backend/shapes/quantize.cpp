#include "ligature/backend/shapes/quantize.h"

#include <ATen/ops/empty.h>

namespace ligature::shapes {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

MatrixShape matrix_shape(at::IntArrayRef sizes) {
  return {c10::multiply_integers(sizes.slice(0, sizes.size() - 1)), sizes.back()};
}

QuantizedMatrix empty_matrix(MatrixShape shape, const Format& format, at::TensorOptions options) {
  const bool fp4 = format.element == Element::E2M1;
  const auto bytes = options.dtype(at::kByte), floats = options.dtype(at::kFloat);
  QuantizedMatrix q;
  q.data = at::empty({shape.rows, fp4 ? ceil_div(shape.columns, 2) : shape.columns}, bytes);
  if (format.per_tensor()) {
    q.scale = at::empty({1}, floats);
    return q;
  }
  const int64_t block = format.block_size();
  q.scale =
      at::empty({ceil_div(shape.rows, format.block_2d ? block : 1), ceil_div(shape.columns, block)},
                format.scaling == Scaling::Block ? floats : bytes);
  if (format.scaling == Scaling::NV) {
    q.amax = at::empty({format.row_scaled ? shape.rows : 1}, floats);
  }
  return q;
}

QuantizedPair empty_pair(MatrixShape shape, const QuantizeArgs& args, at::TensorOptions options) {
  const Format& format = args.format;
  QuantizedPair pair;
  if (args.rowwise) pair.rowwise = empty_matrix(shape, format, options);
  if (args.columnwise) {
    const int64_t columns = format.hadamard ? ceil_div(shape.rows, 16) * 16 : shape.rows;
    pair.columnwise = empty_matrix({shape.columns, columns}, format, options);
  }
  if (args.rowwise && args.columnwise) {
    if (format.per_tensor()) pair.columnwise.scale = pair.rowwise.scale;
    if (!format.hadamard && !format.row_scaled) pair.columnwise.amax = pair.rowwise.amax;
  }
  return pair;
}

QuantizedPair quantize(at::IntArrayRef sizes, const QuantizeArgs& args, at::TensorOptions options) {
  return empty_pair(matrix_shape(sizes), args, options);
}

Tensor decoded(const QuantizedMatrix& q, int64_t columns, at::ScalarType dtype) {
  return at::empty({q.data.size(0), columns}, q.data.options().dtype(dtype));
}

QuantizedMatrix transpose(const QuantizedMatrix& q, const Format& format, int64_t columns) {
  return empty_matrix({columns, q.data.size(0)}, format, q.data.options());
}

Tensor hadamard(const Tensor& x) {
  at::DimVector sizes(x.sizes());
  sizes.back() = ceil_div(sizes.back(), 16) * 16;
  return at::empty(sizes, x.options());
}

}  // namespace ligature::shapes
