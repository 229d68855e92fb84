#include "ligature/ops/constant_scale.h"

#include <ATen/ops/mul.h>

#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(ConstantScale);

ConstantScaleImpl::ConstantScaleImpl(Options options_)
    : Operation("ConstantScale"), options(options_) {
  check_options(options);
}

void ConstantScaleImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::ConstantScale(" << options.scale << ")";
}

std::optional<InferResult> ConstantScaleImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  return InferResult{args.input, {}};
}

OpForwardResult ConstantScaleImpl::op_forward_compute(const Value& input, const OpArgs&) {
  return {at::mul(input.dequantized(), options.scale), {}};
}

void ConstantScaleImpl::op_forward_save_ctx(OperationContext& ctx, const Value&, ToSave&,
                                            const OpArgs&) {
  ctx.state.as<ConstantScaleState>().scale = options.scale;
}

OpBackwardResult ConstantScaleImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  if (!ctx.requires_grad.input) return {};
  return {at::mul(grad_output.dequantized(), scale(ctx)), {}};
}

std::string ConstantScaleImpl::complete_context(OperationContext& ctx, const OpArgs&) const {
  set_if_missing(ctx.state.as<ConstantScaleState>().scale, options.scale);
  return {};
}

}  // namespace ligature
