// Forward: a bias and an activation, in one pass over memory.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/activation.h"
#include "ligature/ops/bias.h"

namespace ligature {

class ForwardBiasActivation : public FusedOperation {
 public:
  LIGATURE_BUILTIN(ForwardBiasActivation)
  explicit ForwardBiasActivation(const OpList& ops);

  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;

 private:
  BiasImpl& bias_;
  ActivationOperation& activation_;
};

FusionRule forward_bias_activation_rule();

}  // namespace ligature
