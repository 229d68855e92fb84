// Forward: a linear, its bias in the GEMM, and an activation, one of the last two at least.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/activation.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/bias.h"

namespace ligature {

class ForwardLinearBiasActivation : public FusedOperation {
 public:
  LIGATURE_BUILTIN(ForwardLinearBiasActivation)
  explicit ForwardLinearBiasActivation(const OpList& ops);

  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;

 private:
  BasicLinearImpl& linear_;
  BiasImpl* bias_;  // null without one
  ActivationOperation* activation_;
};

FusionRule forward_linear_bias_activation_rule();
/// What is left of linears with a bias when all other fusions have had their turn.
FusionRule forward_linear_bias_rule();

}  // namespace ligature
