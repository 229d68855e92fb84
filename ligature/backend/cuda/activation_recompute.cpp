// The torch side of activation_recompute: memory and launches. Where dy is not of x's dtype, both
// are made float32; the kernels read one type.
#include "ligature/backend/cuda/activation_recompute.h"

#include "ligature/backend/cuda/activation.h"
#include "ligature/backend/cuda/activation_recompute_launch.h"
#include "ligature/backend/cuda/launch.h"
#include "ligature/backend/cuda/sums_launch.h"

namespace ligature::cuda {

ActivationRecompute activation_recompute(const Tensor& dy_, const Tensor& x_,
                                         const ActivationSpec& spec, bool need_dbias, bool over_dy,
                                         bool over_x) {
  const DeviceGuard guard(x_.device());
  const at::ScalarType read = dy_.scalar_type() == x_.scalar_type() ? x_.scalar_type() : at::kFloat;
  const Tensor dy = cast(dy_, read);
  const Tensor x = cast(x_, read);
  const bool gated = kernels::is_gated(spec.kind);
  at::DimVector shape(x.sizes());
  if (gated) shape.back() /= 2;

  ActivationRecompute result;
  result.y = over_dy ? dy.view(shape) : empty_on(shape, x.scalar_type(), x.device());
  result.dx = over_x ? x : empty_as(x);
  ActivationRecomputeArgs args;
  args.columns = shape.back();
  // Where rows mean nothing they are cut so that a block fits across.
  constexpr int64_t kAcross = 2048;
  if (!gated && !need_dbias && dy.numel() % kAcross == 0) args.columns = kAcross;
  args.rows = dy.numel() == 0 ? 0 : dy.numel() / args.columns;
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.y = result.y.mutable_data_ptr();
  args.dx = result.dx.mutable_data_ptr();
  args.type = type_of(x);
  args.params = params_of(spec);
  const ColumnGrid grid = activation_recompute_grid(args, need_dbias, sm_count(x));
  const Stream stream = stream_of(x);
  Tensor partials;
  if (need_dbias) {
    result.dbias = empty_on({x.size(-1)}, x.scalar_type(), x.device());
    partials = small_on({grid.down, x.size(-1)}, at::kFloat, x.device());
    args.dbias_partials = static_cast<float*>(partials.data_ptr());
  }
  gated ? launch<&launch_activation_recompute_gated>("activation_recompute", stream, args, grid)
        : launch<&launch_activation_recompute_plain>("activation_recompute", stream, args, grid);
  if (need_dbias) {
    const PartialSums dbias{args.dbias_partials, result.dbias.mutable_data_ptr(), args.type};
    launch<&launch_sum_partials>("activation_recompute: dbias", stream, dbias, PartialSums{},
                                 grid.down, x.size(-1));
  }
  result.y = cast(result.y, x_.scalar_type());
  result.dx = cast(result.dx, x_.scalar_type());
  result.dbias = cast(result.dbias, x_.scalar_type());
  return result;
}

ActivationRecompute activation_recompute_scaled(const Tensor& dy_, const Tensor& x_,
                                                const ActivationSpec& spec, const Tensor& scales_,
                                                bool need_dscales, bool over_dy, bool over_x) {
  const DeviceGuard guard(x_.device());
  const at::ScalarType read = dy_.scalar_type() == x_.scalar_type() ? x_.scalar_type() : at::kFloat;
  const Tensor dy = cast(dy_, read).contiguous(), x = cast(x_, read).contiguous();
  const Tensor scales = serve(scales_).contiguous();
  const bool gated = kernels::is_gated(spec.kind);
  at::DimVector shape(x.sizes());
  if (gated) shape.back() /= 2;

  ActivationRecompute result;
  result.y = over_dy ? dy.view(shape) : empty_on(shape, x.scalar_type(), x.device());
  result.dx = over_x ? x : empty_as(x);
  ActivationRecomputeScaledArgs args;
  args.columns = shape.back();
  args.rows = scales.numel();
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.scales = scales.const_data_ptr();
  args.y = result.y.mutable_data_ptr();
  args.dx = result.dx.mutable_data_ptr();
  args.type = type_of(x);
  args.scales_type = type_of(scales);
  args.params = params_of(spec);
  const ColumnGrid grid = activation_recompute_scaled_grid(args, need_dscales, sm_count(x));
  const Stream stream = stream_of(x);
  Tensor partials;
  if (need_dscales) {
    result.dscales = empty_as(scales);
    partials = small_on({args.rows, grid.warps_across}, at::kFloat, x.device());
    args.dscales_partials = static_cast<float*>(partials.data_ptr());
    if (x.numel() == 0) result.dscales.zero_();
  }
  gated ? launch<&launch_activation_recompute_scaled_gated>("activation_recompute", stream, args,
                                                            grid)
        : launch<&launch_activation_recompute_scaled_plain>("activation_recompute", stream, args,
                                                            grid);
  if (need_dscales) {
    const PartialSums dscales{args.dscales_partials, result.dscales.mutable_data_ptr(),
                              args.scales_type};
    launch<&launch_sum_row_partials>("activation_recompute: dscales", stream, dscales, args.rows,
                                     grid.warps_across);
    result.dscales = cast(result.dscales, scales_.scalar_type());
  }
  result.y = cast(result.y, x_.scalar_type());
  result.dx = cast(result.dx, x_.scalar_type());
  return result;
}

}  // namespace ligature::cuda
