#include "ligature/ops/add_extra_input.h"

#include <ATen/ops/add.h>

#include "ligature/ops/checks.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(AddExtraInput);

void AddExtraInputImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::AddExtraInput(in_place=" << std::boolalpha << options.in_place << ")";
}

std::optional<InferResult> AddExtraInputImpl::infer(const InferArgs& args) const {
  check_floating(*this, args.input);
  InferResult result{args.input, {}};
  if (!args.extra_inputs[0]) return result;
  const ValueMeta& extra = *args.extra_inputs[0];
  LIGATURE_CHECK(extra.sizes == args.input.sizes, "[", label(),
                 "] extra input must have the input's shape ", sizes_string(args.input.sizes),
                 ", got ", sizes_string(extra.sizes));
  LIGATURE_CHECK_TYPE(at::isFloatingType(extra.dtype), "[", label(),
                      "] extra input must have a floating dtype, got ", to_string(extra));
  if (options.in_place) result.output.dtype = extra.dtype;
  return result;
}

void AddExtraInputImpl::mark_changed(const Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

Tensor AddExtraInputImpl::forward(const Tensor& x, const Tensor& extra) const {
  LIGATURE_CHECK(extra.sizes() == x.sizes(), "[", label(),
                 "] extra input must have the input's shape ", sizes_string(x.sizes()), ", got ",
                 sizes_string(extra.sizes()));
  if (!options.in_place) return cast(at::add(extra, x), x.scalar_type());
  Tensor y = extra;
  y.add_(x);
  mark_changed(y);
  return y;
}

FuserForwardResult AddExtraInputImpl::fuser_forward_compute(const Value& input, ArgsList args) {
  FuserForwardResult out;
  out.output = forward(input.dequantized(), args[0].extra_inputs[0]);
  out.extra_outputs.resize(1);
  out.to_save.resize(1);
  return out;
}

void AddExtraInputImpl::save_dtypes(OperationContext& ctx, at::ScalarType input,
                                    at::ScalarType extra) {
  ctx.state.as<AddExtraInputState>() = {input, extra};
}

void AddExtraInputImpl::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                               FuserForwardResult&, ArgsList args) {
  save_dtypes(*ctxs[0], input.dtype(), args[0].extra_inputs[0].scalar_type());
}

std::pair<Tensor, Tensor> AddExtraInputImpl::backward(const OperationContext& ctx,
                                                      const Value& grad_output) {
  const Tensor dy = grad_output.dequantized();
  const AddExtraInputState state = ctx.state.as<AddExtraInputState>();
  const auto in = [&](std::optional<at::ScalarType> dtype) {
    return cast(dy, dtype.value_or(dy.scalar_type()));
  };
  return {ctx.requires_grad.input ? in(state.input_dtype) : Tensor(),
          ctx.requires_grad.extra_input(0) ? in(state.extra_dtype) : Tensor()};
}

FuserBackwardResult AddExtraInputImpl::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                      GradList) {
  auto [dx, dextra] = backward(*ctxs[0], grad_output);
  FuserBackwardResult out;
  out.grad_input = std::move(dx);
  out.grad_params.resize(1);
  out.grad_extra_inputs = {{std::move(dextra)}};
  return out;
}

}  // namespace ligature
