#include "ligature/backend/cpu/quantize_rows.h"

#include <utility>

#include "ligature/backend/cpu/activation.h"
#include "ligature/backend/cpu/norm.h"
#include "ligature/backend/cpu/quantize.h"

namespace ligature::cpu {

std::optional<kernels::NormQuantized> layer_norm_forward_quantize(const Tensor& x, const Tensor& w,
                                                                  const Tensor& b, double eps,
                                                                  bool zero_centered_gamma,
                                                                  at::ScalarType out_dtype,
                                                                  const QuantizeArgs& args) {
  if (x.numel() == 0 || w.numel() != x.size(-1)) return std::nullopt;
  const NormRows f = layer_norm_rows(x, w, b, eps, zero_centered_gamma, out_dtype);
  return kernels::NormQuantized{quantize(*f.y, args), f.mean, f.rstd};
}

std::optional<kernels::NormQuantized> rms_norm_forward_quantize(const Tensor& x, const Tensor& w,
                                                                double eps,
                                                                bool zero_centered_gamma,
                                                                at::ScalarType out_dtype,
                                                                const QuantizeArgs& args) {
  if (x.numel() == 0 || w.numel() != x.size(-1)) return std::nullopt;
  const NormRows f = rms_norm_rows(x, w, eps, zero_centered_gamma, out_dtype);
  return kernels::NormQuantized{quantize(*f.y, args), {}, f.rstd};
}

std::optional<kernels::QuantizedPair> activation_forward_quantize(const Tensor& x,
                                                                  const ActivationSpec& spec,
                                                                  const Tensor& scales,
                                                                  const QuantizeArgs& args) {
  if (x.numel() == 0) return std::nullopt;
  return quantize(*activation_forward_rows(x, spec, scales), args);
}

std::optional<kernels::ActivationBackwardQuantized> activation_backward_quantize(
    const Tensor& dy, const Tensor& x, const ActivationSpec& spec, const Tensor& scales,
    bool need_dscales, bool need_dbias, const QuantizeArgs& args) {
  if (x.numel() == 0) return std::nullopt;
  const auto rows = activation_backward_rows(dy, x, spec, scales, need_dscales, need_dbias);
  QuantizedPair dx = quantize(*rows, args);
  rows->write_sums();
  return kernels::ActivationBackwardQuantized{std::move(dx), rows->dscales, rows->dbias};
}

}  // namespace ligature::cpu
