// One kernel on a CPU; elsewhere the two, one after the other.
#include "ligature/kernels/bias_activation.h"

#include "ligature/backend/cpu/bias_activation.h"
#include "ligature/backend/shapes/kernels.h"
#include "ligature/check.h"
#include "ligature/kernels/arguments.h"
#include "ligature/kernels/bias.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {

bool has_bias_activation(at::ScalarType dtype, at::Device device) {
  return device.is_cpu() && dtype != at::kHalf;
}

BiasActivation bias_activation_forward(const Tensor& x, const Tensor& b, const ActivationSpec& spec,
                                       bool need_z) {
  check_activation(x, spec, {});
  LIGATURE_CHECK(b.dim() == 1 && b.size(0) == x.size(-1),
                 "[bias_activation_forward] wanted a bias ", "of size ", x.size(-1),
                 ", got one of shape ", b.sizes());
  const at::Device device = x.is_meta() ? device_behind(x) : x.device();
  if (!has_bias_activation(x.scalar_type(), device) || b.scalar_type() != x.scalar_type()) {
    Tensor z = bias_forward(x, b);
    Tensor y = activation_forward(z, spec);
    return {std::move(y), std::move(z)};
  }
  const KernelScope scope("bias_activation_forward", x);
  if (x.is_meta()) {
    return {shapes::activation_forward(x, spec), need_z ? shapes::like(x) : Tensor()};
  }
  return cpu::bias_activation_forward(x, b, spec, need_z);
}

}  // namespace ligature::kernels
