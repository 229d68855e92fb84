// Checks the normalized size and sends the norms to the backend of the tensor.
#include "ligature/kernels/norm.h"

#include "ligature/check.h"
#include "ligature/kernels/arguments.h"
#include "ligature/kernels/backend.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {
namespace {

void check_gradient(const char* op, const Tensor& dy, const Tensor& x) {
  LIGATURE_CHECK(dy.numel() == x.numel(), "[", op, "] wanted a gradient of shape ", x.sizes(),
                 ", got ", dy.sizes());
}

}  // namespace

void check_norm(const char* op, const Tensor& x, const Tensor& w) {
  const int64_t hidden = w.numel();
  LIGATURE_CHECK(hidden > 0 && x.numel() % hidden == 0, "[", op, "] wanted an input of rows of ",
                 hidden, " elements, got shape ", x.sizes());
}

NormForward layer_norm_forward(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                               bool zero_centered_gamma, at::ScalarType out_dtype) {
  const KernelScope scope("layer_norm_forward", x);
  check_norm("layer_norm_forward", x, w);
  return backend_for(x).layer_norm_forward(x, w, b, eps, zero_centered_gamma, out_dtype);
}

NormForward rms_norm_forward(const Tensor& x, const Tensor& w, double eps, bool zero_centered_gamma,
                             at::ScalarType out_dtype) {
  const KernelScope scope("rms_norm_forward", x);
  check_norm("rms_norm_forward", x, w);
  return backend_for(x).rms_norm_forward(x, w, eps, zero_centered_gamma, out_dtype);
}

Tensor layer_norm_apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
                        const Tensor& b, bool zero_centered_gamma, at::ScalarType out_dtype) {
  const KernelScope scope("layer_norm_apply", x);
  check_norm("layer_norm_apply", x, w);
  return backend_for(x).layer_norm_apply(x, mean, rstd, w, b, zero_centered_gamma, out_dtype);
}

Tensor rms_norm_apply(const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool zero_centered_gamma, at::ScalarType out_dtype) {
  const KernelScope scope("rms_norm_apply", x);
  check_norm("rms_norm_apply", x, w);
  return backend_for(x).rms_norm_apply(x, rstd, w, zero_centered_gamma, out_dtype);
}

NormBackward layer_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                 const Tensor& rstd, const Tensor& w, bool zero_centered_gamma,
                                 const Tensor& add, bool need_dx, bool need_dw, bool need_db) {
  const KernelScope scope("layer_norm_backward", x);
  check_norm("layer_norm_backward", x, w);
  check_gradient("layer_norm_backward", dy, x);
  return backend_for(x).layer_norm_backward(dy, x, mean, rstd, w, zero_centered_gamma, add, need_dx,
                                            need_dw, need_db);
}

NormBackward rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd,
                               const Tensor& w, bool zero_centered_gamma, const Tensor& add,
                               bool need_dx, bool need_dw) {
  const KernelScope scope("rms_norm_backward", x);
  check_norm("rms_norm_backward", x, w);
  check_gradient("rms_norm_backward", dy, x);
  return backend_for(x).rms_norm_backward(dy, x, rstd, w, zero_centered_gamma, add, need_dx,
                                          need_dw);
}

L2Forward l2_normalization_forward(const Tensor& x, double eps) {
  const KernelScope scope("l2_normalization_forward", x);
  return backend_for(x).l2_normalization_forward(x, eps);
}

Tensor l2_normalization_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd) {
  const KernelScope scope("l2_normalization_backward", x);
  check_gradient("l2_normalization_backward", dy, x);
  return backend_for(x).l2_normalization_backward(dy, x, rstd);
}

}  // namespace ligature::kernels
