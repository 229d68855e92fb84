// An activation as the .cu files know it. No torch here.
#pragma once

#include <cstdint>

#include "ligature/kernels/activation_kind.h"

namespace ligature::cuda {

using Activation = kernels::ActivationKind;
using kernels::is_gated;

/// kernels::ActivationSpec as params_of in activation.h makes it.
struct ActivationParams {
  Activation kind = Activation::GELU;                 // for code that is not compiled for one kind
  float limit = 7.0f, alpha = 1.702f, offset = 1.0f;  // ClampedSwiGLU
  float beta1 = 4.0f, beta2 = 25.0f;                  // SiTUGLU
  float inverse_beta1 = 0.25f, inverse_beta2 = 0.04f;
  int64_t interleave = 0;  // n > 0: blocks of n gates, n linear units, alternating
};

}  // namespace ligature::cuda
