#include "ligature/ops/basic_linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <cmath>

#include "ligature/kernels/gemm.h"
#include "ligature/ops/prepare.h"

namespace ligature {

LIGATURE_REGISTER_OPERATION(BasicLinear);

namespace {

MainGradLookup& main_grad_lookup() {
  static MainGradLookup lookup;
  return lookup;
}

}  // namespace

void set_main_grad_lookup(MainGradLookup lookup) { main_grad_lookup() = std::move(lookup); }

void BasicLinearImpl::check_options(const Options& given) const {
  LIGATURE_CHECK(given.in_features > 0, "[", label(), "] in_features must be positive, got ",
                 given.in_features);
  LIGATURE_CHECK(given.out_features > 0, "[", label(), "] out_features must be positive, got ",
                 given.out_features);
}

BasicLinearImpl::BasicLinearImpl(Options options_)
    : Operation("BasicLinear"), options(std::move(options_)) {
  check_options(options);
  add_parameter("weight", {options.out_features, options.in_features}, options.tensor_options());
}

// As torch.nn.Linear: uniform in ±1/sqrt(in_features).
void BasicLinearImpl::initialize_parameter(const std::string&, Tensor& parameter) {
  torch::nn::init::kaiming_uniform_(parameter, std::sqrt(5.0));
}

void BasicLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "ligature::BasicLinear(in_features=" << options.in_features
         << ", out_features=" << options.out_features << ")";
}

std::optional<InferResult> BasicLinearImpl::infer(const InferArgs& args) const {
  check_floating(label(), args.input);
  const auto& sizes = args.input.sizes;
  LIGATURE_CHECK(!sizes.empty() && sizes.back() == options.in_features, "[", label(),
                 "] input's last dimension must be in_features=", options.in_features, ", got ",
                 sizes_string(sizes));
  const Tensor& w = args.params[0];
  LIGATURE_CHECK(
      w.dim() == 2 && w.size(0) == options.out_features && w.size(1) == options.in_features, "[",
      label(), "] weight must be [", options.out_features, ", ", options.in_features, "], got ",
      sizes_string(w.sizes()));
  check_same_device(label(), args.input, "weight", w);
  InferResult result{args.input, {}};
  result.output.sizes.back() = options.out_features;
  result.output.dtype = under_autocast(w.scalar_type(), args.autocast_dtype);
  return result;
}

at::ScalarType BasicLinearImpl::compute_dtype(const OpArgs& args) const {
  return under_autocast(args.params[0].scalar_type(), args.autocast_dtype);
}

LinearFwdArgs BasicLinearImpl::forward_args(const Value& input, const OpArgs& args) const {
  LinearFwdArgs out;
  const at::ScalarType dtype = compute_dtype(args);
  out.x = prepare(input, dtype);
  out.w = prepare(args.params[0], dtype);
  return out;
}

Tensor BasicLinearImpl::forward(const LinearFwdArgs& args) {
  if (args.add_in_place) {
    Tensor y = args.add;
    kernels::linear_forward_add_(y, args.x, args.w, args.bias, args.alpha);
    return y;
  }
  return kernels::linear_forward(args.x, args.w, args.bias, args.add, args.alpha);
}

OpForwardResult BasicLinearImpl::op_forward_compute(const Value& input, const OpArgs& args) {
  return {forward(forward_args(input, args)), {}};
}

// The input and the weight are saved as they came in, so that nothing is held twice; a cast is made
// again in backward.
void BasicLinearImpl::op_forward_save_ctx(OperationContext& ctx, const Value& input, Kept&,
                                          const OpArgs& args) {
  save_ctx(ctx, args.requires_grad.param(0) ? input : Value(), input.dtype(), args);
}

void BasicLinearImpl::save_ctx(OperationContext& ctx, const Value& x, at::ScalarType input_dtype,
                               const OpArgs& args) const {
  const GradFlags& needs = args.requires_grad;
  ctx.save_for_backward({x, needs.input ? args.params[0] : Value()});
  ctx.state.set("input_dtype", input_dtype);
  ctx.state.set("weight_dtype", args.params[0].scalar_type());
  ctx.state.set("dtype", compute_dtype(args));
  if (options.accumulate_into_main_grad && needs.param(0)) {
    ctx.parameter_references.push_back(args.params[0]);
  }
}

LinearBwdArgs BasicLinearImpl::backward_args(const OperationContext& ctx,
                                             const Value& grad_output) const {
  return backward_args(ctx, grad_output, ctx.saved_value(0), ctx.saved_value(1));
}

LinearBwdArgs BasicLinearImpl::backward_args(const OperationContext& ctx, const Value& grad_output,
                                             const Value& x, const Value& w) const {
  LinearBwdArgs out;
  out.compute_dtype = ctx.state.get_or("dtype", grad_output.dtype());
  out.input_dtype = ctx.state.get_or("input_dtype", out.compute_dtype);
  out.weight_dtype = ctx.state.get_or("weight_dtype", out.compute_dtype);
  out.input_requires_grad = ctx.requires_grad.input;
  out.weight_requires_grad = ctx.requires_grad.param(0);
  out.dy = prepare(grad_output, out.compute_dtype);
  if (out.weight_requires_grad) out.x = prepare(x, out.compute_dtype);
  if (out.input_requires_grad) out.w = prepare(w, out.compute_dtype);
  return out;
}

LinearGrads BasicLinearImpl::backward(const LinearBwdArgs& args, const OperationContext& ctx) {
  LinearGrads grads;
  if (args.input_requires_grad) {
    const Tensor add = args.add.defined() ? prepare(args.add, args.compute_dtype) : Tensor();
    grads.dx = cast(kernels::linear_input_grad(args.dy, args.w, add, args.alpha), args.input_dtype);
  }
  if (!args.weight_requires_grad) return grads;
  if (!options.accumulate_into_main_grad) {
    grads.dw = cast(kernels::linear_weight_grad(args.dy, args.x, args.alpha), args.weight_dtype);
    return grads;
  }
  const Tensor& weight =
      ctx.parameter_references.empty() ? this->weight() : ctx.parameter_references[0];
  MainGrad main = main_grad_;
  if (!main.buffer.defined() && args.dy.is_meta()) {
    main.buffer = at::empty_like(weight);  // nothing is computed, so nothing is added up
  } else if (!main.buffer.defined() && main_grad_lookup()) {
    main = main_grad_lookup()(*this, weight);
  }
  LIGATURE_CHECK_STATE(main.buffer.defined(), "[", label(),
                       "] accumulate_into_main_grad is set, but the weight has no main_grad");
  LIGATURE_CHECK(main.buffer.sizes() == weight.sizes(), "[", label(), "] main_grad must be ",
                 sizes_string(weight.sizes()), " like the weight, got ",
                 sizes_string(main.buffer.sizes()));
  kernels::linear_weight_grad_into(main.buffer, args.dy, args.x, !main.overwrite, args.alpha);
  if (main.return_placeholder) grads.dw = at::zeros(weight.sizes(), weight.options());
  return grads;
}

OpBackwardResult BasicLinearImpl::op_backward(OperationContext& ctx, const Value& grad_output) {
  LinearGrads grads = backward(backward_args(ctx, grad_output), ctx);
  return {grads.dx, {grads.dw}};
}

}  // namespace ligature
