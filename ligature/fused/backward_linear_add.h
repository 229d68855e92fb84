// Backward: the gradient of a linear's input joins that of a branch in the GEMM.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/make_extra_output.h"

namespace ligature {

class BackwardLinearAdd : public FusedOperation {
 public:
  LIGATURE_BUILTIN(BackwardLinearAdd)
  explicit BackwardLinearAdd(const OpList& ops);

  FuserBackwardResult fuser_backward(CtxList ctxs, const Value& grad_output,
                                     GradList grad_extra_outputs) override;
  bool releases_saved() const override { return true; }

 private:
  MakeExtraOutputImpl& fork_;
  BasicLinearImpl& linear_;
};

FusionRule backward_linear_add_rule();

}  // namespace ligature
