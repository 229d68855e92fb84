// See absent.h.
#include "ligature/backend/cuda/activation.h"

#include "ligature/backend/no_cuda/absent.h"

namespace ligature::cuda {

Tensor activation_forward(const Tensor&, const ActivationSpec&, const Tensor&) {
  refuse("activation_forward");
}
Tensor activation_forward_(Tensor&, const ActivationSpec&) { refuse("activation_forward_"); }
ActivationBackward activation_backward(const Tensor&, const Tensor&, const ActivationSpec&,
                                       const Tensor&, bool, bool) {
  refuse("activation_backward");
}

}  // namespace ligature::cuda
