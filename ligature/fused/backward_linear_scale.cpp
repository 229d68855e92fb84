#include "ligature/fused/backward_linear_scale.h"

#include "ligature/fused/common.h"

namespace ligature {

BackwardLinearScale::BackwardLinearScale(const OpList& ops)
    : FusedOperation("BackwardLinearScale", ops),
      linear_(basic_op<BasicLinearImpl>(0)),
      scale_(basic_op<ConstantScaleImpl>(1)) {}

FuserBackwardResult BackwardLinearScale::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                        GradList) {
  FuserBackwardResult out = fused_backward_result(2);
  if (!ctxs[0]->requires_grad.op) return out;
  LinearBwdArgs args = linear_.backward_args(*ctxs[0], grad_output);
  args.alpha = scale_.scale(*ctxs[1]);
  LinearGrads grads = linear_.backward(std::move(args), *ctxs[0]);
  out.grad_input = std::move(grads.dx);
  out.grad_params[0] = {std::move(grads.dw)};
  return out;
}

FusionRule backward_linear_scale_rule() {
  return {
      "BackwardLinearScale",
      {of<BasicLinearImpl>("BasicLinear"), of<ConstantScaleImpl>("ConstantScale")},
      [](const Match& match, const PlanOptions&) {
        return why_not_parallel(match.ops, /*column=*/true, /*row=*/true);
      },
      [](const Match& match) -> OpPtr { return std::make_shared<BackwardLinearScale>(match.ops); }};
}

}  // namespace ligature
