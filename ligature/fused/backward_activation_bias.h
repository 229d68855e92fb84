// Backward: an activation's gradient, and in the same pass over it the gradient of the bias before.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/activation.h"
#include "ligature/ops/bias.h"

namespace ligature {

class BackwardActivationBias : public FusedOperation {
 public:
  LIGATURE_BUILTIN(BackwardActivationBias)
  explicit BackwardActivationBias(const OpList& ops);

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool releases_saved() const override { return true; }

 private:
  BiasImpl& bias_;
  ActivationOperation& activation_;
};

FusionRule backward_activation_bias_rule();

}  // namespace ligature
