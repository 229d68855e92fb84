// The kernels of the activations. Which there are says activation_kind.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "ligature/kernels/activation_kind.h"

namespace ligature::kernels {

using at::Tensor;

struct ActivationBackward {
  Tensor dx;
  Tensor dscales;  // in the dtype of scales
  Tensor dbias;    // [x.size(-1)] in x's dtype: the sum over rows of dx as it was before rounding
};

struct ActivationRecompute {
  Tensor y;
  Tensor dx;
  Tensor dbias;         // as in ActivationBackward
  Tensor dscales = {};  // likewise
};

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
/// The same of activation_forward(x, spec, scales) and its backward.
ActivationRecompute activation_recompute_scaled(const Tensor& dy, const Tensor& x,
                                                const ActivationSpec& spec, const Tensor& scales,
                                                bool need_dscales, bool over_dy = false,
                                                bool over_x = false);

}  // namespace ligature::kernels
