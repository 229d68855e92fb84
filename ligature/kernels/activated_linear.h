// A linear layer's product together with what is elementwise at one side of it: an activation that
// is not gated, its gradient, or the sums that are a bias' gradient. Not every device and size has
// such products, and not where they exist are they always faster; the functions runs_...() tell,
// and there is no other way to compute it behind the calls.
#pragma once

#include "ligature/kernels/activation.h"

namespace ligature::kernels {

struct ActivatedForward {
  Tensor y;
  /// What linear_activated_backward wants. GELU: x w^T + bias, like y. ReLU: a bit for each value
  /// of y, bytes with rows of a multiple of 16.
  Tensor aux;
};

struct ActivatedBackward {
  Tensor dz;
  Tensor dbias;  ///< [columns of dz], where asked for: its sums over the rows, before rounding
};

struct WeightBiasGrads {
  Tensor dw, dbias;
};

/// Is there such a product for this activation in this dtype that pays at some size? Then one
/// direction or both are worth a fusion.
bool has_activated_linear(const ActivationSpec& spec, at::ScalarType dtype, at::Device device,
                          bool backward);
/// The same for linear_weight_bias_grad.
bool has_weight_bias_grad(at::ScalarType dtype, at::Device device);

/// Does linear_activated_forward take these, and is it faster than one after the other?
bool runs_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                            const ActivationSpec& spec, bool need_aux);
/// y = act(x w^T + bias), with x [..., k], w [n, k], bias [n] or undefined, y [..., n]. The
/// activation is computed from the sums before they are rounded.
ActivatedForward linear_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                                          const ActivationSpec& spec, bool need_aux);

/// Does linear_activated_backward take these, and is it faster?
bool runs_activated_backward(const Tensor& dy, const Tensor& w, const Tensor& aux,
                             const ActivationSpec& spec, bool need_dbias);
/// dz = act'(z) (dy w), with dy [..., m], w [m, n], dz [..., n], `aux` as the forward left it.
ActivatedBackward linear_activated_backward(const Tensor& dy, const Tensor& w, const Tensor& aux,
                                            const ActivationSpec& spec, bool need_dbias);

/// Does linear_weight_bias_grad take these, and is it faster?
bool runs_weight_bias_grad(const Tensor& dy, const Tensor& x);
/// dw = dy^T x, and the sums of dy over its rows.
WeightBiasGrads linear_weight_bias_grad(const Tensor& dy, const Tensor& x);

}  // namespace ligature::kernels
