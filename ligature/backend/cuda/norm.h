// The CUDA backend's norm kernels, called by kernels/norm.cpp.
#pragma once

#include "ligature/kernels/norm.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::L2Forward;
using kernels::NormBackward;
using kernels::NormForward;

NormForward layer_norm_forward(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                               bool zero_centered_gamma, at::ScalarType out_dtype);
NormForward rms_norm_forward(const Tensor& x, const Tensor& w, double eps, bool zero_centered_gamma,
                             at::ScalarType out_dtype);
Tensor layer_norm_apply(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& w,
                        const Tensor& b, bool zero_centered_gamma, at::ScalarType out_dtype);
Tensor rms_norm_apply(const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool zero_centered_gamma, at::ScalarType out_dtype);
NormBackward layer_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                 const Tensor& rstd, const Tensor& w, bool zero_centered_gamma,
                                 const Tensor& add, bool need_dx, bool need_dw, bool need_db);
NormBackward rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd,
                               const Tensor& w, bool zero_centered_gamma, const Tensor& add,
                               bool need_dx, bool need_dw);
L2Forward l2_normalization_forward(const Tensor& x, double eps);
Tensor l2_normalization_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd);

/// The statistics of the forward, bit for bit, without its y: float [rows], the mean where
/// `centered` (LayerNorm).
NormForward norm_statistics(const Tensor& x, int64_t columns, double eps, bool centered);

}  // namespace ligature::cuda
