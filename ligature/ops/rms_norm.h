// y = x / sqrt(mean(x^2) + eps) * weight over the trailing dimensions.
#pragma once

#include "ligature/ops/norm.h"

namespace ligature {

using RMSNormOptions = NormOptions;

/// Example:
/// ```
/// RMSNormOptions options({256});
/// options.zero_centered_gamma = true;
/// RMSNorm norm(options);
/// ```
class RMSNormImpl : public Operation<RMSNormImpl, NormOperation> {
 public:
  LIGATURE_BUILTIN(RMSNormImpl)
  explicit RMSNormImpl(Options given) : Operation("RMSNorm", std::move(given), false) {}

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
TORCH_MODULE(RMSNorm);

}  // namespace ligature
