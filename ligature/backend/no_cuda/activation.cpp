// See absent.h.
#include "ligature/backend/cuda/activation.h"

#include "ligature/backend/cuda/activation_recompute.h"
#include "ligature/backend/no_cuda/absent.h"

namespace ligature::cuda {

Tensor activation_forward(const Tensor&, const ActivationSpec&, const Tensor&) {
  refuse("activation_forward");
}
Tensor activation_forward_(Tensor&, const ActivationSpec&) { refuse("activation_forward_"); }
ActivationBackward activation_backward(const Tensor&, const Tensor&, const ActivationSpec&,
                                       const Tensor&, bool, bool, bool) {
  refuse("activation_backward");
}
ActivationRecompute activation_recompute(const Tensor&, const Tensor&, const ActivationSpec&, bool,
                                         bool, bool) {
  refuse("activation_recompute");
}

}  // namespace ligature::cuda
