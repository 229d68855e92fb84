#include "ligature/fused/backward_linear_activation.h"

#include "ligature/fused/pieces.h"
#include "ligature/kernels/gated_linear.h"

namespace ligature {

BackwardLinearActivation::BackwardLinearActivation(const OpList& ops)
    : FusedOperation("BackwardLinearActivation", ops),
      activation_(basic_op<ActivationOperation>(0)),
      linear_(basic_op<BasicLinearImpl>(1)) {}

FuserBackwardResult BackwardLinearActivation::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                             GradList) {
  FuserBackwardResult out = fused_backward_result(2);
  if (!ctxs[1]->requires_grad.op) return out;
  const bool need_dz = ctxs[0]->requires_grad.op;
  LinearBwdArgs args = linear_.backward_args(*ctxs[1], grad_output);
  const kernels::ActivationSpec spec = saved_spec(*ctxs[0], activation_.spec());
  const bool in_one = need_dz && runs_gated_backward(args, ctxs[0]->saved_value(0), spec) &&
                      ctxs[0]->state.get_or("dtype", args.compute_dtype) == args.compute_dtype;
  Tensor dy, w;
  if (in_one) {
    dy = args.dy.tensor();
    w = args.w.tensor();
    args.input_requires_grad = false;
  }
  LinearGrads grads = linear_.backward(std::move(args), *ctxs[1]);
  out.grad_params[1] = {std::move(grads.dw)};
  if (!need_dz) return out;
  if (in_one) {
    const TakenValue z = ctxs[0]->take_saved(0);
    out.grad_input =
        kernels::linear_gated_backward(dy, w, z.value.tensor(), spec, false, z.may_overwrite).dz;
  } else {
    out.grad_input =
        activation_.backward(*ctxs[0], grads.dx, false, ctxs[0]->grad_input_target()).dx;
  }
  return out;
}

FusionRule backward_linear_activation_rule() {
  return {"BackwardLinearActivation",
          {of<ActivationOperation>("an activation"), of<BasicLinearImpl>("BasicLinear")},
          [](const Match& match, const PlanOptions& options) -> std::string {
            const auto& activation = static_cast<const ActivationOperation&>(*match.ops[0]);
            if (options.recipe != nullptr) return "the gradient between them is quantized";
            const bool has =
                options.of_every_device ||
                kernels::has_gated_linear(activation.spec(), options.dtype, options.device);
            return has ? "" : "the device has no kernel for both";
          },
          [](const Match& match) -> OpPtr {
            return std::make_shared<BackwardLinearActivation>(match.ops);
          }};
}

}  // namespace ligature
