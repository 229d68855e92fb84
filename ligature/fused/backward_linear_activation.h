// The backward of an activation and of the linear after it: where the device has a product that
// ends in a gated activation's gradient, the gradient between the two is never written.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/activation.h"
#include "ligature/ops/basic_linear.h"

namespace ligature {

class BackwardLinearActivation : public FusedOperation {
 public:
  explicit BackwardLinearActivation(const OpList& ops);

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool takes_saved() const override { return true; }

 private:
  ActivationOperation& activation_;
  BasicLinearImpl& linear_;
};

FusionRule backward_linear_activation_rule();

}  // namespace ligature
