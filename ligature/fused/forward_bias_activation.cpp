#include "ligature/fused/forward_bias_activation.h"

#include "ligature/fused/common.h"
#include "ligature/kernels/bias.h"
#include "ligature/kernels/bias_activation.h"
#include "ligature/prepare.h"

namespace ligature {

ForwardBiasActivation::ForwardBiasActivation(const OpList& ops)
    : FusedOperation("ForwardBiasActivation", ops),
      bias_(basic_op<BiasImpl>(0)),
      activation_(basic_op<ActivationOperation>(1)) {}

FuserForwardResult ForwardBiasActivation::fuser_forward_compute(const Value& input, ArgsList args) {
  const Tensor x = prepare(input);
  const Tensor b = BiasImpl::bias_of(args[0], x.scalar_type());
  const kernels::ActivationSpec spec = activation_.spec();
  const Target target = args[1].output_target();
  const bool need_z = args[1].requires_grad.op;
  const at::ScalarType dtype = under_autocast(x.scalar_type(), args[1].autocast_dtype);
  FuserForwardResult result = fused_forward_result({}, 2);
  Tensor z;
  if (target || dtype != x.scalar_type() || !b.defined()) {
    z = b.defined() ? kernels::bias_forward(x, b) : x;
    result.output = activation_forward_to(prepare(z, dtype), spec, {}, target);
  } else {
    auto both = kernels::bias_activation_forward(x, b, spec, need_z);
    z = std::move(both.z);
    result.output = std::move(both.y);
  }
  if (!need_z) return result;
  result.to_save[1] = activation_.to_save(z, args[1]);
  if (result.to_save[1].tensors.empty()) result.to_save[1].tensors.emplace_back(std::move(z));
  return result;
}

void ForwardBiasActivation::fuser_forward_save_ctx(CtxList ctxs, const Value&,
                                                   FuserForwardResult& result, ArgsList args) {
  save_basic_op(bias_, *ctxs[0], {}, {}, args[0]);
  if (!args[1].requires_grad.op) return;
  save_basic_op(activation_, *ctxs[1], result.to_save[1].tensors[0], {}, args[1]);
}

FusionRule forward_bias_activation_rule() {
  return {"ForwardBiasActivation",
          {of<BiasImpl>("Bias"), of<ActivationOperation>("an activation")},
          [](const Match&, const PlanOptions& options) -> std::string {
            const bool has = options.of_every_device ||
                             kernels::has_bias_activation(options.dtype, options.device);
            return has ? "" : "the device has no kernel for both";
          },
          [](const Match& match) -> OpPtr {
            return std::make_shared<ForwardBiasActivation>(match.ops);
          }};
}

}  // namespace ligature
