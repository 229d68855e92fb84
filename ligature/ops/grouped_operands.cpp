// The GEMMs of a GroupedLinear. In high precision those of all groups are one kernel. In low
// precision each group is quantized alone, so that it has the bits of a linear of its own.
#include <ATen/ops/alias.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ligature/kernels/gemm.h"
#include "ligature/ops/each_group.h"
#include "ligature/ops/grouped_linear.h"
#include "ligature/readable.h"
#include "ligature/recipes/recipe.h"

namespace ligature {
namespace {

using kernels::Groups;

Tensor group_rows(const Tensor& t, const Tensor& index, const Groups& groups, int64_t g) {
  if (!index.defined()) return t.narrow(0, groups.begin(g), groups.size(g));
  return at::index_select(t, 0, index.narrow(0, groups.begin(g), groups.size(g)));
}

void zero_tail(const Tensor& out, const Groups& groups) {
  const int64_t end = groups.end(groups.count - 1);
  if (end < groups.rows) out.narrow(0, end, groups.rows - end).zero_();
}

std::vector<Tensor> plain(const std::vector<Value>& values) {
  std::vector<Tensor> out;
  out.reserve(values.size());
  for (const Value& value : values) out.push_back(value.tensor());
  return out;
}

bool any_quantized(const std::vector<Value>& values) {
  for (const Value& value : values) {
    if (value.is_quantized()) return true;
  }
  return false;
}

bool has_input_quantizer(const OpQuantization* quantization) {
  if (quantization == nullptr) return false;
  for (size_t i = 0; i < quantization->forward.size(); i += 2) {
    if (quantization->forward[i] != nullptr) return true;
  }
  return false;
}

/// Gradients are quantized, or at least the operands of forward stay so.
bool computes_quantized(const OpQuantization* quantization) {
  return quantization != nullptr &&
         quantization->recipe->backward_override() == BackwardOverride::None;
}

SplitAccumulation split_of(const OpQuantization* quantization) {
  return quantization != nullptr ? quantization->recipe->split_accumulation() : SplitAccumulation();
}

}  // namespace

GroupedFwdArgs GroupedLinearImpl::forward_args(const Tensor& x, const Tensor& index, Groups groups,
                                               const OpArgs& args) const {
  GroupedFwdArgs out;
  out.x = x;
  out.index = index;
  out.groups = std::move(groups);
  out.dtype = compute_dtype(args);
  out.quantization = args.calibrating ? nullptr : args.quantization;
  LIGATURE_CHECK_TYPE(out.quantization == nullptr || out.dtype != at::kDouble, "[", label(),
                      "] low precision takes float32, bfloat16 or float16, got float64");
  const bool single = options.single_grouped_weight;
  out.w.resize(options.num_groups);
  each_group(options.num_groups, out.quantization, x, [&](int64_t g) {
    const Tensor& owner = args.params[first_weight() + (single ? 0 : g)];
    const Value weight = single ? Value(owner.select(0, g)) : Value(owner);
    if (out.quantization == nullptr) {
      if (args.quantization != nullptr) {
        const Quantizer* quantizer = args.quantization->forward_quantizer(2 * g + 1);
        if (quantizer != nullptr) quantizer->calibrate(prepare(weight));
      }
      out.w[g] = prepare(weight, out.dtype);
      return;
    }
    const Target target{
        out.quantization->forward_quantizer(2 * g + 1),
        out.quantization->recipe->quantized_usage({true, args.requires_grad.input})};
    const bool keeps = args.keep_weights && out.quantization->weights != nullptr;
    Value w = weight_operand(weight, target, out.dtype,
                             keeps ? &(*out.quantization->weights)[g] : nullptr, owner);
    out.w[g] = w.is_quantized() ? std::move(w) : Value(prepare(w, out.dtype));
  });
  if (options.bias) {
    for (size_t i = 0; i < num_biases(); ++i) {
      out.bias.push_back(prepare(args.params[first_bias() + i], out.dtype));
    }
    if (options.single_grouped_bias) out.bias = out.bias[0].unbind(0);
  }
  if (scales_bias()) {
    const Tensor& scales = args.extra_inputs[1];
    const at::ScalarType wide = out.dtype == at::kDouble ? at::kDouble : at::kFloat;
    if (scales.defined()) out.row_scale = prepare(scales, wide).view({scales.numel()});
  }
  if (args.calibrating && args.quantization != nullptr) {
    const Groups known = kernels::on_host("[" + label() + "]", out.groups);
    for (int64_t g = 0; g < known.count; ++g) {
      const Quantizer* quantizer = args.quantization->forward_quantizer(2 * g);
      if (quantizer != nullptr && known.size(g) > 0) {
        quantizer->calibrate(contiguous(group_rows(x, index, known, g)));
      }
    }
  }
  return out;
}

Tensor GroupedLinearImpl::input_scales(const OpArgs& args) const {
  if (args.quantization == nullptr || args.calibrating) return {};
  if (!weights_require_grad(args.requires_grad)) return {};
  std::vector<Tensor> scales;
  for (int64_t g = 0; g < options.num_groups; ++g) {
    const Quantizer* quantizer = args.quantization->forward_quantizer(2 * g);
    const Tensor scale = quantizer != nullptr ? quantizer->delayed_scale() : Tensor();
    if (!scale.defined()) return {};
    scales.push_back(scale);
  }
  return at::cat(scales);
}

Tensor GroupedLinearImpl::forward(const GroupedFwdArgs& args) {
  if (!any_quantized(args.w) && !has_input_quantizer(args.quantization)) {
    return kernels::grouped_linear_forward(args.x, plain(args.w), args.groups, args.bias,
                                           args.row_scale, args.index, args.out);
  }
  const Groups groups = kernels::on_host("[GroupedLinear]", args.groups);
  const int64_t columns = args.w[0].sizes()[0];
  const Tensor y =
      args.out.defined() ? args.out : at::empty({groups.rows, columns}, args.x.options());
  const bool scaled = args.row_scale.defined() && !args.bias.empty();
  const kernels::Accumulation accumulation =
      kernels::accumulation(split_of(args.quantization).forward);
  each_group(groups.count, args.quantization, args.x, [&](int64_t g) {
    if (groups.size(g) == 0) return;
    const Target target{args.quantization->forward_quantizer(2 * g), {true, false}};
    const Value x = quantize_to(group_rows(args.x, args.index, groups, g), target, args.dtype);
    const Value& w = args.w[g];
    const Tensor bias = args.bias.empty() || scaled ? Tensor() : args.bias[g];
    Tensor part;
    if (x.is_quantized() || w.is_quantized()) {
      // With scales the sum with the bias is rounded once, so it is made in float.
      part = kernels::quantized_linear_forward(
          x, w, {scaled ? at::kFloat : args.dtype, bias, {}, 1.0, accumulation});
    } else {
      part = kernels::linear_forward(x.tensor(), w.tensor(), bias);
    }
    if (scaled) {
      const Tensor scale = args.row_scale.narrow(0, groups.begin(g), groups.size(g)).unsqueeze(1);
      part = cast(part, at::kFloat) + scale * cast(args.bias[g], at::kFloat);
    }
    y.narrow(0, groups.begin(g), groups.size(g)).copy_(part);
  });
  zero_tail(y, groups);
  return y;
}

// The scales first, undefined where there are none; then the weights.
ToSave GroupedLinearImpl::to_save(const GroupedFwdArgs& fwd, const OpArgs& args) const {
  ToSave out;
  if (const Tensor scales = input_scales(args); scales.defined()) out.tensors.emplace_back(scales);
  const BackwardOverride given = args.quantization != nullptr
                                     ? args.quantization->recipe->backward_override()
                                     : BackwardOverride::None;
  if (!args.requires_grad.input || !any_quantized(fwd.w) ||
      given == BackwardOverride::HighPrecision) {
    return out;
  }
  out.tensors.resize(1);
  const bool rows = given == BackwardOverride::Dequantized;
  for (const Value& w : fwd.w) {
    const bool narrows = w.is_quantized() &&
                         (rows ? w.quantized()->rowwise() : w.quantized()->columnwise()).defined();
    out.tensors.push_back(narrows ? Value(w.quantized()->only(rows, !rows)) : w);
  }
  return out;
}

GroupedBwdArgs GroupedLinearImpl::backward_args(const OperationContext& ctx, const Tensor& dy,
                                                const Tensor& dy_index, Groups groups) const {
  const GroupedLinearState state = ctx.state.as<GroupedLinearState>();
  GroupedBwdArgs out;
  out.dy = dy;
  out.dy_index = dy_index;
  out.groups = std::move(groups);
  out.dtype = state.dtype.value_or(dy.scalar_type());
  out.input_dtype = state.input_dtype.value_or(out.dtype);
  out.weight_dtype = state.weight_dtype.value_or(out.dtype);
  out.input_requires_grad = ctx.requires_grad.input;
  out.weight_requires_grad = weights_require_grad(ctx.requires_grad);
  out.quantization = state.calibrating ? nullptr : ctx.quantization.get();
  out.input_scales = ctx.saved_tensor(kInputScales);
  if (state.writes_grad_input) {
    out.dx =
        at::alias(ctx.parameter_references.back()).view({out.groups.rows, options.in_features});
  }
  const bool quantized = computes_quantized(out.quantization);
  const at::ArrayRef<Value> saved_w = saved_weights(ctx);
  if (out.input_requires_grad) {
    const bool single = saved_w.size() == 1 && options.single_grouped_weight;
    for (int64_t g = 0; g < options.num_groups; ++g) {
      const Value w = single ? Value(saved_w[0].tensor().select(0, g)) : saved_w[g];
      out.w.push_back(w.is_quantized() && quantized ? w : Value(prepare(w, out.dtype)));
    }
  }
  const OpQuantization* own = ctx.quantization.get();
  bool any = false;
  for (int64_t g = 0; own != nullptr && g < options.num_groups; ++g) {
    any |= own->backward_quantizer(g) != nullptr;
  }
  if (!any || !(out.input_requires_grad || out.weight_requires_grad)) return out;
  out.groups = kernels::on_host("[" + label() + "]", out.groups);
  if (!state.calibrating) out.dyq.resize(options.num_groups);
  each_group(out.groups.count, own, dy, [&](int64_t g) {
    const Quantizer* quantizer = own->backward_quantizer(g);
    if (out.groups.size(g) == 0) return;
    const Tensor rows = group_rows(dy, dy_index, out.groups, g);
    if (!state.calibrating) {
      const Usage usage{out.input_requires_grad, out.weight_requires_grad};
      out.dyq[g] = quantize_to(rows, {quantizer, usage}, out.dtype);
    } else if (quantizer != nullptr) {
      quantizer->calibrate(contiguous(rows));
    }
  });
  return out;
}

namespace {

/// dy of a group, as it was quantized or not.
Value grad_of(const GroupedBwdArgs& args, int64_t g) {
  return args.dyq.empty() ? Value(group_rows(args.dy, args.dy_index, args.groups, g)) : args.dyq[g];
}

}  // namespace

Tensor GroupedLinearImpl::input_grad(const GroupedBwdArgs& args) {
  const bool plain_out = args.input_dtype == args.dtype;
  const Tensor into = plain_out ? args.dx : Tensor();
  Tensor dx;
  if (args.dyq.empty() && !any_quantized(args.w)) {
    dx = kernels::grouped_linear_input_grad(args.dy, plain(args.w), args.groups, args.dy_index,
                                            into);
  } else {
    const Groups groups = kernels::on_host("[GroupedLinear]", args.groups);
    const kernels::Accumulation accumulation =
        kernels::accumulation(split_of(args.quantization).input_grad);
    dx = into.defined() ? into : at::empty({groups.rows, args.w[0].sizes()[1]}, args.dy.options());
    each_group(groups.count, args.quantization, args.dy, [&](int64_t g) {
      if (groups.size(g) == 0) return;
      const Value dy = grad_of(args, g);
      dx.narrow(0, groups.begin(g), groups.size(g))
          .copy_(dy.is_quantized() || args.w[g].is_quantized()
                     ? kernels::quantized_linear_input_grad(dy, args.w[g],
                                                            {args.dtype, {}, {}, 1.0, accumulation})
                     : kernels::linear_input_grad(dy.tensor(), args.w[g].tensor()));
    });
    zero_tail(dx, groups);
  }
  if (plain_out) return dx;
  if (!args.dx.defined()) return cast(dx, args.input_dtype);
  args.dx.copy_(dx);
  return args.dx;
}

namespace {

/// dW of each group into outs[g], or added to it.
void weight_grads_into(const std::vector<Tensor>& outs, const GroupedBwdArgs& args,
                       bool accumulate) {
  const bool requantizes =
      has_input_quantizer(args.quantization) &&
      args.quantization->recipe->backward_override() != BackwardOverride::HighPrecision;
  if (args.dyq.empty() && !requantizes) {
    kernels::grouped_linear_weight_grad_into(outs, args.dy, args.x, args.groups, accumulate,
                                             args.dy_index, args.x_index);
    return;
  }
  const Groups groups = kernels::on_host("[GroupedLinear]", args.groups);
  const bool quantized = computes_quantized(args.quantization);
  const kernels::ProductArgs product{
      args.dtype, {}, {}, 1.0, kernels::accumulation(split_of(args.quantization).weight_grad)};
  each_group(groups.count, args.quantization, args.dy, [&](int64_t g) {
    Tensor out = outs[g];
    if (groups.size(g) == 0) {
      if (!accumulate) out.zero_();
      return;
    }
    const Tensor scale = args.input_scales.defined() ? args.input_scales.narrow(0, g, 1) : Tensor();
    const RecomputedInput again(args.quantization, 2 * g, scale);
    Value x = quantize_to(group_rows(args.x, args.x_index, groups, g), again.target(), args.dtype);
    if (!quantized) x = prepare(x, args.dtype);
    const Value dy = grad_of(args, g);
    if (x.is_quantized() || dy.is_quantized()) {
      kernels::quantized_linear_weight_grad_into(out, dy, x, accumulate, product);
    } else {
      kernels::linear_weight_grad_into(out, dy.tensor(), x.tensor(), accumulate);
    }
  });
}

std::vector<Tensor> parts_of(const Tensor& packed) { return packed.unbind(0); }

}  // namespace

void GroupedLinearImpl::set_main_grad(size_t weight, Tensor buffer, bool overwrite) {
  LIGATURE_CHECK_INDEX(weight < num_weights(), "[", label(), "] has ", num_weights(),
                       " weights, so there is none with index ", weight);
  main_grads_.resize(num_weights());
  main_grads_[weight] = {std::move(buffer), overwrite, false};
}

std::vector<MainGrad> GroupedLinearImpl::main_grads_of(const GroupedBwdArgs& args,
                                                       const OperationContext& ctx) const {
  std::vector<MainGrad> out;
  for (size_t i = 0; i < num_weights(); ++i) {
    const Tensor& weight = ctx.parameter_references[i];
    MainGrad main = i < main_grads_.size() ? main_grads_[i] : MainGrad();
    if (!ctx.requires_grad.param(first_weight() + i)) {
      main = {at::empty_like(weight), true, false};  // a frozen one has none
    } else if (!main.buffer.defined() && args.dy.is_meta()) {
      main.buffer = at::empty_like(weight);  // nothing is computed, so nothing is added up
    } else if (!main.buffer.defined()) {
      main = find_main_grad(*this, weight);
    }
    LIGATURE_CHECK_STATE(main.buffer.defined(), "[", label(),
                         "] accumulate_into_main_grad is set, but weight ", i, " has no main_grad");
    check_main_grad(*this, weight, main.buffer);
    out.push_back(std::move(main));
  }
  return out;
}

void GroupedLinearImpl::put_weight_grads(const GroupedBwdArgs& args, const OperationContext& ctx,
                                         std::vector<Tensor>& grads) {
  if (options.delay_wgrad_compute) return delay(args, ctx);
  if (options.accumulate_into_main_grad) {
    const std::vector<MainGrad> mains = main_grads_of(args, ctx);
    add_to_main_grads(mains, args);
    for (size_t i = 0; i < mains.size(); ++i) {
      if (!mains[i].return_placeholder) continue;
      const Tensor& weight = ctx.parameter_references[i];
      grads[first_weight() + i] = at::zeros(weight.sizes(), weight.options());
    }
    return;
  }
  const Tensor packed = packed_weight_grads(args);
  put_needed(options.single_grouped_weight ? std::vector<Tensor>{packed} : parts_of(packed),
             first_weight(), ctx.requires_grad, grads);
}

Tensor GroupedLinearImpl::packed_weight_grads(const GroupedBwdArgs& args) const {
  const Tensor packed =
      at::empty({options.num_groups, options.out_features, options.in_features}, args.dy.options());
  weight_grads_into(parts_of(packed), args, false);
  return cast(packed, args.weight_dtype);
}

void GroupedLinearImpl::put_needed(std::vector<Tensor> made, size_t first, const GradFlags& needs,
                                   std::vector<Tensor>& grads) {
  for (size_t i = 0; i < made.size(); ++i) {
    if (needs.param(first + i)) grads[first + i] = std::move(made[i]);
  }
}

void GroupedLinearImpl::add_to_main_grads(const std::vector<MainGrad>& mains,
                                          const GroupedBwdArgs& args) const {
  std::vector<Tensor> outs;
  for (const MainGrad& main : mains) outs.push_back(main.buffer);
  if (options.single_grouped_weight) outs = parts_of(outs[0]);
  const auto overwrites = [](const MainGrad& main) { return main.overwrite; };
  const bool all = std::all_of(mains.begin(), mains.end(), overwrites);
  for (const MainGrad& main : mains) {
    if (main.overwrite && !all) Tensor(main.buffer).zero_();
  }
  weight_grads_into(outs, args, !all);
}

void GroupedLinearImpl::delay(const GroupedBwdArgs& args, const OperationContext& ctx) {
  if (args.dy.is_meta()) return;
  std::vector<Tensor> weights(ctx.parameter_references.begin(),
                              ctx.parameter_references.begin() + num_weights());
  // What forward computed with lives as long as the gradient is waited for.
  auto run = [this, args, weights = std::move(weights), needs = ctx.requires_grad,
              held = ctx.quantization,
              mains = options.accumulate_into_main_grad ? main_grads_of(args, ctx)
                                                        : std::vector<MainGrad>()] {
    if (!mains.empty()) return add_to_main_grads(mains, args);
    const Tensor packed = packed_weight_grads(args);
    const std::vector<Tensor> parts =
        options.single_grouped_weight ? std::vector<Tensor>{packed} : parts_of(packed);
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!needs.param(first_weight() + i)) continue;
      Tensor& grad = Tensor(weights[i]).mutable_grad();
      grad.defined() ? void(grad.add_(parts[i])) : void(grad = parts[i]);
    }
  };
  const std::lock_guard<std::mutex> lock(delayed_mutex_);
  delayed_.push_back(std::move(run));
}

void GroupedLinearImpl::backward_dw() {
  std::function<void()> run;
  {
    const std::lock_guard<std::mutex> lock(delayed_mutex_);
    if (delayed_.empty()) return;
    run = std::move(delayed_.front());
    delayed_.pop_front();
  }
  const at::NoGradGuard no_grad;
  run();
}

size_t GroupedLinearImpl::num_delayed() const {
  const std::lock_guard<std::mutex> lock(delayed_mutex_);
  return delayed_.size();
}

}  // namespace ligature
