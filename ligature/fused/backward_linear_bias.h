// The backward of a linear and of its bias: where the device has such a product, the bias' gradient
// comes with the weight's.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/bias.h"

namespace ligature {

class BackwardLinearBias : public FusedOperation {
 public:
  LIGATURE_BUILTIN(BackwardLinearBias)
  explicit BackwardLinearBias(const OpList& ops);

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool releases_saved() const override { return true; }

 private:
  BasicLinearImpl& linear_;
  BiasImpl& bias_;
};

/// For linears and biases that no other fusion took.
FusionRule backward_linear_bias_rule();

}  // namespace ligature
