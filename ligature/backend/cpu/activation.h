// The CPU backend's activation kernels, called by kernels/activation.cpp.
#pragma once

#include "ligature/backend/cpu/row_source.h"
#include "ligature/kernels/activation.h"

namespace ligature::cpu {

using at::Tensor;
using kernels::ActivationBackward;
using kernels::ActivationRecompute;
using kernels::ActivationSpec;

Tensor activation_forward(const Tensor& x, const ActivationSpec& spec, const Tensor& scales);
Tensor activation_forward_(Tensor& x, const ActivationSpec& spec);
ActivationBackward activation_backward(const Tensor& dy, const Tensor& x,
                                       const ActivationSpec& spec, const Tensor& scales,
                                       bool need_dscales, bool need_dbias, bool over_x = false);
ActivationRecompute activation_recompute(const Tensor& dy, const Tensor& x,
                                         const ActivationSpec& spec, bool need_dbias, bool over_dy,
                                         bool over_x);
ActivationRecompute activation_recompute_scaled(const Tensor& dy, const Tensor& x,
                                                const ActivationSpec& spec, const Tensor& scales,
                                                bool need_dscales, bool over_dy, bool over_x);

/// The forward's y as rows to be computed, the same bits.
std::unique_ptr<RowSource> activation_forward_rows(const Tensor& x, const ActivationSpec& spec,
                                                   const Tensor& scales);

/// The backward's dx likewise, and its sums, which the walk over all rows gathers.
class ActivationBackwardRows : public RowSource {
 public:
  /// After that walk.
  virtual void write_sums() = 0;
  Tensor dscales;
  Tensor dbias;
};
std::unique_ptr<ActivationBackwardRows> activation_backward_rows(const Tensor& dy, const Tensor& x,
                                                                 const ActivationSpec& spec,
                                                                 const Tensor& scales,
                                                                 bool need_dscales,
                                                                 bool need_dbias);

}  // namespace ligature::cpu
