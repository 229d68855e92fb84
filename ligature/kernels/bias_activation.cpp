// One kernel where the backend has it; elsewhere the two, one after the other.
#include "ligature/kernels/bias_activation.h"

#include "ligature/check.h"
#include "ligature/kernels/arguments.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {

bool has_bias_activation(at::ScalarType dtype, at::Device device) {
  const Backend& backend = backend_for(device_behind(device).type(), dtype);
  return backend.has_bias_activation != nullptr && backend.has_bias_activation(dtype);
}

BiasActivation bias_activation_forward(const Tensor& x, const Tensor& b, const ActivationSpec& spec,
                                       bool need_z) {
  check_activation(x, spec, {});
  LIGATURE_CHECK(b.dim() == 1 && b.size(0) == x.size(-1),
                 "[bias_activation_forward] wanted a bias ", "of size ", x.size(-1),
                 ", got one of shape ", b.sizes());
  if (!has_bias_activation(x.scalar_type(), x.device()) || b.scalar_type() != x.scalar_type()) {
    Tensor z = bias_forward(x, b);
    Tensor y = activation_forward(z, spec);
    return {std::move(y), std::move(z)};
  }
  const KernelScope scope("bias_activation_forward", x);
  return backend_for(x).bias_activation_forward(x, b, spec, need_z);
}

}  // namespace ligature::kernels
