#include "ligature/backend/shapes/kernels.h"

#include <ATen/ops/empty.h>

namespace ligature::shapes {
namespace {

/// A norm's statistics: one per row, in float or, for double, in double.
Tensor per_row(const Tensor& x, int64_t rows) {
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({rows}, x.options().dtype(dtype));
}

}  // namespace

Tensor like(const Tensor& x) { return at::empty(x.sizes(), x.options()); }

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec) {
  at::DimVector sizes(x.sizes());
  if (kernels::is_gated(spec.kind)) sizes.back() /= 2;
  return at::empty(sizes, x.options());
}

ActivationBackward activation_backward(const Tensor& x, const Tensor& scales, bool need_dscales,
                                       bool need_dbias) {
  ActivationBackward out;
  out.dx = like(x);
  if (need_dscales) out.dscales = like(scales);
  if (need_dbias) out.dbias = at::empty({x.size(-1)}, x.options());
  return out;
}

ActivationRecompute activation_recompute(const Tensor& x, const ActivationSpec& spec,
                                         bool need_dbias) {
  ActivationBackward grads = shapes::activation_backward(x, {}, false, need_dbias);
  return {shapes::activation_forward(x, spec), std::move(grads.dx), std::move(grads.dbias)};
}

Tensor bias_backward(const Tensor& dy, int64_t features) {
  return at::empty({features}, dy.options());
}

NormForward norm_forward(const Tensor& x, const Tensor& w, bool with_mean,
                         at::ScalarType out_dtype) {
  const int64_t rows = x.numel() / w.numel();
  return {norm_apply(x, out_dtype), with_mean ? per_row(x, rows) : Tensor(), per_row(x, rows)};
}

Tensor norm_apply(const Tensor& x, at::ScalarType out_dtype) {
  return at::empty(x.sizes(), x.options().dtype(out_dtype));
}

NormBackward norm_backward(const Tensor& x, const Tensor& w, bool need_dx, bool need_dw,
                           bool need_db) {
  return {need_dx ? like(x) : Tensor(), need_dw ? like(w) : Tensor(), need_db ? like(w) : Tensor()};
}

L2Forward l2_normalization_forward(const Tensor& x) {
  const int64_t rows = x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
  return {like(x), per_row(x, rows)};
}

}  // namespace ligature::shapes
