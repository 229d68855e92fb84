#include "ligature/fused/backward_linear_bias.h"

#include "ligature/fused/common.h"

namespace ligature {

BackwardLinearBias::BackwardLinearBias(const OpList& ops)
    : FusedOperation("BackwardLinearBias", ops),
      linear_(basic_op<BasicLinearImpl>(0)),
      bias_(basic_op<BiasImpl>(1)) {}

FuserBackwardResult BackwardLinearBias::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                       GradList) {
  FuserBackwardResult out = fused_backward_result(2);
  const bool together = leaves_bias_grad(*ctxs[0], *ctxs[1], grad_output);
  if (!together) out.grad_params[1] = bias_.op_backward(*ctxs[1], grad_output).grad_params;
  if (!ctxs[0]->requires_grad.op) return out;
  LinearBwdArgs args = linear_.backward_args(*ctxs[0], grad_output);
  args.bias_requires_grad = together;
  LinearGrads grads = linear_.backward(std::move(args), *ctxs[0]);
  if (together) out.grad_params[1] = {bias_.cast_grad(*ctxs[1], grads.dbias)};
  out.grad_params[0] = {std::move(grads.dw)};
  out.grad_input = std::move(grads.dx);
  return out;
}

FusionRule backward_linear_bias_rule() {
  return {
      "BackwardLinearBias",
      {of<BasicLinearImpl>("BasicLinear"), of<BiasImpl>("Bias")},
      [](const Match& match, const PlanOptions& options) -> std::string {
        const std::string parallel = why_not_parallel(match.ops, true, true);
        if (!parallel.empty()) return parallel;
        if (options.quantizes_gradients()) return "the gradient is quantized";
        const bool has =
            options.of_every_device || kernels::has_epilogue(kernels::Epilogue::BiasGrad, nullptr,
                                                             options.dtype, options.device);
        return has ? "" : "the device has no kernel for both";
      },
      [](const Match& match) -> OpPtr { return std::make_shared<BackwardLinearBias>(match.ops); }};
}

}  // namespace ligature
