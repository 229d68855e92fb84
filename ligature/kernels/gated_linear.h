// A linear layer's product together with the gated activation at one side of it: what lies between
// them is not written and read again. Not every device and size has such kernels;
// runs_gated_linear() tells, and there is no other way to compute it behind these calls.
#pragma once

#include "ligature/kernels/quantize.h"

namespace ligature::kernels {

struct GatedForward {
  Tensor z;  ///< x w^T
  Tensor a;  ///< the activation of z
};

/// Of operands in low precision, with the activation in low precision as well.
struct GatedForwardQuantized {
  Tensor z;  ///< undefined where it was not asked for
  QuantizedPair a;
};

struct GatedBackward {
  Tensor dz;
  Tensor a;  ///< the activation of z, where it was asked for
};

/// Has the device kernels for this activation in this dtype? Sizes may still speak against them.
bool has_gated_linear(const ActivationSpec& spec, at::ScalarType dtype, at::Device device);

/// Is there a kernel for these operands, and is it faster than the product and the activation one
/// after the other? `x` and `w`: those of linear_gated_forward, or dy and w of
/// linear_gated_backward.
bool runs_gated_linear(const Tensor& x, const Tensor& w, const ActivationSpec& spec, bool backward);

/// z = x w^T and a = act(z), with x [..., k], w [2 n, k], z [..., 2 n], a [..., n].
GatedForward linear_gated_forward(const Tensor& x, const Tensor& w, const ActivationSpec& spec);

/// dz = the gradient of act at z for da = dy w, with dy [..., m], w [m, n], z and dz [..., 2 n];
/// and a = act(z) [..., n] where `need_a`. da is rounded to its dtype, as if it had been written.
/// `over_z`: z is not needed any more, dz may take its memory.
GatedBackward linear_gated_backward(const Tensor& dy, const Tensor& w, const Tensor& z,
                                    const ActivationSpec& spec, bool need_a, bool over_z);

}  // namespace ligature::kernels
