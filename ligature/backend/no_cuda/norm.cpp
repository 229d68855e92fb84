// See absent.h.
#include "ligature/backend/cuda/norm.h"

#include "ligature/backend/no_cuda/absent.h"

namespace ligature::cuda {

NormForward layer_norm_forward(const Tensor&, const Tensor&, const Tensor&, double, bool,
                               at::ScalarType) {
  refuse("layer_norm_forward");
}
NormForward rms_norm_forward(const Tensor&, const Tensor&, double, bool, at::ScalarType) {
  refuse("rms_norm_forward");
}
Tensor layer_norm_apply(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        bool, at::ScalarType) {
  refuse("layer_norm_apply");
}
Tensor rms_norm_apply(const Tensor&, const Tensor&, const Tensor&, bool, at::ScalarType) {
  refuse("rms_norm_apply");
}
NormBackward layer_norm_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                 const Tensor&, bool, const Tensor&, bool, bool, bool) {
  refuse("layer_norm_backward");
}
NormBackward rms_norm_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool,
                               const Tensor&, bool, bool) {
  refuse("rms_norm_backward");
}
L2Forward l2_normalization_forward(const Tensor&, double) { refuse("l2_normalization_forward"); }
Tensor l2_normalization_backward(const Tensor&, const Tensor&, const Tensor&) {
  refuse("l2_normalization_backward");
}
NormForward norm_statistics(const Tensor&, int64_t, double, bool) { refuse("norm_statistics"); }

}  // namespace ligature::cuda
