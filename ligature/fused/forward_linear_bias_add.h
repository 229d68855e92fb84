// Forward: a linear, its bias and the addition of a branch in one GEMM.
#pragma once

#include "ligature/fuser/rule.h"
#include "ligature/ops/add_extra_input.h"
#include "ligature/ops/basic_linear.h"
#include "ligature/ops/bias.h"

namespace ligature {

class ForwardLinearBiasAdd : public FusedOperation {
 public:
  LIGATURE_BUILTIN(ForwardLinearBiasAdd)
  explicit ForwardLinearBiasAdd(const OpList& ops);

  FuserForwardResult fuser_forward_compute(const Value& input, ArgsList args) override;
  void fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                              ArgsList args) override;

 private:
  BasicLinearImpl& linear_;
  BiasImpl* bias_;  // null without one
  AddExtraInputImpl& add_;
};

FusionRule forward_linear_bias_add_rule();

}  // namespace ligature
