#include "ligature/fused/backward_linear_add.h"

#include <ATen/ops/add.h>

#include "ligature/fused/common.h"
#include "ligature/kernels/gemm.h"

namespace ligature {

BackwardLinearAdd::BackwardLinearAdd(const OpList& ops)
    : FusedOperation("BackwardLinearAdd", ops),
      fork_(basic_op<MakeExtraOutputImpl>(0)),
      linear_(basic_op<BasicLinearImpl>(1)) {}

FuserBackwardResult BackwardLinearAdd::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                      GradList grad_extra_outputs) {
  FuserBackwardResult out = fused_backward_result(2);
  LinearBwdArgs args = linear_.backward_args(*ctxs[1], grad_output);
  Tensor add = args.input_requires_grad ? grad_extra_outputs[0][0] : Tensor();
  const bool one_dtype = add.defined() && add.scalar_type() == args.compute_dtype &&
                         args.input_dtype == args.compute_dtype;
  const bool in_place = one_dtype && !args.is_quantized() && add.is_contiguous() &&
                        fork_.may_accumulate_into(add, args.dy.tensor());
  if (in_place) {
    // dx += dy W is the forward's product with W transposed, a view that the GEMM takes as a flag.
    kernels::linear_forward_add_(add, args.dy.tensor(), args.w.tensor().t());
    AddExtraInputImpl::mark_changed(add);
    args.input_requires_grad = false;
  } else if (one_dtype) {
    args.add = add;
  }
  LinearGrads grads = linear_.backward(std::move(args), *ctxs[1]);
  if (in_place) {
    grads.dx = std::move(add);
  } else if (add.defined() && !one_dtype) {
    grads.dx = at::add(grads.dx, add);
  }
  out.grad_input = std::move(grads.dx);
  out.grad_params[1] = {std::move(grads.dw)};
  return out;
}

FusionRule backward_linear_add_rule() {
  return {
      "BackwardLinearAdd",
      {of<MakeExtraOutputImpl>("MakeExtraOutput"), of<BasicLinearImpl>("BasicLinear")},
      [](const Match& match, const PlanOptions&) {
        return why_not_parallel(match.ops, /*column=*/true, /*row=*/true);
      },
      [](const Match& match) -> OpPtr { return std::make_shared<BackwardLinearAdd>(match.ops); }};
}

}  // namespace ligature
