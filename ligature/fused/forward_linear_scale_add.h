// Forward: a linear times a constant plus a branch, in one GEMM.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/add_extra_input.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/constant_scale.h"

namespace ligature {

class ForwardLinearScaleAdd : public FusedOperation {
 public:
  LIGATURE_BUILTIN(ForwardLinearScaleAdd)
  explicit ForwardLinearScaleAdd(const OpList& ops);

  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;

 private:
  BasicLinearImpl& linear_;
  ConstantScaleImpl& scale_;
  AddExtraInputImpl& add_;
};

FusionRule forward_linear_scale_add_rule();

}  // namespace ligature
