#include "ligature/ops/reshape.h"

#include <algorithm>

#include "ligature/ops/filled_context.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(Reshape);

void ReshapeImpl::check_options(const Options& options) {
  const auto& shape = options.shape;
  const bool sizes_ok = std::all_of(shape.begin(), shape.end(), [](int64_t s) { return s >= -1; });
  LIGATURE_CHECK(sizes_ok && std::count(shape.begin(), shape.end(), -1) <= 1,
                 "[Reshape] shape must be sizes of which at most one is -1, got ",
                 sizes_string(shape));
}

ReshapeImpl::ReshapeImpl(Options options_) : Operation("Reshape"), options(std::move(options_)) {
  check_options(options);
}

void ReshapeImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::Reshape(" << sizes_string(options.shape) << ")";
}

at::SmallVector<int64_t, 5> ReshapeImpl::resolve(const ValueMeta& input) const {
  at::SmallVector<int64_t, 5> sizes(options.shape.begin(), options.shape.end());
  int64_t known = 1;
  int64_t* unknown = nullptr;
  for (int64_t& size : sizes) {
    if (size == -1) {
      unknown = &size;
    } else {
      known *= size;
    }
  }
  const int64_t numel = input.numel();
  const bool fits = unknown != nullptr ? known > 0 && numel % known == 0 : known == numel;
  LIGATURE_CHECK(fits, "[", label(),
                 "] input must have as many elements as shape=", sizes_string(options.shape),
                 ", got ", sizes_string(input.sizes));
  if (unknown != nullptr) *unknown = numel / known;
  return sizes;
}

std::optional<InferResult> ReshapeImpl::infer(const InferArgs& args) const {
  InferResult result{args.input, {}};
  result.output.sizes = resolve(args.input);
  return result;
}

OpForwardResult ReshapeImpl::op_forward_compute(const Value& input, const OpArgs&) {
  return {input.dequantized().reshape(resolve(ValueMeta::of(input))), {}};
}

void ReshapeImpl::op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave&,
                                      const OpArgs&) {
  ctx.state.as<ReshapeState>().input_shape = input.sizes().vec();
}

OpBackwardResult ReshapeImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  if (!ctx.requires_grad.input) return {};
  const auto& shape = ctx.state.as<ReshapeState>().input_shape;
  LIGATURE_CHECK_STATE(shape.has_value(), "the context holds no such plain value: 'input_shape'");
  return {grad_output.dequantized().reshape(*shape), {}};
}

std::string ReshapeImpl::complete_context(OperationContext& ctx, const OpArgs& args) const {
  const bool there = ctx.state.as<ReshapeState>().input_shape.has_value();
  return there || !args.requires_grad.input ? "" : expected("input_shape=input_.size()", "none");
}

}  // namespace ligature
