#include "ligature/fused/backward_add_norm.h"

#include "ligature/fused/common.h"
#include "ligature/ops/layer_norm.h"
#include "ligature/ops/make_extra_output.h"
#include "ligature/ops/rms_norm.h"

namespace ligature {

BackwardAddNorm::BackwardAddNorm(std::string name, const OpList& ops)
    : FusedOperation(std::move(name), ops), norm_(basic_op<NormOperation>(1)) {}

FuserBackwardResult BackwardAddNorm::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                    GradList grad_extra_outputs) {
  NormBwdArgs args = norm_.backward_args(*ctxs[1], grad_output);
  args.add = grad_extra_outputs[0][0];
  OpBackwardResult grads = norm_.backward(args, *ctxs[1]);
  FuserBackwardResult out = fused_backward_result(2);
  out.grad_input = std::move(grads.grad_input);
  out.grad_params[1] = std::move(grads.grad_params);
  return out;
}

namespace {

template <class Norm, class Fused>
FusionRule rule(const std::string& norm) {
  return {"BackwardAdd" + norm,
          {of<MakeExtraOutputImpl>("MakeExtraOutput"), of<Norm>(norm)},
          nullptr,
          [](const Match& match) -> OpPtr { return std::make_shared<Fused>(match.ops); }};
}

}  // namespace

FusionRule backward_add_layer_norm_rule() {
  return rule<LayerNormImpl, BackwardAddLayerNorm>("LayerNorm");
}

FusionRule backward_add_rms_norm_rule() { return rule<RMSNormImpl, BackwardAddRMSNorm>("RMSNorm"); }

}  // namespace ligature
