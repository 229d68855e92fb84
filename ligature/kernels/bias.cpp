// Sends the bias kernels to the backend of the tensor's device.
#include "ligature/kernels/bias.h"

#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {

Tensor bias_forward(const Tensor& x, const Tensor& b) {
  const KernelScope scope("bias_forward", x);
  return backend_for(x).bias_forward(x, b);
}

Tensor bias_backward(const Tensor& dy, int64_t features) {
  const KernelScope scope("bias_backward", dy);
  return backend_for(dy).bias_backward(dy, features);
}

}  // namespace ligature::kernels
