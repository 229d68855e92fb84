#include "ligature/fused/backward_linear_activation.h"

#include "ligature/fused/pieces.h"
#include "ligature/kernels/activated_linear.h"
#include "ligature/kernels/gated_linear.h"

namespace ligature {

BackwardLinearActivation::BackwardLinearActivation(const OpList& ops)
    : FusedOperation("BackwardLinearActivation", ops),
      bias_(basic_ops()[0]->as<BiasImpl>()),
      at_(bias_ != nullptr ? 1 : 0),
      activation_(basic_op<ActivationOperation>(at_)),
      linear_(basic_op<BasicLinearImpl>(at_ + 1)) {}

FuserBackwardResult BackwardLinearActivation::fuser_backward(CtxList ctxs, const Value& grad_output,
                                                             GradList) {
  FuserBackwardResult out = fused_backward_result(num_basic_ops());
  OperationContext& linear = *ctxs[at_ + 1];
  if (!linear.requires_grad.op) return out;
  LinearBwdArgs args = linear_.backward_args(linear, grad_output);
  if (!ctxs[at_]->requires_grad.op) {
    out.grad_params[at_ + 1] = {linear_.backward(std::move(args), linear).dw};
    return out;
  }
  const bool need_dbias = bias_ != nullptr && ctxs[0]->requires_grad.param(0);
  Tensor dbias;
  out.grad_input = activation_backward(ctxs, std::move(args), out, need_dbias, dbias);
  if (need_dbias) out.grad_params[0] = {bias_->cast_grad(*ctxs[0], dbias)};
  return out;
}

Value BackwardLinearActivation::activation_backward(CtxList ctxs, LinearBwdArgs args,
                                                    FuserBackwardResult& out, bool need_dbias,
                                                    Tensor& dbias) {
  OperationContext& ctx = *ctxs[at_];
  const kernels::ActivationSpec spec = saved_spec(ctx, activation_.spec());
  // The mask that a fused forward of ReLU left beside its input.
  const size_t aux = spec.kind == kernels::ActivationKind::ReLU ? 1 : 0;
  const bool same_dtype = ctx.state.get_or("dtype", args.compute_dtype) == args.compute_dtype;
  const bool gated =
      same_dtype && !need_dbias && runs_gated_backward(args, ctx.saved_value(0), spec);
  const bool activated = same_dtype && aux < ctx.num_saved() &&
                         runs_activated_backward(args, ctx.saved_value(aux), spec, need_dbias);
  Tensor dy, w;
  if (gated || activated) {
    dy = args.dy.tensor();
    w = args.w.tensor();
    args.input_requires_grad = false;
  }
  LinearGrads grads = linear_.backward(std::move(args), *ctxs[at_ + 1]);
  out.grad_params[at_ + 1] = {std::move(grads.dw)};
  if (gated) {
    const TakenValue z = ctx.take_saved(0);
    return kernels::linear_gated_backward(dy, w, z.value.tensor(), spec, false, z.may_overwrite).dz;
  }
  if (activated) {
    auto both = kernels::linear_activated_backward(dy, w, ctx.take_saved(aux).value.tensor(), spec,
                                                   need_dbias);
    dbias = std::move(both.dbias);
    return std::move(both.dz);
  }
  ActivationGrads both =
      activation_.backward(ctx, grads.dx, need_dbias, ctxs[0]->grad_input_target());
  dbias = std::move(both.dbias);
  return std::move(both.dx);
}

namespace {

OpPtr make(const Match& match) { return std::make_shared<BackwardLinearActivation>(match.ops); }

std::string why_not(const Match& match, const PlanOptions& options, bool with_bias) {
  if (options.quantizes_gradients()) return "the gradient between them is quantized";
  if (options.of_every_device) return "";
  const kernels::ActivationSpec spec =
      static_cast<const ActivationOperation&>(*match.ops[with_bias ? 1 : 0]).spec();
  const bool has = kernels::has_activated_linear(spec, options.dtype, options.device, true) ||
                   (!with_bias && kernels::has_gated_linear(spec, options.dtype, options.device));
  return has ? "" : "the device has no kernel for both";
}

PatternElement plain_activation() {
  return {"GELU or ReLU",
          [](at::ArrayRef<OpPtr> ops) -> size_t {
            const auto* activation = dynamic_cast<const ActivationOperation*>(ops.front().get());
            if (activation == nullptr) return 0;
            const kernels::ActivationKind kind = activation->spec().kind;
            return kind == kernels::ActivationKind::GELU || kind == kernels::ActivationKind::ReLU;
          },
          false};
}

}  // namespace

FusionRule backward_linear_activation_bias_rule() {
  return {
      "BackwardLinearActivation with a bias",
      {of<BiasImpl>("Bias"), plain_activation(), of<BasicLinearImpl>("BasicLinear")},
      [](const Match& match, const PlanOptions& options) { return why_not(match, options, true); },
      make};
}

FusionRule backward_linear_activation_rule() {
  return {
      "BackwardLinearActivation",
      {of<ActivationOperation>("an activation"), of<BasicLinearImpl>("BasicLinear")},
      [](const Match& match, const PlanOptions& options) { return why_not(match, options, false); },
      make};
}

}  // namespace ligature
