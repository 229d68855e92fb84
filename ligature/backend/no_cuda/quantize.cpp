// See absent.h.
#include "ligature/backend/cuda/quantize.h"

#include "ligature/backend/no_cuda/absent.h"

namespace ligature::cuda {

QuantizedPair quantize(const Tensor&, const QuantizeArgs&) { refuse("quantize"); }
void update_amax(const Tensor&, Tensor&) { refuse("update_amax"); }
void update_amax(const QuantizedMatrix&, const Format&, Tensor&) { refuse("update_amax"); }
void dequantize(const Tensor&, const QuantizedMatrix&, const Format&) { refuse("dequantize"); }
void expand(const Tensor&, const QuantizedMatrix&, const Format&) { refuse("expand"); }
QuantizedMatrix transpose(const QuantizedMatrix&, const Format&, int64_t) { refuse("transpose"); }
Tensor hadamard(const Tensor&, bool) { refuse("hadamard"); }

bool fuses_norm(const Tensor&, const Tensor&, const Tensor&, at::ScalarType, const QuantizeArgs&) {
  refuse("norm_forward_quantize");
}
NormQuantized norm_forward_quantize(const Tensor&, const Tensor&, const Tensor&, double, bool, bool,
                                    const QuantizeArgs&) {
  refuse("norm_forward_quantize");
}

bool fuses_activation(const Tensor&, const ActivationSpec&, const Tensor&, const QuantizeArgs&) {
  refuse("activation_forward_quantize");
}
QuantizedPair activation_forward_quantize(const Tensor&, const ActivationSpec&, const Tensor&,
                                          const QuantizeArgs&) {
  refuse("activation_forward_quantize");
}

bool fuses_activation_backward(const Tensor&, const Tensor&, const ActivationSpec&, const Tensor&,
                               const QuantizeArgs&) {
  refuse("activation_backward_quantize");
}
ActivationBackwardQuantized activation_backward_quantize(const Tensor&, const Tensor&,
                                                         const ActivationSpec&, const Tensor&, bool,
                                                         bool, const QuantizeArgs&) {
  refuse("activation_backward_quantize");
}

std::vector<Tensor> update_delayed(const std::vector<DelayedState>&, int64_t, bool) {
  refuse("update_delayed");
}
bool is_captured(at::Device) { return false; }

}  // namespace ligature::cuda
