#include "ligature/fused/backward_activation_bias.h"

#include "ligature/fused/common.h"

namespace ligature {

BackwardActivationBias::BackwardActivationBias(const OpList& ops)
    : FusedOperation("BackwardActivationBias", ops),
      bias_(basic_op<BiasImpl>(0)),
      activation_(basic_op<ActivationOperation>(1)) {}

FuserBackwardResult BackwardActivationBias::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                           GradList) {
  FuserBackwardResult out = fused_backward_result(2);
  if (!ctxs[1]->requires_grad.input) return out;
  const bool need_dbias = ctxs[0]->requires_grad.param(0);
  ActivationGrads grads =
      activation_.backward(*ctxs[1], grad_output, need_dbias, ctxs[0]->grad_input_target());
  if (need_dbias) out.grad_params[0] = {bias_.cast_grad(*ctxs[0], grads.dbias)};
  out.grad_input = std::move(grads.dx);
  return out;
}

FusionRule backward_activation_bias_rule() {
  return {"BackwardActivationBias",
          {of<BiasImpl>("Bias"), of<ActivationOperation>("an activation")},
          nullptr,
          [](const Match& match) -> OpPtr {
            return std::make_shared<BackwardActivationBias>(match.ops);
          }};
}

}  // namespace ligature
