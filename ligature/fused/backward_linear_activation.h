// The backward of an activation, of the bias before it where there is one, and of the linear after
// it: where the device has a product that ends in the activation's gradient, the gradient between
// the two is never written.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/activation.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/bias.h"

namespace ligature {

class BackwardLinearActivation : public FusedOperation {
 public:
  explicit BackwardLinearActivation(const OpList& ops);

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool takes_saved() const override { return true; }

 private:
  /// The gradient of the activation's input, and in `dbias` that of the bias where it is needed.
  Value activation_backward(CtxList ctxs, LinearBwdArgs args, FuserBackwardResult& out,
                            bool need_dbias, Tensor& dbias);

  BiasImpl* bias_;  // null without one
  size_t at_;       // of the activation; the linear follows
  ActivationOperation& activation_;
  BasicLinearImpl& linear_;
};

/// Before the activation's and the bias' own fusion.
FusionRule backward_linear_activation_bias_rule();
FusionRule backward_linear_activation_rule();

}  // namespace ligature
