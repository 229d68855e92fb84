// Layer, RMS and L2 normalization. The weight's element count is the normalized size, so several
// normalized dimensions are one. Statistics are float (double for double), one per row; weights may
// have another dtype than the input. With `zero_centered_gamma` the factor is 1 + w.
#pragma once

#include <ATen/core/Tensor.h>

namespace ligature::kernels {

using at::Tensor;

struct NormForward {
  Tensor y;
  Tensor mean;  // undefined for RMSNorm
  Tensor rstd;
};

struct NormBackward {
  Tensor dx;  // x's dtype
  Tensor dw;  // w's dtype and shape
  Tensor db;  // likewise; undefined for RMSNorm
};

struct L2Forward {
  Tensor y;
  Tensor rstd;
};

NormForward layer_norm_forward(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                               bool zero_centered_gamma, at::ScalarType out_dtype);

NormForward rms_norm_forward(const Tensor& x, const Tensor& w, double eps, bool zero_centered_gamma,
                             at::ScalarType out_dtype);

/// The forward's y again, bit for bit, from its saved statistics.
Tensor layer_norm_apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
                        const Tensor& b, bool zero_centered_gamma, at::ScalarType out_dtype);

Tensor rms_norm_apply(const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool zero_centered_gamma, at::ScalarType out_dtype);

/// `add`, where defined, joins dx before it is rounded. What is not needed comes back undefined.
NormBackward layer_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                 const Tensor& rstd, const Tensor& w, bool zero_centered_gamma,
                                 const Tensor& add = {}, bool need_dx = true, bool need_dw = true,
                                 bool need_db = true);

NormBackward rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd,
                               const Tensor& w, bool zero_centered_gamma, const Tensor& add = {},
                               bool need_dx = true, bool need_dw = true);

/// y = x * rstd with rstd = 1 / sqrt(sum(x^2) + eps) over the last dimension.
L2Forward l2_normalization_forward(const Tensor& x, double eps);

Tensor l2_normalization_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd);

}  // namespace ligature::kernels
