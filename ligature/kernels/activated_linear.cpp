// The checks of sizes, and the call of the one backend that has such products.
#include "ligature/kernels/activated_linear.h"

#include <ATen/ops/empty.h>

#include "ligature/backend/cuda/activated_linear.h"
#include "ligature/check.h"
#include "ligature/kernels/arguments.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {
namespace {

void check_operands(const char* op, const Tensor& x, const Tensor& w, int64_t inner,
                    const ActivationSpec& spec) {
  LIGATURE_CHECK(spec.kind == ActivationKind::GELU || spec.kind == ActivationKind::ReLU, "[", op,
                 "] wanted GELU or ReLU, got ", activation_name(spec.kind));
  check_product(op, x, w, inner);
}

Tensor aux_like(const Tensor& y, const ActivationSpec& spec) {
  if (spec.kind == ActivationKind::GELU) return at::empty(y.sizes(), y.options());
  const int64_t columns = y.size(-1);
  return at::empty({columns == 0 ? 0 : y.numel() / columns, cuda::mask_bytes(columns)},
                   y.options().dtype(at::kByte));
}

}  // namespace

bool has_activated_linear(const ActivationSpec& spec, at::ScalarType dtype, at::Device device,
                          bool backward) {
  return device.is_cuda() && cuda::has_activated_linear(spec, dtype, device, backward);
}

bool has_weight_bias_grad(at::ScalarType dtype, at::Device device) {
  return device.is_cuda() && cuda::has_weight_bias_grad(dtype, device);
}

bool runs_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                            const ActivationSpec& spec, bool need_aux) {
  return cuda::runs_activated_forward(x, w, bias, spec, need_aux);
}

ActivatedForward linear_activated_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                                          const ActivationSpec& spec, bool need_aux) {
  KernelScope scope("linear_activated_forward", "cublaslt");
  check_operands("linear_activated_forward", x, w, 1, spec);
  scope.gemm(x.numel(), w.size(0));
  LIGATURE_CHECK(!bias.defined() || (bias.dim() == 1 && bias.size(0) == w.size(0)),
                 "[linear_activated_forward] wanted a bias of ", w.size(0), ", got ",
                 bias.defined() ? bias.sizes() : at::IntArrayRef());
  if (x.is_meta()) {
    Tensor y = rows_like(x, w.size(0));
    return {y, need_aux ? aux_like(y, spec) : Tensor()};
  }
  return cuda::linear_activated_forward(x, w, bias, spec, need_aux);
}

bool runs_activated_backward(const Tensor& dy, const Tensor& w, const Tensor& aux,
                             const ActivationSpec& spec, bool need_dbias) {
  return cuda::runs_activated_backward(dy, w, aux, spec, need_dbias);
}

ActivatedBackward linear_activated_backward(const Tensor& dy, const Tensor& w, const Tensor& aux,
                                            const ActivationSpec& spec, bool need_dbias) {
  KernelScope scope("linear_activated_backward", "cublaslt");
  check_operands("linear_activated_backward", dy, w, 0, spec);
  scope.gemm(dy.numel(), w.size(1));
  if (dy.is_meta()) {
    return {rows_like(dy, w.size(1)), need_dbias ? at::empty({w.size(1)}, dy.options()) : Tensor()};
  }
  return cuda::linear_activated_backward(dy, w, aux, spec, need_dbias);
}

bool runs_weight_bias_grad(const Tensor& dy, const Tensor& x) {
  return cuda::runs_weight_bias_grad(dy, x);
}

WeightBiasGrads linear_weight_bias_grad(const Tensor& dy, const Tensor& x) {
  KernelScope scope("linear_weight_bias_grad", "cublaslt");
  LIGATURE_CHECK(dy.dim() > 0 && x.dim() > 0,
                 "[linear_weight_bias_grad] wanted inputs with at least one dimension, got ",
                 dy.dim(), " and ", x.dim());
  scope.gemm(dy.numel(), x.size(-1));
  if (dy.is_meta()) {
    return {at::empty({dy.size(-1), x.size(-1)}, dy.options()),
            at::empty({dy.size(-1)}, dy.options())};
  }
  return cuda::linear_weight_bias_grad(dy, x);
}

}  // namespace ligature::kernels
