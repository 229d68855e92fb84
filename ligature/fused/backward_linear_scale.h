// Backward: a constant scale after a linear becomes the alpha of its GEMMs. In low precision the
// gradient is quantized as it comes, before it is scaled.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/constant_scale.h"

namespace ligature {

class BackwardLinearScale : public FusedOperation {
 public:
  LIGATURE_BUILTIN(BackwardLinearScale)
  explicit BackwardLinearScale(const OpList& ops);

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool releases_saved() const override { return true; }

 private:
  BasicLinearImpl& linear_;
  ConstantScaleImpl& scale_;
};

FusionRule backward_linear_scale_rule();

}  // namespace ligature
