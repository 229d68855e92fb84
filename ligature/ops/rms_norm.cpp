#include "ligature/ops/rms_norm.h"

#include "ligature/ops/checks.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(RMSNorm);

kernels::NormForward RMSNormImpl::forward(const Tensor& x, at::ArrayRef<Tensor> params,
                                          at::ScalarType out_dtype) const {
  return kernels::rms_norm_forward(x, contiguous(params[0]), options.eps,
                                   options.zero_centered_gamma, out_dtype);
}

kernels::NormQuantized RMSNormImpl::forward_quantize(const Tensor& x, at::ArrayRef<Tensor> params,
                                                     at::ScalarType out_dtype,
                                                     const kernels::QuantizeArgs& args) const {
  return kernels::rms_norm_forward_quantize(x, contiguous(params[0]), options.eps,
                                            options.zero_centered_gamma, out_dtype, args);
}

Tensor RMSNormImpl::apply(const Tensor& x, const Tensor&, const Tensor& rstd, const Tensor& w,
                          const Tensor&, bool zero_centered_gamma, at::ScalarType out_dtype) const {
  return kernels::rms_norm_apply(x, rstd, contiguous(w), zero_centered_gamma, out_dtype);
}

kernels::NormBackward RMSNormImpl::backward_kernel(const NormBwdArgs& args) const {
  return kernels::rms_norm_backward(args.dy, args.x, args.rstd, args.w, args.zero_centered_gamma,
                                    args.add, args.input_requires_grad, args.weight_requires_grad);
}

}  // namespace ligature
