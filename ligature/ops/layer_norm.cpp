#include "ligature/ops/layer_norm.h"

#include "ligature/ops/checks.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(LayerNorm);

kernels::NormForward LayerNormImpl::forward(const Tensor& x, at::ArrayRef<Tensor> params,
                                            at::ScalarType out_dtype) const {
  return kernels::layer_norm_forward(x, contiguous(params[0]), contiguous(params[1]), options.eps,
                                     options.zero_centered_gamma, out_dtype);
}

kernels::NormQuantized LayerNormImpl::forward_quantize(const Tensor& x, at::ArrayRef<Tensor> params,
                                                       at::ScalarType out_dtype,
                                                       const kernels::QuantizeArgs& args) const {
  return kernels::layer_norm_forward_quantize(x, contiguous(params[0]), contiguous(params[1]),
                                              options.eps, options.zero_centered_gamma, out_dtype,
                                              args);
}

Tensor LayerNormImpl::apply(const Tensor& x, const Tensor& mean, const Tensor& rstd,
                            const Tensor& w, const Tensor& b, bool zero_centered_gamma,
                            at::ScalarType out_dtype) const {
  return kernels::layer_norm_apply(x, mean, rstd, contiguous(w), contiguous(b), zero_centered_gamma,
                                   out_dtype);
}

kernels::NormBackward LayerNormImpl::backward_kernel(const NormBwdArgs& args) const {
  return kernels::layer_norm_backward(args.dy, args.x, args.mean, args.rstd, args.w,
                                      args.zero_centered_gamma, args.add, args.input_requires_grad,
                                      args.weight_requires_grad, args.bias_requires_grad);
}

}  // namespace ligature
