// Sends the bias kernels to the backend of the tensor's device.
#include "ligature/kernels/bias.h"

#include "ligature/backend/aten/bias.h"
#include "ligature/backend/cpu/bias.h"
#include "ligature/backend/shapes/kernels.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {

Tensor bias_forward(const Tensor& x, const Tensor& b) {
  const KernelScope scope("bias_forward");
  if (x.is_meta()) return shapes::like(x);
  return x.is_cpu() ? cpu::bias_forward(x, b) : aten::bias_forward(x, b);
}

Tensor bias_backward(const Tensor& dy, int64_t features) {
  const KernelScope scope("bias_backward");
  if (dy.is_meta()) return shapes::bias_backward(dy, features);
  return dy.is_cpu() ? cpu::bias_backward(dy, features) : aten::bias_backward(dy, features);
}

}  // namespace ligature::kernels
