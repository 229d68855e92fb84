// The torch side of the bias.
#include "ligature/backend/cuda/bias.h"

#include "ligature/backend/cuda/activation_launch.h"
#include "ligature/backend/cuda/launch.h"
#include "ligature/backend/cuda/sums_launch.h"

namespace ligature::cuda {
namespace {

BiasArgs args_of(const Tensor& x, int64_t columns) {
  BiasArgs args;
  args.rows = columns > 0 ? x.numel() / columns : 0;
  args.columns = columns;
  args.x = x.const_data_ptr();
  args.type = type_of(x);
  return args;
}

}  // namespace

Tensor bias_forward(const Tensor& x_, const Tensor& b_) {
  const DeviceGuard guard(x_.device());
  const Tensor x = x_.contiguous();
  const Tensor b = serve(b_).contiguous();
  Tensor y = empty_as(x);
  BiasArgs args = args_of(x, b.numel());
  args.b = b.const_data_ptr();
  args.b_type = type_of(b);
  args.y = y.mutable_data_ptr();
  launch<&launch_bias_forward>("bias_forward", stream_of(x), args);
  return y;
}

Tensor bias_backward(const Tensor& dy_, int64_t features) {
  const DeviceGuard guard(dy_.device());
  const Tensor dy = dy_.contiguous();
  const Stream stream = stream_of(dy);
  BiasArgs args = args_of(dy, features);
  const ColumnGrid grid = bias_backward_grid(args, sm_count(dy));
  Tensor db = empty_on({features}, dy.scalar_type(), dy.device());
  const Tensor partials = small_on({grid.down, features}, at::kFloat, dy.device());
  args.partials = static_cast<float*>(partials.data_ptr());
  launch<&launch_bias_backward>("bias_backward", stream, args, grid);
  const PartialSums sums{args.partials, db.mutable_data_ptr(), args.type};
  launch<&launch_sum_partials>("bias_backward: sum", stream, sums, PartialSums{}, grid.down,
                               features);
  return db;
}

}  // namespace ligature::cuda
