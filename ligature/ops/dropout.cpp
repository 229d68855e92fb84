#include "ligature/ops/dropout.h"

#include "ligature/kernels/dropout.h"
#include "ligature/ops/prepare.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(Dropout);

void DropoutImpl::check_options(const Options& options) {
  LIGATURE_CHECK(options.p >= 0 && options.p <= 1, "[Dropout] p must be in [0, 1], got ",
                 options.p);
}

DropoutImpl::DropoutImpl(Options options_) : Operation("Dropout"), options(options_) {
  check_options(options);
}

void DropoutImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::Dropout(p=" << options.p << ")";
}

std::optional<InferResult> DropoutImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  return InferResult{args.input, {}};
}

OpForwardResult DropoutImpl::op_forward_compute(const Value& input, const OpArgs& args) {
  if (!args.training || options.p == 0) return {input, {}};
  kernels::DropoutForward result = kernels::dropout_forward(prepare(input), options.p);
  OpForwardResult out;
  out.output = std::move(result.y);
  out.kept.tensors.emplace_back(std::move(result.mask));
  out.kept.state.set("p", options.p);
  return out;
}

void DropoutImpl::op_forward_save_ctx(OperationContext& ctx, const Value&, Kept& kept,
                                      const OpArgs&) {
  ctx.save_for_backward(std::move(kept.tensors));
}

OpBackwardResult DropoutImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  if (!ctx.requires_grad.input) return {};
  if (ctx.num_saved() == 0) return {grad_output, {}};
  const double p = ctx.state.get<double>("p");
  return {kernels::dropout_backward(prepare(grad_output), ctx.saved_tensor(0), p), {}};
}

}  // namespace ligature
