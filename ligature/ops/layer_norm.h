// y = (x - mean) / sqrt(var + eps) * weight + bias over the trailing dimensions.
#pragma once

#include "ligature/ops/norm.h"

namespace ligature {

using LayerNormOptions = NormOptions;

/// Example:
/// ```
/// LayerNorm norm(LayerNormOptions({256}));
/// ```
class LayerNormImpl : public Operation<LayerNormImpl, NormOperation> {
 public:
  LIGATURE_BUILTIN(LayerNormImpl)
  explicit LayerNormImpl(Options given) : Operation("LayerNorm", std::move(given), true) {}

  kernels::NormForward forward(const Tensor& x, at::ArrayRef<Tensor> params,
                               at::ScalarType out_dtype) const override;
  kernels::NormQuantized forward_quantize(const Tensor& x, at::ArrayRef<Tensor> params,
                                          at::ScalarType out_dtype,
                                          const kernels::QuantizeArgs& args) const override;
  Tensor apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
               const Tensor& b, bool zero_centered_gamma, at::ScalarType out_dtype) const override;

 protected:
  kernels::NormBackward backward_kernel(const NormBwdArgs& args) const override;
};
TORCH_MODULE(LayerNorm);

}  // namespace ligature
