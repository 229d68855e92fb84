// The activations, plain and gated. A gated one splits the last dimension 2n into gates a and
// linear units b and gives n values act(a) * b.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::kernels {

using at::Tensor;

enum class ActivationKind {
  GELU,   // tanh form
  QGELU,  // x * sigmoid(1.702 x)
  ReLU,
  SReLU,  // relu(x)^2
  SiLU,
  GLU,
  GEGLU,
  QGEGLU,
  ReGLU,
  SReGLU,
  SwiGLU,
  ClampedSwiGLU,
  SiTUGLU,
};

struct ActivationSpec {
  ActivationKind kind;
  double limit = 7.0;               // ClampedSwiGLU
  double alpha = 1.702;             // ClampedSwiGLU
  double glu_linear_offset = 1.0;   // ClampedSwiGLU
  double beta1 = 4.0;               // SiTUGLU
  double beta2 = 25.0;              // SiTUGLU
  int64_t glu_interleave_size = 0;  // n > 0: blocks of n gates, n linear units, alternating
};

struct ActivationBackward {
  Tensor dx;
  Tensor dscales;  // in the dtype of scales
  Tensor dbias;    // [x.size(-1)] in x's dtype: the sum over rows of dx as it was before rounding
};

struct ActivationRecompute {
  Tensor y;
  Tensor dx;
  Tensor dbias;  // as in ActivationBackward
};

bool is_gated(ActivationKind kind);
const char* activation_name(ActivationKind kind);

/// y = act(x), times the row's factor where `scales`, of shape x.shape[:-1], is defined.
Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales = {});

/// x = act(x) in place, for activations that are not gated. Returns x.
Tensor activation_forward_(Tensor& x, const ActivationSpec& spec);

/// `over_x`: dx is written into the memory of x.
ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales = {},
                                       bool need_dscales = false, bool need_dbias = false,
                                       bool over_x = false);

/// The backward, and the forward's y again, bit for bit, in one pass over memory. `over_dy`: y is
/// written into the memory of dy, `over_x`: dx into that of x.
ActivationRecompute activation_recompute(const Tensor& dy, const Tensor& x,
                                         const ActivationSpec& spec, bool need_dbias = false,
                                         bool over_dy = false, bool over_x = false);

}  // namespace ligature::kernels
