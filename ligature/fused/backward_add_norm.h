// Backward: the gradient of a norm's input joins that of a branch before it is rounded.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/norm.h"

namespace ligature {

class BackwardAddNorm : public FusedOperation {
 public:
  LIGATURE_BUILTIN(BackwardAddNorm)
  BackwardAddNorm(std::string name, const OpList& ops);

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;

 private:
  NormOperation& norm_;
};

class BackwardAddLayerNorm : public BackwardAddNorm {
 public:
  explicit BackwardAddLayerNorm(const OpList& ops) : BackwardAddNorm("BackwardAddLayerNorm", ops) {}
};

class BackwardAddRMSNorm : public BackwardAddNorm {
 public:
  explicit BackwardAddRMSNorm(const OpList& ops) : BackwardAddNorm("BackwardAddRMSNorm", ops) {}
};

FusionRule backward_add_layer_norm_rule();
FusionRule backward_add_rms_norm_rule();

}  // namespace ligature
