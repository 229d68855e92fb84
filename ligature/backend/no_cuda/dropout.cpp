// See absent.h.
#include "ligature/backend/cuda/dropout.h"

#include "ligature/backend/no_cuda/absent.h"

namespace ligature::cuda {

DropoutForward dropout_forward(const Tensor&, double) { refuse("dropout_forward"); }
Tensor dropout_backward(const Tensor&, const Tensor&, double) { refuse("dropout_backward"); }

}  // namespace ligature::cuda
