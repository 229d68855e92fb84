// The backend of tensors without memory (on the meta device): it tells the shapes and dtypes of the
// results and computes nothing. A plan is traced with it.
#include "ligature/kernels/backend.h"

#include <ATen/ops/empty.h>

#include "ligature/kernels/quantized_shapes.h"

namespace ligature::meta {
namespace {

using at::Tensor;
using kernels::ActivationSpec;
using kernels::QuantizeArgs;
using kernels::QuantizedMatrix;

Tensor like(const Tensor& x) { return at::empty(x.sizes(), x.options()); }

Tensor like_where(bool wanted, const Tensor& x) { return wanted ? like(x) : Tensor(); }

/// A norm's statistics: one per row, in float or, for double, in double.
Tensor per_row(const Tensor& x, int64_t rows) {
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({rows}, x.options().dtype(dtype));
}

Tensor normed(const Tensor& x, at::ScalarType out_dtype) {
  return at::empty(x.sizes(), x.options().dtype(out_dtype));
}

kernels::NormForward layer_norm_forward(const Tensor& x, const Tensor& w, const Tensor&, double,
                                        bool, at::ScalarType out_dtype) {
  const int64_t rows = x.numel() / w.numel();
  return {normed(x, out_dtype), per_row(x, rows), per_row(x, rows)};
}

kernels::NormForward rms_norm_forward(const Tensor& x, const Tensor& w, double, bool,
                                      at::ScalarType out_dtype) {
  return {normed(x, out_dtype), {}, per_row(x, x.numel() / w.numel())};
}

Tensor layer_norm_apply(const Tensor& x, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        bool, at::ScalarType out_dtype) {
  return normed(x, out_dtype);
}

Tensor rms_norm_apply(const Tensor& x, const Tensor&, const Tensor&, bool,
                      at::ScalarType out_dtype) {
  return normed(x, out_dtype);
}

kernels::NormBackward layer_norm_backward(const Tensor&, const Tensor& x, const Tensor&,
                                          const Tensor&, const Tensor& w, bool, const Tensor&,
                                          bool need_dx, bool need_dw, bool need_db) {
  return {like_where(need_dx, x), like_where(need_dw, w), like_where(need_db, w)};
}

kernels::NormBackward rms_norm_backward(const Tensor&, const Tensor& x, const Tensor&,
                                        const Tensor& w, bool, const Tensor&, bool need_dx,
                                        bool need_dw) {
  return {like_where(need_dx, x), like_where(need_dw, w), {}};
}

kernels::L2Forward l2_normalization_forward(const Tensor& x, double) {
  return {like(x), per_row(x, x.size(-1) == 0 ? 0 : x.numel() / x.size(-1))};
}

Tensor l2_normalization_backward(const Tensor&, const Tensor& x, const Tensor&) { return like(x); }

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor&) {
  at::DimVector sizes(x.sizes());
  if (kernels::is_gated(spec.kind)) sizes.back() /= 2;
  return at::empty(sizes, x.options());
}

Tensor activation_forward_(Tensor& x, const ActivationSpec&) { return x; }

kernels::ActivationBackward activation_backward(const Tensor&, const Tensor& x,
                                                const ActivationSpec&, const Tensor& scales,
                                                bool need_dscales, bool need_dbias, bool) {
  return {like(x), like_where(need_dscales, scales),
          need_dbias ? at::empty({x.size(-1)}, x.options()) : Tensor()};
}

kernels::ActivationRecompute activation_recompute(const Tensor& dy, const Tensor& x,
                                                  const ActivationSpec& spec, bool need_dbias, bool,
                                                  bool) {
  auto grads = meta::activation_backward(dy, x, spec, {}, false, need_dbias, false);
  return {meta::activation_forward(x, spec, {}), std::move(grads.dx), std::move(grads.dbias)};
}

Tensor bias_forward(const Tensor& x, const Tensor&) { return like(x); }

Tensor bias_backward(const Tensor& dy, int64_t features) {
  return at::empty({features}, dy.options());
}

kernels::BiasActivation bias_activation_forward(const Tensor& x, const Tensor&,
                                                const ActivationSpec& spec, bool need_z) {
  return {meta::activation_forward(x, spec, {}), like_where(need_z, x)};
}

kernels::DropoutForward dropout_forward(const Tensor& x, double) {
  return {like(x), at::empty(x.sizes(), x.options().dtype(at::kBool))};
}

Tensor dropout_backward(const Tensor& dy, const Tensor&, double) { return like(dy); }

kernels::QuantizedPair quantize(const Tensor& x, const QuantizeArgs& args) {
  return shapes::quantize(x.sizes(), args, x.options());
}

Tensor hadamard(const Tensor& x, bool) { return shapes::hadamard(x); }

const kernels::Backend kBackend{
    .name = "meta",
    .layer_norm_forward = layer_norm_forward,
    .rms_norm_forward = rms_norm_forward,
    .layer_norm_apply = layer_norm_apply,
    .rms_norm_apply = rms_norm_apply,
    .layer_norm_backward = layer_norm_backward,
    .rms_norm_backward = rms_norm_backward,
    .l2_normalization_forward = l2_normalization_forward,
    .l2_normalization_backward = l2_normalization_backward,
    .activation_forward = activation_forward,
    .activation_forward_ = activation_forward_,
    .activation_backward = activation_backward,
    .activation_recompute = activation_recompute,
    .bias_forward = bias_forward,
    .bias_backward = bias_backward,
    .dropout_forward = dropout_forward,
    .dropout_backward = dropout_backward,
    .quantize = quantize,
    .update_amax = [](const Tensor&, Tensor&) {},
    .update_quantized_amax = [](const QuantizedMatrix&, const Format&, Tensor&) {},
    .dequantize = [](const Tensor&, const QuantizedMatrix&, const Format&) {},
    .expand = [](const Tensor&, const QuantizedMatrix&, const Format&) {},
    .transpose = shapes::transpose,
    .hadamard = hadamard,
    .bias_activation_forward = bias_activation_forward,
};
[[maybe_unused]] const auto* const before = kernels::register_backend(at::kMeta, &kBackend);

}  // namespace
}  // namespace ligature::meta
