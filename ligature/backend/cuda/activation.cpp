// The torch side of the activations: memory and launches. Where dy is not of x's dtype, both are
// made float32; the kernels read one type.
#include "ligature/backend/cuda/activation.h"

#include "ligature/backend/cuda/activation_launch.h"
#include "ligature/backend/cuda/launch.h"
#include "ligature/backend/cuda/sums_launch.h"

namespace ligature::cuda {
namespace {

/// The results' matrix.
struct Matrix {
  int64_t rows, columns;

  Matrix(const Tensor& x, const ActivationSpec& spec) {
    const bool gated = kernels::is_gated(spec.kind);
    const int64_t results = gated ? x.numel() / 2 : x.numel();
    columns = gated ? x.size(-1) / 2 : x.size(-1);
    rows = results == 0 ? 0 : results / columns;
  }
};

void forward_into(Tensor& y, const Tensor& x, const ActivationSpec& spec, const Tensor& scales_,
                  const char* name) {
  const Tensor scales = serve(scales_);
  const Matrix matrix(x, spec);
  ActivationForwardArgs args;
  args.rows = matrix.rows;
  args.columns = matrix.columns;
  args.y = y.mutable_data_ptr();
  args.x = x.const_data_ptr();
  args.scales = data_of(scales);
  args.type = type_of(x);
  if (scales.defined()) args.scales_type = type_of(scales);
  args.params = params_of(spec);
  launch<&launch_activation_forward>(name, stream_of(x), args);
}

/// dx in the dtype of `x`, which dy shares, and the sums.
ActivationBackward backward(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                            const Tensor& scales, bool need_dscales, bool need_dbias, bool over_x) {
  const bool sums = need_dscales || need_dbias;
  const Stream stream = stream_of(x);
  const Matrix matrix(x, spec);
  ActivationBackward result;
  result.dx = over_x ? x : empty_as(x);
  ActivationBackwardArgs args;
  args.rows = matrix.rows;
  args.columns = matrix.columns;
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.scales = data_of(scales);
  args.dx = result.dx.mutable_data_ptr();
  args.type = type_of(x);
  if (scales.defined()) args.scales_type = type_of(scales);
  args.params = params_of(spec);
  const ColumnGrid grid = activation_backward_grid(args, sums, sm_count(x));
  Tensor dbias_partials, dscales_partials;
  if (need_dbias) {
    result.dbias = empty_on({x.size(-1)}, x.scalar_type(), x.device());
    dbias_partials = small_on({grid.down, x.size(-1)}, at::kFloat, x.device());
    args.dbias_partials = static_cast<float*>(dbias_partials.data_ptr());
  }
  if (need_dscales) {
    result.dscales = empty_as(scales);
    dscales_partials = small_on({matrix.rows, grid.warps_across}, at::kFloat, x.device());
    args.dscales_partials = static_cast<float*>(dscales_partials.data_ptr());
    if (x.numel() == 0) result.dscales.zero_();
  }
  launch<&launch_activation_backward>("activation_backward", stream, args, grid);
  if (need_dbias) {
    const PartialSums dbias{args.dbias_partials, result.dbias.mutable_data_ptr(), args.type};
    launch<&launch_sum_partials>("activation_backward: dbias", stream, dbias, PartialSums{},
                                 grid.down, x.size(-1));
  }
  if (need_dscales) {
    const PartialSums dscales{args.dscales_partials, result.dscales.mutable_data_ptr(),
                              args.scales_type};
    launch<&launch_sum_row_partials>("activation_backward: dscales", stream, dscales, matrix.rows,
                                     grid.warps_across);
  }
  return result;
}

}  // namespace

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales) {
  const DeviceGuard guard(x.device());
  at::DimVector shape(x.sizes());
  if (kernels::is_gated(spec.kind)) shape.back() /= 2;
  Tensor y = empty_on(shape, x.scalar_type(), x.device());
  forward_into(y, x, spec, scales, "activation_forward");
  return y;
}

Tensor activation_forward_(Tensor& x, const ActivationSpec& spec) {
  const DeviceGuard guard(x.device());
  forward_into(x, x, spec, {}, "activation_forward_");
  return x;
}

ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias, bool over_x) {
  const DeviceGuard guard(x.device());
  const at::ScalarType read = dy.scalar_type() == x.scalar_type() ? x.scalar_type() : at::kFloat;
  ActivationBackward result = backward(cast(dy, read), cast(x, read), spec, serve(scales),
                                       need_dscales, need_dbias, over_x);
  result.dx = cast(result.dx, x.scalar_type());
  result.dbias = cast(result.dbias, x.scalar_type());
  if (need_dscales) result.dscales = cast(result.dscales, scales.scalar_type());
  return result;
}

}  // namespace ligature::cuda
