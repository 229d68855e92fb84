#include "ligature/ops/dropout.h"

#include <ATen/ops/ne.h>

#include "ligature/kernels/dropout.h"
#include "ligature/ops/checks.h"
#include "ligature/ops/filled_context.h"

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
  out.to_save.tensors.emplace_back(std::move(result.mask));
  return out;
}

void DropoutImpl::op_forward_save_ctx(OperationContext& ctx, const Value&, ToSave& to_save,
                                      const OpArgs&) {
  if (!to_save.tensors.empty()) ctx.state.as<DropoutState>().p = options.p;
  ctx.save_for_backward(std::move(to_save.tensors));
}

OpBackwardResult DropoutImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  if (!ctx.requires_grad.input) return {};
  if (ctx.num_saved() == 0) return {grad_output, {}};
  const std::optional<double> p = ctx.state.as<DropoutState>().p;
  LIGATURE_CHECK_STATE(p.has_value(), "the context holds no such plain value: 'p'");
  return {kernels::dropout_backward(prepare(grad_output), ctx.saved_tensor(0), *p), {}};
}

// te.ops' own mask is 0 or 1 / (1 - p); that of its kernel nobody else can read.
std::string DropoutImpl::complete_context(OperationContext& ctx, const OpArgs& args) const {
  if (!args.requires_grad.input) return {};
  auto& state = ctx.state.as<DropoutState>();
  const std::string impl = ctx.state.get_or("impl", std::string());
  if (impl.empty()) {
    const bool drops = args.training && options.p > 0;
    if (drops ? state.p.has_value() : ctx.num_saved() == 0) return {};
  } else if (impl == "evaluation") {
    ctx.save_for_backward({});
    return {};
  } else if (impl == "unfused") {
    if (ctx.num_saved() != 1 || !ctx.saved_value(0).defined()) {
      return expected("save_for_backward(mask)", count_of(ctx));
    }
    state.p = ctx.state.get_or("dropout_probability", options.p);
    ctx.save_for_backward({Value(at::ne(ctx.saved_value(0).dequantized(), 0))});
    return {};
  }
  return expected("impl='unfused' or 'evaluation'", impl.empty() ? "none" : "'" + impl + "'");
}

}  // namespace ligature
