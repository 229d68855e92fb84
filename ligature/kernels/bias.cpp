// Sends the bias kernels to the backend of the tensor's device.
#include "ligature/kernels/bias.h"

#include "ligature/backend/aten/bias.h"
#include "ligature/backend/cpu/bias.h"
#include "ligature/backend/cuda/bias.h"
#include "ligature/backend/dispatch.h"
#include "ligature/backend/shapes/kernels.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {

Tensor bias_forward(const Tensor& x, const Tensor& b) {
  const KernelScope scope("bias_forward", x);
  if (x.is_meta()) return shapes::like(x);
  return LIGATURE_DISPATCH(x, bias_forward, x, b);
}

Tensor bias_backward(const Tensor& dy, int64_t features) {
  const KernelScope scope("bias_backward", dy);
  if (dy.is_meta()) return shapes::bias_backward(dy, features);
  return LIGATURE_DISPATCH(dy, bias_backward, dy, features);
}

}  // namespace ligature::kernels
