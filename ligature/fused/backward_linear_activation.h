// The backward of a gated activation and of the linear after it: where the device has a GEMM that
// ends in the activation's gradient, the gradient between the two is never written.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/activation.h"
#include "ligature/ops/basic_linear.h"

namespace ligature {

class BackwardLinearActivation : public FusedOperation {
 public:
  LIGATURE_BUILTIN(BackwardLinearActivation)
  explicit BackwardLinearActivation(const OpList& ops);

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool releases_saved() const override { return true; }

 private:
  Value activation_backward(CtxList ctxs, LinearBwdArgs args, FuserBackwardResult& out);

  ActivationOperation& activation_;
  BasicLinearImpl& linear_;
};

FusionRule backward_linear_activation_rule();

}  // namespace ligature
