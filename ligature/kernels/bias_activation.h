// A bias and the activation after it.
#pragma once

#include "ligature/kernels/activation.h"

namespace ligature::kernels {

struct BiasActivation {
  Tensor y;
  Tensor z;  // x + b; may be undefined where nobody asked for it
};

/// y = act(z) with z = x + b, the same bits as one after the other, in one pass over memory where
/// has_bias_activation(). `need_z`: z is wanted too.
BiasActivation bias_activation_forward(const Tensor& x, const Tensor& b, const ActivationSpec& spec,
                                       bool need_z);
bool has_bias_activation(at::ScalarType dtype, at::Device device);

}  // namespace ligature::kernels
