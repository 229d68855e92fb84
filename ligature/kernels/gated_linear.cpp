// The checks of sizes, and the call of the one backend that has such kernels.
#include "ligature/kernels/gated_linear.h"

#include <ATen/ops/empty.h>

#include "ligature/backend/cuda/gated_linear.h"
#include "ligature/check.h"
#include "ligature/kernels/arguments.h"
#include "ligature/kernels/log.h"

namespace ligature::kernels {
namespace {

void check_operands(const char* op, const Tensor& x, const Tensor& w, int64_t inner,
                    const ActivationSpec& spec) {
  LIGATURE_CHECK(is_gated(spec.kind), "[", op, "] wanted a gated activation, got ",
                 activation_name(spec.kind));
  check_product(op, x, w, inner);
}

}  // namespace

bool has_gated_linear(const ActivationSpec& spec, at::ScalarType dtype, at::Device device) {
  return device.is_cuda() && cuda::has_gated_linear(spec, dtype, device);
}

bool runs_gated_linear(const Tensor& x, const Tensor& w, const ActivationSpec& spec,
                       bool backward) {
  return cuda::runs_gated_linear(x, w, spec, backward);
}

GatedForward linear_gated_forward(const Tensor& x, const Tensor& w, const ActivationSpec& spec) {
  KernelScope scope("linear_gated_forward", "cuda");
  check_operands("linear_gated_forward", x, w, 1, spec);
  scope.gemm(x.numel(), w.size(0));
  if (x.is_meta()) return {rows_like(x, w.size(0)), rows_like(x, w.size(0) / 2)};
  return cuda::linear_gated_forward(x, w, spec);
}

GatedBackward linear_gated_backward(const Tensor& dy, const Tensor& w, const Tensor& z,
                                    const ActivationSpec& spec, bool need_a, bool over_z) {
  KernelScope scope("linear_gated_backward", "cuda");
  check_operands("linear_gated_backward", dy, w, 0, spec);
  scope.gemm(dy.numel(), w.size(1));
  at::DimVector wanted(dy.sizes());
  wanted.back() = 2 * w.size(1);
  LIGATURE_CHECK(z.sizes() == wanted, "[linear_gated_backward] wanted z of shape ",
                 at::IntArrayRef(wanted), ", got ", z.sizes());
  if (dy.is_meta()) {
    return {over_z ? z : rows_like(dy, 2 * w.size(1)),
            need_a ? rows_like(dy, w.size(1)) : Tensor()};
  }
  return cuda::linear_gated_backward(dy, w, z, spec, need_a, over_z);
}

}  // namespace ligature::kernels
