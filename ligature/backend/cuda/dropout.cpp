// The torch side of dropout. The random numbers are those of torch's generator of the device, which
// is moved on by each forward, also under graph capture.
#include "ligature/backend/cuda/dropout.h"

#include "ligature/backend/cuda/dropout_launch.h"
#include "ligature/backend/cuda/generator.h"
#include "ligature/backend/cuda/launch.h"

namespace ligature::cuda {
namespace {

DropoutArgs args_of(const Tensor& x, const Tensor& y, const Tensor& mask, double p) {
  DropoutArgs args;
  args.count = x.numel();
  args.x = x.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.mask = static_cast<uint8_t*>(mask.data_ptr());
  args.type = type_of(x);
  args.p = p;
  return args;
}

}  // namespace

DropoutForward dropout_forward(const Tensor& x_, double p) {
  const DeviceGuard guard(x_.device());
  const Tensor x = x_.contiguous();
  DropoutForward result;
  result.y = empty_as(x);
  result.mask = empty_on(x.sizes(), at::kBool, x.device());
  launch<&launch_dropout_forward>("dropout_forward", stream_of(x),
                                  args_of(x, result.y, result.mask, p),
                                  draw(x.device(), kDropoutDraws));
  return result;
}

Tensor dropout_backward(const Tensor& dy_, const Tensor& mask_, double p) {
  const DeviceGuard guard(dy_.device());
  const Tensor dy = dy_.contiguous(), mask = mask_.contiguous();
  Tensor dx = empty_as(dy);
  launch<&launch_dropout_backward>("dropout_backward", stream_of(dy), args_of(dy, dx, mask, p));
  return dx;
}

}  // namespace ligature::cuda
