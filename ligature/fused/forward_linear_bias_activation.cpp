#include "ligature/fused/forward_linear_bias_activation.h"

#include "ligature/fused/common.h"

namespace ligature {

ForwardLinearBiasActivation::ForwardLinearBiasActivation(const OpList& ops)
    : FusedOperation("ForwardLinearBiasActivation", ops),
      linear_(basic_op<BasicLinearImpl>(0)),
      bias_(basic_ops()[1]->as<BiasImpl>()),
      activation_(basic_ops().back()->as<ActivationOperation>()) {}

FuserForwardResult ForwardLinearBiasActivation::fuser_forward_compute(const Value& input,
                                                                      ArgsList args) {
  const LinearFwdArgs fwd =
      linear_bias_args(linear_, bias_, input, args[0], &args[1], /*pieces=*/true);
  FuserForwardResult result = fused_forward_result({}, num_basic_ops());
  result.to_save[0] = BasicLinearImpl::to_save(fwd, args[0]);
  if (activation_ == nullptr) {
    result.output = BasicLinearImpl::forward(fwd);
    return result;
  }
  const kernels::ActivationSpec spec = activation_->spec();
  const Target target = args.back().output_target();
  const bool keep_z = args.back().requires_grad.op;
  Tensor z;
  if (activation_in_gemm_pays(fwd, spec, target, keep_z)) {
    LinearActivation both = activation_in_gemm(fwd, spec, target, keep_z);
    z = std::move(both.z);
    result.output = std::move(both.a);
  } else {
    z = BasicLinearImpl::forward(fwd);
    result.output = target || keep_z || kernels::is_gated(spec.kind)
                        ? activation_forward_to(z, spec, {}, target)
                        : Value(kernels::activation_forward_(z, spec));
  }
  if (keep_z) {
    result.to_save.back() = activation_->to_save(z, args.back());
    if (result.to_save.back().tensors.empty())
      result.to_save.back().tensors.emplace_back(std::move(z));
  }
  return result;
}

void ForwardLinearBiasActivation::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                                         FuserForwardResult& result,
                                                         ArgsList args) {
  save_basic_op(linear_, *ctxs[0], input, std::move(result.to_save[0]), args[0]);
  if (bias_ != nullptr) save_basic_op(*bias_, *ctxs[1], {}, {}, args[1]);
  if (activation_ == nullptr) return;
  save_basic_op(*activation_, *ctxs.back(), result.to_save.back().tensors[0], {}, args.back());
}

namespace {

OpPtr make(const Match& match) { return std::make_shared<ForwardLinearBiasActivation>(match.ops); }

}  // namespace

FusionRule forward_linear_bias_activation_rule() {
  return {"ForwardLinearBiasActivation",
          {of<BasicLinearImpl>("BasicLinear"), optional(of<BiasImpl>("Bias")),
           of<ActivationOperation>("an activation")},
          [](const Match& match, const PlanOptions&) {
            return why_not_parallel(match.ops, /*column=*/false, /*row=*/true);
          },
          make};
}

FusionRule forward_linear_bias_rule() {
  return {"ForwardLinearBiasActivation without an activation",
          {of<BasicLinearImpl>("BasicLinear"), of<BiasImpl>("Bias")},
          [](const Match& match, const PlanOptions&) {
            return why_not_parallel(match.ops, /*column=*/false, /*row=*/true);
          },
          make};
}

}  // namespace ligature
