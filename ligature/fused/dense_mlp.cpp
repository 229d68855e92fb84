#include "ligature/fused/dense_mlp.h"

#include <ATen/ops/add.h>

#include <utility>

#include "ligature/fused/common.h"
#include "ligature/ops/make_extra_output.h"
#include "ligature/prepare.h"

namespace ligature {
namespace {

// What the block saves, all of it with its second linear: that one runs in backward whenever
// anything before it does. What no gradient needs is undefined.
// The scales are those of delayed scaling for the inputs of the linears.
enum Saved : size_t {
  kX,
  kMean,
  kRstd,
  kNormWeight,
  kNormBias,
  kW1,
  kZ,
  kW2,
  kScale1,
  kScale2,
  kNumSaved
};

// What a linear's forward keeps, in `kept` of the linear: its weight as it computed with it, and
// the factor of its input.
enum SavedByLinear : size_t { kWeight, kScale };

const Quantizer* input_quantizer(const OpArgs& args) {
  const bool on = args.quantization != nullptr && !args.calibrating;
  return on ? args.quantization->forward_quantizer(0) : nullptr;
}

ToSave keep(const LinearFwdArgs& fwd, const OpArgs& args) {
  ToSave made = BasicLinearImpl::to_save(fwd, args);
  const Quantizer* quantizer = input_quantizer(args);
  ToSave to_save;
  to_save.tensors = {made.tensors.empty() ? Value() : made.tensors[1],
                     quantizer != nullptr ? quantizer->delayed_scale() : Tensor()};
  return to_save;
}

RecomputedInput recomputed_input(const OperationContext& ctx, const Tensor& scale) {
  const bool calibrating = ctx.state.as<LinearState>().calibrating;
  return {calibrating ? nullptr : ctx.quantization.get(), 0, scale};
}

Tensor sum(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? at::add(a, b) : a;
}

}  // namespace

DenseMLP::DenseMLP(const OpList& ops) : FusedOperation("DenseMLP", ops) {
  for (size_t i = 0; i < num_basic_ops(); ++i) {
    const auto basic = basic_ops()[i];
    if (auto* norm = basic->as<NormOperation>()) {
      norm_ = {norm, i};
    } else if (auto* linear = basic->as<BasicLinearImpl>()) {
      (fc1_ ? fc2_ : fc1_) = {linear, i};
    } else if (auto* bias = basic->as<BiasImpl>()) {
      (fc2_ ? bias2_ : bias1_) = {bias, i};
    } else if (auto* activation = basic->as<ActivationOperation>()) {
      activation_ = {activation, i};
    } else if (auto* join = basic->as<AddExtraInputImpl>()) {
      join_ = {join, i};
    } else {
      fork_ = i;
    }
  }
}

LinearFwdArgs DenseMLP::linear_args(const Part<BasicLinearImpl>& linear, const Part<BiasImpl>& bias,
                                    const Value& x, ArgsList args) const {
  OpArgs forward_only = args[linear.at];
  forward_only.requires_grad.params.clear();
  return linear_bias_args(*linear.op, bias.op, x, forward_only, bias ? &args[bias.at] : nullptr);
}

FuserForwardResult DenseMLP::fuser_forward_compute(const Value& input, ArgsList args) {
  const Usage rowwise{true, false};
  const Target to_fc1 = {forks_after_norm() ? nullptr : input_quantizer(args[fc1_.at]), rowwise};
  NormOperation::Forward norm =
      norm_->forward_to(prepare(input), args[norm_.at].params,
                        NormOperation::output_dtype(input, args[norm_.at]), to_fc1);
  Tensor residual;
  if (has_residual()) residual = forks_before_norm() ? input.dequantized() : norm.y.tensor();

  FuserForwardResult result = fused_forward_result({}, num_basic_ops());
  const kernels::ActivationSpec spec = activation_->spec();
  const Target to_fc2 = {input_quantizer(args[fc2_.at]), rowwise};
  const bool keep_z = args[activation_.at].requires_grad.op || args[fc2_.at].requires_grad.param(0);
  Tensor z;
  Value a;
  {
    const LinearFwdArgs fwd = linear_args(fc1_, bias1_, norm.y, args);
    if (activation_in_gemm_pays(fwd, spec, to_fc2, keep_z)) {
      LinearActivation both = activation_in_gemm(fwd, spec, to_fc2, keep_z);
      z = std::move(both.z);
      a = std::move(both.a);
    } else {
      z = BasicLinearImpl::forward(fwd);
    }
    result.to_save[fc1_.at] = keep(fwd, args[fc1_.at]);
  }
  norm.y = {};
  if (!a.defined()) {
    a = to_fc2 || keep_z || kernels::is_gated(spec.kind)
            ? activation_forward_to(z, spec, {}, to_fc2)
            : Value(kernels::activation_forward_(z, spec));
  }

  LinearFwdArgs fwd = linear_args(fc2_, bias2_, a, args);
  a = {};
  result.to_save[fc2_.at] = keep(fwd, args[fc2_.at]);
  if (has_residual()) {
    result.output = linear_forward_add(std::move(fwd), *join_.op, residual);
    result.extra_outputs[fork_].push_back(std::move(residual));
  } else {
    result.output = BasicLinearImpl::forward(fwd);
  }
  result.to_save[norm_.at].tensors = {std::move(norm.mean), std::move(norm.rstd)};
  if (keep_z) result.to_save[activation_.at].tensors.emplace_back(std::move(z));
  return result;
}

void DenseMLP::fuser_forward_save_ctx(CtxList ctxs, const Value& input, FuserForwardResult& result,
                                      ArgsList args) {
  const auto needs = [&](size_t i) -> const GradFlags& { return args[i].requires_grad; };
  const at::ScalarType norm_dtype = NormOperation::output_dtype(input, args[norm_.at]);
  const at::ScalarType dtype1 = fc1_->compute_dtype(args[fc1_.at]);
  const at::ScalarType dtype2 = fc2_->compute_dtype(args[fc2_.at]);

  norm_->save_state(*ctxs[norm_.at], args[norm_.at]);
  save_spec(*ctxs[activation_.at], activation_->spec());
  for (const auto& bias : {bias1_, bias2_}) {
    if (bias) BiasImpl::save_dtypes(*ctxs[bias.at], args[bias.at]);
  }
  if (has_residual()) {
    AddExtraInputImpl::save_dtypes(*ctxs[join_.at], dtype2,
                                   forks_before_norm() ? input.dtype() : norm_dtype);
  }
  if (!needs(fc2_.at).op) return;
  ToSave none;
  fc1_->save_ctx(*ctxs[fc1_.at], {}, norm_dtype, none, args[fc1_.at]);
  ctxs[fc1_.at]->save_for_backward({});
  fc2_->save_ctx(*ctxs[fc2_.at], {}, dtype1, none, args[fc2_.at]);

  std::vector<Value> saved(kNumSaved);
  const at::ArrayRef<Tensor> norm_params = args[norm_.at].params;
  const bool recompute_norm = needs(fc1_.at).param(0);
  if (recompute_norm || needs(norm_.at).input || needs(norm_.at).param(0)) {
    saved[kX] = input;
    saved[kMean] = result.to_save[norm_.at].tensors[0];
    saved[kRstd] = result.to_save[norm_.at].tensors[1];
  }
  if (recompute_norm || needs(norm_.at).op) saved[kNormWeight] = norm_params[0];
  if (recompute_norm && norm_params.size() > 1) saved[kNormBias] = norm_params[1];
  const auto weight = [&](const Part<BasicLinearImpl>& linear) -> Value {
    const Value& to_save = result.to_save[linear.at].tensors[kWeight];
    return to_save.defined() ? to_save : Value(args[linear.at].params[0]);
  };
  if (needs(fc1_.at).input) saved[kW1] = weight(fc1_);
  if (recompute_norm) saved[kScale1] = result.to_save[fc1_.at].tensors[kScale];
  if (!result.to_save[activation_.at].tensors.empty()) {
    saved[kZ] = result.to_save[activation_.at].tensors[0];
  }
  if (needs(fc2_.at).input) saved[kW2] = weight(fc2_);
  if (needs(fc2_.at).param(0)) saved[kScale2] = result.to_save[fc2_.at].tensors[kScale];
  ctxs[fc2_.at]->save_for_backward(std::move(saved));
}

// One orientation where the other can be made of it: that is done when z is gone.
Target DenseMLP::grad_target(const OperationContext& ctx) const {
  const bool on = ctx.quantization != nullptr && !ctx.state.as<LinearState>().calibrating;
  const Quantizer* quantizer = on ? ctx.quantization->backward_quantizer(0) : nullptr;
  if (quantizer == nullptr) return {};
  Usage usage = fc1_->grad_output_usage(ctx.requires_grad);
  const bool can_be_transposed =
      quantizer->is_native() && quantizer->format_tag().orientations_agree();
  if (can_be_transposed && usage.rowwise) usage.columnwise = false;
  return {quantizer, usage};
}

FuserBackwardResult DenseMLP::fuser_backward(CtxList ctxs, const Value& grad_output,
                                             GradList grad_extra_outputs) {
  const auto needs = [&](size_t i) -> const GradFlags& { return ctxs[i]->requires_grad; };
  const OperationContext& saved = *ctxs[fc2_.at];
  FuserBackwardResult out = fused_backward_result(num_basic_ops());

  Value dy = grad_output;
  Tensor dresidual;
  if (has_residual()) {
    auto [dx, dextra] = AddExtraInputImpl::backward(*ctxs[join_.at], grad_output);
    dy = std::move(dx);
    if (needs(fork_).op) dresidual = sum(dextra, grad_extra_outputs[fork_][0]);
  }
  if (bias2_ && needs(bias2_.at).op && !leaves_bias_grad(*ctxs[fc2_.at], *ctxs[bias2_.at], dy)) {
    out.grad_params[bias2_.at] = bias2_->op_backward(*ctxs[bias2_.at], dy).grad_params;
  }
  if (!needs(fc2_.at).op) return out;

  Tensor dz_bias;
  Value dz = linear2_and_activation_backward(ctxs, dy, out, dz_bias);
  if (!needs(activation_.at).op) return out;
  if (dz_bias.defined()) {
    out.grad_params[bias1_.at] = {bias1_->cast_grad(*ctxs[bias1_.at], dz_bias)};
  }
  if (!needs(fc1_.at).op) return out;

  Tensor dh;
  {
    const OperationContext& ctx = *ctxs[fc1_.at];
    const RecomputedInput again = recomputed_input(ctx, saved.saved_tensor(kScale1));
    Value h;
    if (needs(fc1_.at).param(0)) {
      const LinearState state = ctx.state.as<LinearState>();
      h = norm_->apply(
          prepare(saved.saved_value(kX)), saved.saved_tensor(kMean), saved.saved_tensor(kRstd),
          saved.saved_tensor(kNormWeight), saved.saved_tensor(kNormBias),
          norm_->saved_zero_centered_gamma(*ctxs[norm_.at]), state.input_dtype.value());
      h = quantize_to(h, again.target(), state.dtype.value());
    }
    LinearBwdArgs args = fc1_->backward_args(ctx, std::exchange(dz, {}), std::exchange(h, {}),
                                             saved.saved_value(kW1));
    const bool add_in_gemm = forks_after_norm() && args.input_dtype == args.compute_dtype;
    if (add_in_gemm) args.add = dresidual;
    LinearGrads grads = fc1_->backward(std::move(args), ctx);
    out.grad_params[fc1_.at] = {std::move(grads.dw)};
    dh = std::move(grads.dx);
    if (dh.defined() && forks_after_norm() && !add_in_gemm) dh = sum(dh, dresidual);
  }
  if (!needs(norm_.at).op) return out;

  NormBwdArgs args =
      norm_->backward_args(*ctxs[norm_.at], dh, saved.saved_value(kX), saved.saved_tensor(kMean),
                           saved.saved_tensor(kRstd), saved.saved_tensor(kNormWeight));
  if (forks_before_norm()) args.add = dresidual;
  OpBackwardResult grads = norm_->backward(args, *ctxs[norm_.at]);
  out.grad_params[norm_.at] = std::move(grads.grad_params);
  out.grad_input = std::move(grads.grad_input);
  return out;
}

// At most z and one tensor of the activation's output are held at a time. In high precision the
// gradient of that output comes first: one pass reads it and z, and writes the activation's output
// over the one and its gradient over the other.
Value DenseMLP::linear2_and_activation_backward(CtxList ctxs, const Value& dy,
                                                FuserBackwardResult& out, Tensor& dbias) {
  OperationContext& ctx = *ctxs[fc2_.at];
  const GradFlags& needs_activation = ctxs[activation_.at]->requires_grad;
  const bool need_dw = ctx.requires_grad.param(0);
  const bool need_dbias = bias1_ && ctxs[bias1_.at]->requires_grad.param(0);
  const kernels::ActivationSpec spec = saved_spec(*ctxs[activation_.at], activation_->spec());
  const Target dz_target = grad_target(*ctxs[fc1_.at]);
  const RecomputedInput again = recomputed_input(ctx, ctx.saved_tensor(kScale2));
  const bool one_pass = need_dw && needs_activation.op && !again.quantizer && !dz_target;
  Value a;
  if (need_dw && !one_pass) {
    a = activation_forward_to(ctx.saved_tensor(kZ), spec, {}, again.target());
  }
  LinearBwdArgs args = fc2_->backward_args(ctx, dy, std::exchange(a, {}), ctx.saved_value(kW2));
  args.bias_requires_grad = bias2_ && leaves_bias_grad(ctx, *ctxs[bias2_.at], dy);
  const auto put_weight_grads = [&](LinearGrads& grads) {
    if (grads.dbias.defined()) {
      out.grad_params[bias2_.at] = {bias2_->cast_grad(*ctxs[bias2_.at], grads.dbias)};
    }
    out.grad_params[fc2_.at] = {std::move(grads.dw)};
  };
  LinearBwdArgs of_weight;
  if (one_pass && !need_dbias && activation_grad_in_gemm_pays(args, ctx.saved_value(kZ), spec)) {
    const ReleasedValue z = ctx.release_saved(kZ);
    kernels::GemmResult both = kernels::gemm_with_epilogue(
        kernels::activated_input_grad(args.dy.tensor(), args.w.tensor(), z.value.tensor(), spec,
                                      /*need_activated=*/true, z.may_overwrite));
    args.x = std::move(both.activated);
    args.input_requires_grad = false;
    LinearGrads grads = fc2_->backward(std::move(args), ctx);
    put_weight_grads(grads);
    return std::move(both.y);
  }
  if (one_pass) {
    of_weight = args;
    of_weight.input_requires_grad = false;
    args.weight_requires_grad = args.bias_requires_grad = false;
  }
  LinearGrads grads = fc2_->backward(std::move(args), ctx);
  if (!one_pass) put_weight_grads(grads);
  if (!needs_activation.op) return {};

  const ReleasedValue z = ctx.release_saved(kZ);
  const Tensor da = prepare(grads.dx, z.value.dtype());
  if (!one_pass) {
    ActivationGrads dz = activation_backward_to(da, z.value.tensor(), spec, {}, false, need_dbias,
                                                dz_target, z.may_overwrite);
    dbias = std::move(dz.dbias);
    return std::move(dz.dx);
  }
  kernels::ActivationRecompute both = kernels::activation_recompute(
      da, z.value.tensor(), spec, need_dbias, /*over_dy=*/true, z.may_overwrite);
  dbias = std::move(both.dbias);
  of_weight.x = prepare(std::move(both.y), of_weight.compute_dtype);
  grads = fc2_->backward(std::move(of_weight), ctx);
  put_weight_grads(grads);
  return std::move(both.dx);
}

namespace {

std::string why_not_recompute(const Match& match, const PlanOptions& options) {
  const std::string parallel = why_not_parallel(match.ops, /*column=*/true, /*row=*/true);
  if (!parallel.empty()) return parallel;
  for (const OpPtr& op : match.ops) {
    const auto* activation = dynamic_cast<const ActivationOperation*>(op.get());
    if (activation != nullptr && activation->caches_quantized_input()) {
      return "its activation caches a quantized input";
    }
  }
  return options.recompute == Recompute::Cheap ? "" : "recompute is not 'cheap'";
}

const BasicOperation& basic(const OpPtr& op) { return static_cast<const BasicOperation&>(*op); }

PatternElement fork_to_channel() {
  return {"MakeExtraOutput on a channel",
          [](at::ArrayRef<OpPtr> ops) -> size_t {
            const auto* fork = dynamic_cast<const MakeExtraOutputImpl*>(ops.front().get());
            return fork != nullptr && !fork->extra_output_channel(0).empty() ? 1 : 0;
          },
          false};
}

Pattern block() {
  return {of<BasicLinearImpl>("BasicLinear"), optional(of<BiasImpl>("Bias")),
          of<ActivationOperation>("an activation"), of<BasicLinearImpl>("BasicLinear"),
          optional(of<BiasImpl>("Bias"))};
}

OpPtr make_dense_mlp(const Match& match) { return std::make_shared<DenseMLP>(match.ops); }

std::string why_not_residual(const Match& match, const PlanOptions& options) {
  const auto& before = match.elements[0];
  const auto& after = match.elements[2];
  if (before.size() + after.size() != 1) return "it takes one MakeExtraOutput";
  const auto& fork = basic((before.empty() ? after : before).front());
  const auto& join = static_cast<const AddExtraInputImpl&>(*match.ops.back());
  if (join.extra_input_channel(0) != fork.extra_output_channel(0)) {
    return "its AddExtraInput is not on channel '" + fork.extra_output_channel(0) + "'";
  }
  if (join.options.in_place) return "its AddExtraInput works in place";
  return why_not_recompute(match, options);
}

}  // namespace

FusionRule dense_mlp_with_residual_rule() {
  Pattern pattern{optional(fork_to_channel()), of<NormOperation>("a norm"),
                  optional(fork_to_channel())};
  for (auto& element : block()) pattern.push_back(std::move(element));
  pattern.push_back(of<AddExtraInputImpl>("AddExtraInput"));
  return {"DenseMLP with residual", std::move(pattern), why_not_residual, make_dense_mlp};
}

FusionRule dense_mlp_rule() {
  Pattern pattern{of<NormOperation>("a norm")};
  for (auto& element : block()) pattern.push_back(std::move(element));
  return {"DenseMLP", std::move(pattern), why_not_recompute, make_dense_mlp};
}

}  // namespace ligature
