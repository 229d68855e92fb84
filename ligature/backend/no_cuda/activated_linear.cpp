// See absent.h.
#include "ligature/backend/cuda/activated_linear.h"

#include "ligature/backend/no_cuda/absent.h"

namespace ligature::cuda {

void set_epilogue_use(EpilogueUse) {}

bool has_activated_linear(const ActivationSpec&, at::ScalarType, at::Device, bool) { return false; }
bool has_weight_bias_grad(at::ScalarType, at::Device) { return false; }

bool takes_activated_forward(const Tensor&, const Tensor&, const Tensor&, const ActivationSpec&,
                             bool) {
  return false;
}

bool takes_activated_backward(const Tensor&, const Tensor&, const Tensor&, const ActivationSpec&,
                              bool) {
  return false;
}

bool takes_weight_bias_grad(const Tensor&, const Tensor&) { return false; }

bool runs_activated_forward(const Tensor&, const Tensor&, const Tensor&, const ActivationSpec&,
                            bool) {
  return false;
}

ActivatedForward linear_activated_forward(const Tensor&, const Tensor&, const Tensor&,
                                          const ActivationSpec&, bool) {
  refuse("linear_activated_forward");
}

bool runs_activated_backward(const Tensor&, const Tensor&, const Tensor&, const ActivationSpec&,
                             bool) {
  return false;
}

ActivatedBackward linear_activated_backward(const Tensor&, const Tensor&, const Tensor&,
                                            const ActivationSpec&, bool) {
  refuse("linear_activated_backward");
}

bool runs_weight_bias_grad(const Tensor&, const Tensor&) { return false; }

WeightBiasGrads linear_weight_bias_grad(const Tensor&, const Tensor&) {
  refuse("linear_weight_bias_grad");
}

}  // namespace ligature::cuda
