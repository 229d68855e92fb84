// See absent.h.
#include "ligature/backend/cuda/gated_linear.h"

#include "ligature/backend/no_cuda/absent.h"

namespace ligature::cuda {

bool has_gated_linear(const ActivationSpec&, at::ScalarType, at::Device) { return false; }

bool takes_gated_linear(const Tensor&, const Tensor&, const ActivationSpec&, bool) { return false; }

bool runs_gated_linear(const Tensor&, const Tensor&, const ActivationSpec&, bool) { return false; }

GatedForward linear_gated_forward(const Tensor&, const Tensor&, const ActivationSpec&) {
  refuse("linear_gated_forward");
}

GatedBackward linear_gated_backward(const Tensor&, const Tensor&, const Tensor&,
                                    const ActivationSpec&, bool, bool) {
  refuse("linear_gated_backward");
}

bool takes_gated_codes(const QuantizedOperand&, const QuantizedOperand&, const ActivationSpec&,
                       const Format&) {
  return false;
}

bool runs_gated_codes(const QuantizedOperand&, const QuantizedOperand&, const ActivationSpec&,
                      const Format&) {
  return false;
}

GatedForwardQuantized linear_gated_forward_quantize(const QuantizedOperand&,
                                                    const QuantizedOperand&, const ActivationSpec&,
                                                    const QuantizeArgs&, bool) {
  refuse("linear_gated_forward_quantize");
}

}  // namespace ligature::cuda
