// What every backend needs to know of an activation, the checks of its arguments, and the call
// of the backend.
#include "ligature/kernels/activation.h"

#include <utility>

#include "ligature/check.h"
#include "ligature/kernels/arguments.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {

void check_activation(const Tensor& x, const ActivationSpec& spec, const Tensor& scales) {
  LIGATURE_CHECK(is_known(spec.kind), "wanted a known kind of activation, got number ",
                 static_cast<int>(spec.kind));
  const char* name = activation_name(spec.kind);
  LIGATURE_CHECK(x.dim() > 0, "[", name, "] wanted an input with at least one dimension, got none");
  if (is_gated(spec.kind)) {
    const int64_t step = 2 * std::max<int64_t>(spec.glu_interleave_size, 1);
    LIGATURE_CHECK(x.size(-1) % step == 0, "[", name, "] wanted a last dimension divisible by ",
                   step, ", got ", x.size(-1));
  }
  if (spec.kind == ActivationKind::SiTUGLU) {
    LIGATURE_CHECK(spec.beta1 > 0 && spec.beta2 > 0, "[", name, "] wanted positive betas, got ",
                   spec.beta1, " and ", spec.beta2);
  }
  if (scales.defined()) {
    const auto wanted = x.sizes().slice(0, x.dim() - 1);
    LIGATURE_CHECK(scales.sizes() == wanted, "[", name, "] wanted scales of shape ", wanted,
                   ", got ", scales.sizes());
  }
}

void check_activation_gradient(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                               const Tensor& scales, bool need_dscales) {
  check_activation(x, spec, scales);
  LIGATURE_CHECK(dy.numel() * (is_gated(spec.kind) ? 2 : 1) == x.numel(), "[",
                 activation_name(spec.kind), "] wanted a gradient for an input of shape ",
                 x.sizes(), ", got one of shape ", dy.sizes());
  LIGATURE_CHECK(!need_dscales || scales.defined(), "[", activation_name(spec.kind),
                 "] wanted scales for their gradient, got none");
}

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales) {
  const KernelScope scope("activation_forward", x);
  check_activation(x, spec, scales);
  return backend_for(x).activation_forward(x, spec, scales);
}

Tensor activation_forward_(Tensor& x, const ActivationSpec& spec) {
  const KernelScope scope("activation_forward_", x);
  LIGATURE_CHECK(!is_gated(spec.kind), "[activation_forward_] wanted an activation that keeps the ",
                 "shape, got ", activation_name(spec.kind));
  check_activation(x, spec, {});
  return backend_for(x).activation_forward_(x, spec);
}

ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias, bool over_x) {
  const KernelScope scope("activation_backward", x);
  check_activation_gradient(dy, x, spec, scales, need_dscales);
  return backend_for(x).activation_backward(dy, x, spec, scales, need_dscales, need_dbias, over_x);
}

ActivationRecompute activation_recompute(const Tensor& dy, const Tensor& x,
                                         const ActivationSpec& spec, bool need_dbias, bool over_dy,
                                         bool over_x) {
  const KernelScope scope("activation_recompute", x);
  check_activation_gradient(dy, x, spec, {}, false);
  return backend_for(x).activation_recompute(dy, x, spec, need_dbias, over_dy, over_x);
}

ActivationRecompute activation_recompute_scaled(const Tensor& dy, const Tensor& x,
                                                const ActivationSpec& spec, const Tensor& scales,
                                                bool need_dscales, bool over_dy, bool over_x) {
  const KernelScope scope("activation_recompute", x);
  check_activation_gradient(dy, x, spec, scales, need_dscales);
  const Backend& backend = backend_for(x);
  if (backend.activation_recompute_scaled != nullptr) {
    return backend.activation_recompute_scaled(dy, x, spec, scales, need_dscales, over_dy, over_x);
  }
  Tensor y = backend.activation_forward(x, spec, scales);
  auto grads = backend.activation_backward(dy, x, spec, scales, need_dscales, false, over_x);
  return {std::move(y), std::move(grads.dx), {}, std::move(grads.dscales)};
}

}  // namespace ligature::kernels
