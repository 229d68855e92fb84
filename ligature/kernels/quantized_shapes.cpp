#include "ligature/kernels/quantized_shapes.h"

#include <ATen/ops/empty.h>

#include "ligature/kernels/small_buffers.h"

namespace ligature::shapes {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

MatrixShape matrix_shape(at::IntArrayRef sizes) {
  return {c10::multiply_integers(sizes.slice(0, sizes.size() - 1)), sizes.back()};
}

QuantizedMatrix empty_matrix(MatrixShape shape, const Format& format, at::TensorOptions options,
                             bool own_scale) {
  const bool fp4 = format.element == Element::E2M1;
  const auto bytes = options.dtype(at::kByte), floats = options.dtype(at::kFloat);
  QuantizedMatrix q;
  q.data = empty_small({shape.rows, fp4 ? ceil_div(shape.columns, 2) : shape.columns}, bytes);
  if (!own_scale) return q;
  if (format.per_tensor()) {
    q.scale = empty_small({1}, floats);
    return q;
  }
  const int64_t block = format.block_size();
  q.scale = empty_small(
      {ceil_div(shape.rows, format.block_2d ? block : 1), ceil_div(shape.columns, block)},
      format.scaling == Scaling::Block ? floats : bytes);
  if (format.scaling == Scaling::NV) {
    q.amax = empty_small({format.row_scaled ? shape.rows : 1}, floats);
  }
  return q;
}

QuantizedPair empty_pair(MatrixShape shape, const QuantizeArgs& args, at::TensorOptions options) {
  const Format& format = args.format;
  QuantizedPair pair;
  if (args.rowwise) pair.rowwise = empty_matrix(shape, format, options, true);
  if (!args.columnwise) return pair;
  const bool shared = args.rowwise && format.per_tensor();
  const int64_t columns = format.hadamard ? ceil_div(shape.rows, 16) * 16 : shape.rows;
  pair.columnwise = empty_matrix({shape.columns, columns}, format, options, !shared);
  if (shared) pair.columnwise.scale = pair.rowwise.scale;
  if (args.rowwise && !format.hadamard && !format.row_scaled) {
    pair.columnwise.amax = pair.rowwise.amax;
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
  return empty_matrix({columns, q.data.size(0)}, format, q.data.options(), true);
}

Tensor hadamard(const Tensor& x) {
  at::DimVector sizes(x.sizes());
  sizes.back() = ceil_div(sizes.back(), 16) * 16;
  return at::empty(sizes, x.options());
}

}  // namespace ligature::shapes
