// The other orientation of quantized data, and the Hadamard transform of a whole tensor.
#include <ATen/Parallel.h>

#include "ligature/backend/cpu/cast.h"
#include "ligature/backend/cpu/quantize.h"
#include "ligature/backend/cpu/quantize_tile.h"
#include "ligature/backend/cpu/row_chunks.h"
#include "ligature/kernels/quantized_shapes.h"

namespace ligature::cpu {
namespace {

template <typename T>
void hadamard_into(const Tensor& y, const Tensor& x, bool inverse) {
  constexpr int64_t group = 16, groups = 64;
  const auto shape = shapes::matrix_shape(x.sizes());
  const int64_t columns = y.size(-1), across = ceil_div(columns, group * groups);
  const T* from = x.const_data_ptr<T>();
  T* to = y.mutable_data_ptr<T>();
  const int64_t grain = ceil_div(kChunkElements, std::clamp<int64_t>(columns, 1, group * groups));
  at::parallel_for(0, shape.rows * across, grain, [&](int64_t first, int64_t last) {
    T filled[group * groups];
    float values[group * groups], transposed[group * groups];
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / across, column = i % across * group * groups;
      const int64_t n = std::min(group * groups, columns - column);
      const int64_t given = std::min(n, shape.columns - column);
      std::copy_n(from + row * shape.columns + column, given, filled);
      std::fill(filled + given, filled + n, T(0));
      for (int64_t j = 0; j < n; ++j) values[j] = Cast<T, float>::apply(filled[j]);
      transpose_tile(Tile<float>{values, group, n / group, group}, transposed, groups);
      hadamard_columns(Tile<float>{transposed, groups, group, n / group}, inverse, transposed,
                       groups);
      transpose_tile(Tile<float>{transposed, groups, group, n / group}, values, group);
      T* out = to + row * columns + column;
      for (int64_t j = 0; j < n; ++j) out[j] = Cast<float, T>::apply(values[j]);
    }
  });
}

}  // namespace

QuantizedMatrix transpose(const QuantizedMatrix& q, const Format& format, int64_t columns) {
  QuantizedMatrix result = shapes::transpose(q, format, columns);
  result.amax = q.amax;
  result.scale = format.per_tensor() ? q.scale : q.scale.t().contiguous();
  const bool fp4 = format.element == Element::E2M1;
  const int64_t rows = q.data.size(0), stride = q.data.size(1), out_stride = result.data.size(1);
  const int64_t down = ceil_div(rows, kTransposed), across = ceil_div(columns, kTransposed);
  uint8_t* data = q.data.data_ptr<uint8_t>();
  uint8_t* out = result.data.mutable_data_ptr<uint8_t>();
  const int64_t tile = std::min(rows, kTransposed) * std::min(columns, kTransposed);
  const int64_t grain = ceil_div(kChunkElements, std::max<int64_t>(tile, 1));
  const int64_t per_byte = fp4 ? 2 : 1;
  at::parallel_for(0, down * across, grain, [&](int64_t first, int64_t last) {
    const auto scratch = make_buffer<uint8_t>(2 * kTransposed * kTransposed);
    for (int64_t i = first; i < last; ++i) {
      const int64_t r = i % down * kTransposed, c = i / down * kTransposed;
      transpose_codes({data + r * stride + c / per_byte, stride}, std::min(kTransposed, rows - r),
                      std::min(kTransposed, columns - c), fp4,
                      {out + c * out_stride + r / per_byte, out_stride}, scratch.get());
    }
  });
  return result;
}

Tensor hadamard(const Tensor& x, bool inverse) {
  if (x.scalar_type() == at::kDouble) return hadamard(x.to(at::kFloat), inverse).to(at::kDouble);
  Tensor y = shapes::hadamard(x);
  if (x.scalar_type() == at::kBFloat16) {
    hadamard_into<at::BFloat16>(y, x, inverse);
  } else if (x.scalar_type() == at::kHalf) {
    hadamard_into<at::Half>(y, x, inverse);
  } else {
    hadamard_into<float>(y, x, inverse);
  }
  return y;
}

}  // namespace ligature::cpu
