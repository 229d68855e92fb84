#include "ligature/fused/backward_linear_activation.h"

#include "ligature/fused/common.h"

namespace ligature {

BackwardLinearActivation::BackwardLinearActivation(const OpList& ops)
    : FusedOperation("BackwardLinearActivation", ops),
      activation_(basic_op<ActivationOperation>(0)),
      linear_(basic_op<BasicLinearImpl>(1)) {}

FuserBackwardResult BackwardLinearActivation::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                             GradList) {
  FuserBackwardResult out = fused_backward_result(2);
  OperationContext& linear = *ctxs[1];
  if (!linear.requires_grad.op) return out;
  LinearBwdArgs args = linear_.backward_args(linear, grad_output);
  if (!ctxs[0]->requires_grad.op) {
    out.grad_params[1] = {linear_.backward(std::move(args), linear).dw};
    return out;
  }
  out.grad_input = activation_backward(ctxs, std::move(args), out);
  return out;
}

Value BackwardLinearActivation::activation_backward(CtxList ctxs, LinearBwdArgs args,
                                                    FuserBackwardResult& out) {
  OperationContext& ctx = *ctxs[0];
  const kernels::ActivationSpec spec = saved_spec(ctx, activation_.spec());
  const bool in_gemm = saved_dtype(ctx).value_or(args.compute_dtype) == args.compute_dtype &&
                       activation_grad_in_gemm_pays(args, ctx.saved_value(0), spec);
  Tensor dy, w;
  if (in_gemm) {
    dy = args.dy.tensor();
    w = args.w.tensor();
    args.input_requires_grad = false;
  }
  LinearGrads grads = linear_.backward(std::move(args), *ctxs[1]);
  out.grad_params[1] = {std::move(grads.dw)};
  if (in_gemm) {
    const ReleasedValue z = ctx.release_saved(0);
    return kernels::gemm_with_epilogue(kernels::activated_input_grad(dy, w, z.value.tensor(), spec,
                                                                     /*need_activated=*/false,
                                                                     z.may_overwrite))
        .y;
  }
  return activation_.backward(ctx, grads.dx, false, ctx.grad_input_target()).dx;
}

FusionRule backward_linear_activation_rule() {
  return {"BackwardLinearActivation",
          {of<ActivationOperation>("an activation"), of<BasicLinearImpl>("BasicLinear")},
          [](const Match& match, const PlanOptions& options) -> std::string {
            const std::string parallel = why_not_parallel(match.ops, true, true);
            if (!parallel.empty()) return parallel;
            if (options.quantizes_gradients()) return "the gradient between them is quantized";
            const kernels::ActivationSpec spec =
                static_cast<const ActivationOperation&>(*match.ops[0]).spec();
            const bool has = options.of_every_device ||
                             kernels::has_epilogue(kernels::Epilogue::ActivationGrad, &spec,
                                                   options.dtype, options.device);
            return has ? "" : "the device has no kernel for both";
          },
          [](const Match& match) -> OpPtr {
            return std::make_shared<BackwardLinearActivation>(match.ops);
          }};
}

}  // namespace ligature
