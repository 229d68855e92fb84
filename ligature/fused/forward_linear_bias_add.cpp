#include "ligature/fused/forward_linear_bias_add.h"

#include "ligature/fused/common.h"

namespace ligature {

ForwardLinearBiasAdd::ForwardLinearBiasAdd(const OpList& ops)
    : FusedOperation("ForwardLinearBiasAdd", ops),
      linear_(basic_op<BasicLinearImpl>(0)),
      bias_(num_basic_ops() == 3 ? &basic_op<BiasImpl>(1) : nullptr),
      add_(basic_op<AddExtraInputImpl>(num_basic_ops() - 1)) {}

FuserForwardResult ForwardLinearBiasAdd::fuser_forward_compute(const Value& input, ArgsList args) {
  LinearFwdArgs fwd = linear_bias_args(linear_, bias_, input, args[0], &args[1]);
  const OpArgs& add_args = args.back();
  check_input_survives(input, args[0], add_, add_args.extra_inputs[0]);
  ToSave to_save = BasicLinearImpl::to_save(fwd, args[0]);
  FuserForwardResult result = fused_forward_result(
      linear_forward_add(std::move(fwd), add_, add_args.extra_inputs[0]), num_basic_ops());
  result.to_save[0] = std::move(to_save);
  return result;
}

void ForwardLinearBiasAdd::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                                  FuserForwardResult& result, ArgsList args) {
  save_basic_op(linear_, *ctxs[0], input, std::move(result.to_save[0]), args[0]);
  if (bias_ != nullptr) save_basic_op(*bias_, *ctxs[1], {}, {}, args[1]);
  AddExtraInputImpl::save_dtypes(*ctxs.back(), linear_.compute_dtype(args[0]),
                                 args.back().extra_inputs[0].scalar_type());
}

FusionRule forward_linear_bias_add_rule() {
  return {"ForwardLinearBiasAdd",
          {of<BasicLinearImpl>("BasicLinear"), optional(of<BiasImpl>("Bias")),
           of<AddExtraInputImpl>("AddExtraInput")},
          [](const Match& match, const PlanOptions&) {
            return why_not_parallel(match.ops, /*column=*/false, /*row=*/true);
          },
          [](const Match& match) -> OpPtr {
            return std::make_shared<ForwardLinearBiasAdd>(match.ops);
          }};
}

}  // namespace ligature
