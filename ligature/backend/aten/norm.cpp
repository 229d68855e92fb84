// The norms through ATen, row by row of a [rows, n] view. Forward and apply share one expression,
// so that recomputed values are the same bits.
#include "ligature/backend/aten/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>

#include <utility>

#include "ligature/backend/aten/compute.h"

namespace ligature::aten {
namespace {

Tensor as_rows(const Tensor& t, int64_t n) {
  return t.defined() ? t.view({n > 0 ? t.numel() / n : 0, n}) : t;
}

Tensor make_gamma(const Tensor& x, const Tensor& w, bool zero_centered) {
  const Tensor gamma = to_compute(w, x).view({-1});
  return zero_centered ? gamma + 1 : gamma;
}

// x and the statistics of its rows; the mean may be undefined.
Tensor normalized(const Tensor& x, const Tensor& mean, const Tensor& rstd, int64_t n) {
  Tensor rows = as_rows(to_compute(x, x), n);
  if (mean.defined()) rows = rows - mean.unsqueeze(1);
  return rows * rstd.unsqueeze(1);
}

Tensor apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
             const Tensor& b, bool zero_centered, at::ScalarType out_dtype) {
  Tensor y = normalized(x, mean, rstd, w.numel()) * make_gamma(x, w, zero_centered);
  if (b.defined()) y = y + to_compute(b, x).view({-1});
  return y.to(out_dtype).view(x.sizes());
}

// rstd * (g - xhat * sum(g xhat) / divisor), less the mean of g where centered.
Tensor input_grad(const Tensor& g, const Tensor& xhat, const Tensor& rstd, bool centered,
                  double divisor) {
  Tensor dx = g - xhat * ((g * xhat).sum({1}, true) / divisor);
  if (centered) dx = dx - g.mean({1}, true);
  return dx * rstd.unsqueeze(1);
}

NormBackward backward(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                      const Tensor& w, bool zero_centered, const Tensor& add, bool need_dx,
                      bool need_dw, bool need_db) {
  const int64_t n = w.numel();
  const Tensor xhat = normalized(x, mean, rstd, n);
  const Tensor dy_rows = as_rows(to_compute(dy, x), n);
  NormBackward result;
  if (need_dx) {
    const Tensor g = dy_rows * make_gamma(x, w, zero_centered);
    Tensor dx = input_grad(g, xhat, rstd, mean.defined(), static_cast<double>(n));
    if (add.defined()) dx = dx + as_rows(to_compute(add, x), n);
    result.dx = dx.to(x.scalar_type()).view(x.sizes());
  }
  if (need_dw) result.dw = (dy_rows * xhat).sum({0}).to(w.scalar_type()).view(w.sizes());
  if (need_db) result.db = dy_rows.sum({0}).to(w.scalar_type()).view(w.sizes());
  return result;
}

}  // namespace

NormForward layer_norm_forward(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                               bool zero_centered_gamma, at::ScalarType out_dtype) {
  const Tensor rows = as_rows(to_compute(x, x), w.numel());
  Tensor mean = rows.mean({1});
  mean = mean + (rows - mean.unsqueeze(1)).mean({1});
  const Tensor deviation = rows - mean.unsqueeze(1);
  const Tensor rstd = ((deviation * deviation).mean({1}) + eps).rsqrt();
  return {apply(x, mean, rstd, w, b, zero_centered_gamma, out_dtype), mean, rstd};
}

NormForward rms_norm_forward(const Tensor& x, const Tensor& w, double eps, bool zero_centered_gamma,
                             at::ScalarType out_dtype) {
  const Tensor rows = as_rows(to_compute(x, x), w.numel());
  const Tensor rstd = ((rows * rows).mean({1}) + eps).rsqrt();
  return {apply(x, {}, rstd, w, {}, zero_centered_gamma, out_dtype), {}, rstd};
}

Tensor layer_norm_apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
                        const Tensor& b, bool zero_centered_gamma, at::ScalarType out_dtype) {
  return apply(x, mean, rstd, w, b, zero_centered_gamma, out_dtype);
}

Tensor rms_norm_apply(const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool zero_centered_gamma, at::ScalarType out_dtype) {
  return apply(x, {}, rstd, w, {}, zero_centered_gamma, out_dtype);
}

NormBackward layer_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                 const Tensor& rstd, const Tensor& w, bool zero_centered_gamma,
                                 const Tensor& add, bool need_dx, bool need_dw, bool need_db) {
  return backward(dy, x, mean, rstd, w, zero_centered_gamma, add, need_dx, need_dw, need_db);
}

NormBackward rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd,
                               const Tensor& w, bool zero_centered_gamma, const Tensor& add,
                               bool need_dx, bool need_dw) {
  return backward(dy, x, {}, rstd, w, zero_centered_gamma, add, need_dx, need_dw, false);
}

L2Forward l2_normalization_forward(const Tensor& x, double eps) {
  const Tensor rows = as_rows(to_compute(x, x), x.size(-1));
  Tensor rstd = ((rows * rows).sum({1}) + eps).rsqrt();
  Tensor y = normalized(x, {}, rstd, x.size(-1)).to(x.scalar_type()).view(x.sizes());
  return {std::move(y), std::move(rstd)};
}

Tensor l2_normalization_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd) {
  const int64_t n = x.size(-1);
  const Tensor xhat = normalized(x, {}, rstd, n);
  return input_grad(as_rows(to_compute(dy, x), n), xhat, rstd, false, 1.0)
      .to(x.scalar_type())
      .view(x.sizes());
}

}  // namespace ligature::aten
