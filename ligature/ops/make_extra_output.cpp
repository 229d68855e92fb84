#include "ligature/ops/make_extra_output.h"

#include <ATen/ops/add.h>

#include "ligature/ops/add_extra_input.h"
#include "ligature/ops/checks.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(MakeExtraOutput);

void MakeExtraOutputImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::MakeExtraOutput(in_place=" << std::boolalpha << options.in_place << ")";
}

std::optional<InferResult> MakeExtraOutputImpl::infer(const InferArgs& args) const {
  return InferResult{args.input, {args.input}};
}

FuserForwardResult MakeExtraOutputImpl::fuser_forward_compute(const Value& input, ArgsList) {
  FuserForwardResult out;
  out.output = input;
  out.extra_outputs = {{input.dequantized()}};
  out.to_save.resize(1);
  return out;
}

void MakeExtraOutputImpl::fuser_forward_save_ctx(CtxList, const Value&, FuserForwardResult&,
                                                 ArgsList) {}

bool MakeExtraOutputImpl::may_accumulate_into(const Tensor& grad_extra, const Tensor& dy) const {
  return options.in_place && extra_output_channel(0).empty() &&
         grad_extra.is_non_overlapping_and_dense() && !grad_extra.is_alias_of(dy);
}

FuserBackwardResult MakeExtraOutputImpl::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                        GradList grad_extra_outputs) {
  FuserBackwardResult out;
  out.grad_params.resize(1);
  out.grad_extra_inputs.resize(1);
  if (!ctxs[0]->requires_grad.input) return out;
  Tensor grad_extra = grad_extra_outputs[0][0];
  if (!grad_extra.defined()) {
    out.grad_input = grad_output;
    return out;
  }
  const Tensor dy = grad_output.dequantized();
  if (!may_accumulate_into(grad_extra, dy)) {
    out.grad_input = at::add(dy, grad_extra);
    return out;
  }
  grad_extra.add_(dy);
  AddExtraInputImpl::mark_changed(grad_extra);
  out.grad_input = std::move(grad_extra);
  return out;
}

}  // namespace ligature
