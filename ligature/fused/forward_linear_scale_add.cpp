#include "ligature/fused/forward_linear_scale_add.h"

#include "ligature/fused/common.h"

namespace ligature {

ForwardLinearScaleAdd::ForwardLinearScaleAdd(const OpList& ops)
    : FusedOperation("ForwardLinearScaleAdd", ops),
      linear_(basic_op<BasicLinearImpl>(0)),
      scale_(basic_op<ConstantScaleImpl>(1)),
      add_(basic_op<AddExtraInputImpl>(2)) {}

FuserForwardResult ForwardLinearScaleAdd::fuser_forward_compute(const Value& input, ArgsList args) {
  LinearFwdArgs fwd = linear_.forward_args(input, args[0]);
  check_input_survives(input, args[0], add_, args[2].extra_inputs[0]);
  fwd.alpha = scale_.options.scale;
  ToSave to_save = BasicLinearImpl::to_save(fwd, args[0]);
  FuserForwardResult result = fused_forward_result(
      linear_forward_add(std::move(fwd), add_, args[2].extra_inputs[0]), num_basic_ops());
  result.to_save[0] = std::move(to_save);
  return result;
}

void ForwardLinearScaleAdd::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                                   FuserForwardResult& result, ArgsList args) {
  save_basic_op(linear_, *ctxs[0], input, std::move(result.to_save[0]), args[0]);
  save_basic_op(scale_, *ctxs[1], {}, {}, args[1]);
  AddExtraInputImpl::save_dtypes(*ctxs[2], linear_.compute_dtype(args[0]),
                                 args[2].extra_inputs[0].scalar_type());
}

FusionRule forward_linear_scale_add_rule() {
  return {"ForwardLinearScaleAdd",
          {of<BasicLinearImpl>("BasicLinear"), of<ConstantScaleImpl>("ConstantScale"),
           of<AddExtraInputImpl>("AddExtraInput")},
          [](const Match& match, const PlanOptions&) {
            return why_not_parallel(match.ops, /*column=*/false, /*row=*/true);
          },
          [](const Match& match) -> OpPtr {
            return std::make_shared<ForwardLinearScaleAdd>(match.ops);
          }};
}

}  // namespace ligature
