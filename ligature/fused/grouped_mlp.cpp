#include "ligature/fused/grouped_mlp.h"

#include <ATen/ops/add.h>

#include <utility>

#include "ligature/fused/common.h"
#include "ligature/kernels/routing.h"
#include "ligature/prepare.h"

namespace ligature {
namespace {

/// Saved with the activation.
enum SavedByActivation : size_t { kSavedZ, kSavedScales };

/// What the routing keeps with Combine: which scales came from Dispatch.
struct RoutedState {
  bool scales = false;        ///< those of the activation
  bool bias1_scales = false;  ///< those of FC1's biases
  bool bias2_scales = false;  ///< of FC2's

  template <class F>
  void fields(F&& f) {
    f("scales", scales);
    f("bias1_scales", bias1_scales);
    f("bias2_scales", bias2_scales);
  }
};

int64_t product_of(at::IntArrayRef sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

at::DimVector with_last(at::IntArrayRef sizes, int64_t last) {
  at::DimVector out(sizes);
  out.back() = last;
  return out;
}

void add_to(Tensor& sum, Tensor more) {
  if (more.defined()) sum = sum.defined() ? at::add(sum, more) : std::move(more);
}

}  // namespace

/// The arguments of forward, with Dispatch's outputs in the places of the channels inside.
struct GroupedMLP::CompleteArgs {
  CompleteArgs(const GroupedMLP& mlp, ArgsList given, const std::vector<Tensor>& from_dispatch)
      : all(given.begin(), given.end()), extras(given.size()) {
    for (size_t i = mlp.fc1_at(); i < all.size(); ++i) {
      extras[i].assign(given[i].extra_inputs.begin(), given[i].extra_inputs.end());
      for (size_t slot = 0; slot < extras[i].size(); ++slot) {
        if (!extras[i][slot].defined()) extras[i][slot] = from_dispatch[mlp.dispatched(i, slot)];
      }
      all[i].extra_inputs = extras[i];
    }
  }
  const OpArgs& operator[](size_t i) const { return all[i]; }

  std::vector<OpArgs> all;
  std::vector<std::vector<Tensor>> extras;
};

GroupedMLP::GroupedMLP(const OpList& ops) : FusedOperation("GroupedMLP", ops) {
  for (const BasicOpPtr& basic : basic_ops()) {
    if (auto* linear = basic->as<GroupedLinearImpl>()) {
      (fc1_ != nullptr ? fc2_ : fc1_) = linear;
    } else if (auto* plain = basic->as<ActivationOperation>()) {
      plain_ = plain;
    } else if (auto* scaled = basic->as<ScaledActivationOperation>()) {
      scaled_ = scaled;
    } else if (auto* dispatch = basic->as<DispatchImpl>()) {
      dispatch_ = dispatch;
    } else {
      combine_ = basic->as<CombineImpl>();
    }
  }
}

namespace {

size_t output_on_channel(const DispatchImpl& dispatch, const std::string& channel) {
  size_t output = 0;
  while (output < DispatchImpl::kNumOutputs &&
         (channel.empty() || dispatch.extra_output_channel(output) != channel)) {
    ++output;
  }
  return output;
}

}  // namespace

size_t GroupedMLP::dispatched(size_t op, size_t slot) const {
  if (!routes()) return DispatchImpl::kNumOutputs;
  return output_on_channel(*dispatch_, basic_op<BasicOperation>(op).extra_input_channel(slot));
}

FuserForwardResult GroupedMLP::fuser_forward_compute(const Value& input, ArgsList given) {
  FuserForwardResult result = fused_forward_result({}, num_basic_ops());
  Tensor index;
  ValueMeta to_fc1 = ValueMeta::of(input);
  if (routes()) {
    result.extra_outputs[0] = dispatch_->route(input.sizes(), given[0]);
    index = kernels::tokens_of(result.extra_outputs[0][DispatchImpl::kMap]);
    to_fc1.sizes = {index.numel(), fc1_->options.in_features};
  }
  const CompleteArgs args(*this, given, result.extra_outputs[0]);
  const OpArgs& args1 = args[fc1_at()];
  const OpArgs& args2 = args[fc2_at()];
  const at::IntArrayRef batch = at::IntArrayRef(to_fc1.sizes).slice(0, to_fc1.sizes.size() - 1);
  const int64_t rows = product_of(batch);
  const at::Device device = input.device();
  const Tensor& splits1 = args1.extra_inputs[0];
  const Tensor& splits2 = args2.extra_inputs[0];
  const kernels::Groups groups = fc1_->groups_of(splits1, rows, device);
  const bool keep_z =
      args[activation_at()].requires_grad.op || fc2_->weights_require_grad(args2.requires_grad);
  Tensor z;
  {
    const Tensor out = fc1_->output_buffer(to_fc1, args1);
    const at::IntArrayRef sizes = input.sizes();
    const Tensor x =
        prepare(input, fc1_->compute_dtype(args1))
            .view({product_of(sizes.slice(0, sizes.size() - 1)), fc1_->options.in_features});
    GroupedFwdArgs fwd = fc1_->forward_args(x, index, groups, args1);
    fwd.out = out;
    z = GroupedLinearImpl::forward(fwd);
    result.to_save[fc1_at()] = fc1_->to_save(fwd, args1);
  }
  ValueMeta to_fc2 = to_fc1;
  to_fc2.sizes.back() = fc2_->options.in_features;
  to_fc2.dtype = z.scalar_type();
  const Tensor out = fc2_->output_buffer(to_fc2, args2);
  Tensor a;
  {
    const Tensor scales =
        has_scales() ? contiguous(args[activation_at()].extra_inputs[0]).view({rows}) : Tensor();
    a = prepare(kernels::activation_forward(z, spec(), scales), fc2_->compute_dtype(args2));
  }
  if (keep_z) result.to_save[activation_at()].tensors.emplace_back(std::move(z));
  z = Tensor();
  GroupedFwdArgs fwd = fc2_->forward_args(
      std::exchange(a, {}), {},
      splits2.is_same(splits1) ? groups : fc2_->groups_of(splits2, rows, device), args2);
  fwd.out = out;
  Tensor y = GroupedLinearImpl::forward(fwd);
  result.to_save[fc2_at()] = fc2_->to_save(fwd, args2);
  fwd.x = Tensor();
  const int64_t columns = fc2_->options.out_features;
  if (!routes()) {
    result.output = y.view(with_last(input.sizes(), columns));
    return result;
  }
  const Tensor& map = args[combine_at()].extra_inputs[CombineImpl::kMap];
  result.output = kernels::combine_rows(y, map).view(with_last(map.sizes().slice(1), columns));
  return result;
}

// Each operation's context is what it is after that operation alone, but for the input of FC2,
// which is made again, that of FC1, which is not in the experts' order, and those of scales that
// Dispatch gave.
void GroupedMLP::fuser_forward_save_ctx(CtxList ctxs, const Value& input,
                                        FuserForwardResult& result, ArgsList given) {
  if (!given[fc2_at()].requires_grad.op) return;
  const CompleteArgs args(*this, given, result.extra_outputs[0]);
  const OpArgs& args1 = args[fc1_at()];
  const bool keep_x = fc1_->weights_require_grad(args1.requires_grad);
  fc1_->save_ctx(*ctxs[fc1_at()], keep_x ? input : Value(), input.dtype(), result.to_save[fc1_at()],
                 args1);
  fc2_->save_ctx(*ctxs[fc2_at()], {}, fc1_->compute_dtype(args1), result.to_save[fc2_at()],
                 args[fc2_at()]);

  OperationContext& activation = *ctxs[activation_at()];
  save_spec(activation, spec());
  std::vector<Value> saved = std::move(result.to_save[activation_at()].tensors);
  saved.resize(2);
  if (saved[kSavedZ].defined() && has_scales()) {
    saved[kSavedScales] = args[activation_at()].extra_inputs[0];
  }
  activation.save_for_backward(std::move(saved));

  if (!routes()) return;
  dispatch_->fuser_forward_save_ctx(ctxs, input, result, given);
  OperationContext& combine = *ctxs[combine_at()];
  combine.save_for_backward({args[combine_at()].extra_inputs[CombineImpl::kMap]});
  const auto inside = [&](size_t op, size_t slot) {
    return slot < given[op].extra_inputs.size() && !given[op].extra_inputs[slot].defined();
  };
  combine.state.as<RoutedState>() = {inside(activation_at(), 0), inside(fc1_at(), 1),
                                     inside(fc2_at(), 1)};
}

/// How the rows of backward lie.
struct GroupedMLP::Rows {
  int64_t count = 0;
  kernels::Groups groups1, groups2;
  Tensor index1;  ///< of FC1's input: which row of the block's input each row is
  Tensor index2;  ///< of FC2's output: likewise of the block's output
};

GroupedMLP::Rows GroupedMLP::rows_of(CtxList ctxs, const Value& grad_output) const {
  Rows rows;
  const at::IntArrayRef sizes = grad_output.sizes();
  rows.count = product_of(sizes.slice(0, sizes.size() - 1));
  if (routes()) {
    const Tensor& map1 = ctxs[0]->saved_tensor(0);
    const Tensor& map2 = ctxs[combine_at()]->saved_tensor(0);
    rows.index1 = kernels::tokens_of(map1);
    rows.index2 = map2.is_same(map1) ? rows.index1 : kernels::tokens_of(map2);
    rows.count = rows.index1.numel();
  }
  const at::Device device = grad_output.device();
  const Tensor& splits1 = GroupedLinearImpl::saved_splits(*ctxs[fc1_at()]);
  const Tensor& splits2 = GroupedLinearImpl::saved_splits(*ctxs[fc2_at()]);
  rows.groups1 = fc1_->groups_of(splits1, rows.count, device);
  rows.groups2 =
      splits2.is_same(splits1) ? rows.groups1 : fc2_->groups_of(splits2, rows.count, device);
  return rows;
}

FuserBackwardResult GroupedMLP::fuser_backward(CtxList ctxs, const Value& grad_output,
                                               GradList grad_extra_outputs) {
  const auto needs = [&](size_t i) -> const GradFlags& { return ctxs[i]->requires_grad; };
  FuserBackwardResult out = fused_backward_result(num_basic_ops());
  for (size_t i = 0; i < num_basic_ops(); ++i) {
    out.grad_extra_inputs[i].resize(basic_op<BasicOperation>(i).num_extra_inputs());
  }
  for (const auto& [linear, at] : {std::pair(fc1_, fc1_at()), std::pair(fc2_, fc2_at())}) {
    out.grad_params[at].resize(linear->num_weights() + linear->num_biases());
  }
  if (!needs(fc2_at()).op) return out;
  const Rows rows = rows_of(ctxs, grad_output);
  const RoutedState from_dispatch =
      routes() ? ctxs[combine_at()]->state.as<RoutedState>() : RoutedState();
  const auto dtype2 = ctxs[fc2_at()]->state.as<GroupedLinearState>().dtype;
  Tensor dx;
  {
    Tensor dz;
    {
      const Tensor dy = prepare(grad_output, dtype2.value_or(grad_output.dtype()));
      const int64_t columns = fc2_->options.out_features;
      dz = fc2_and_activation_backward(ctxs, dy.view({dy.numel() / columns, columns}), rows, out);
    }
    if (needs(fc1_at()).op) dx = fc1_backward(ctxs, std::move(dz), rows, out);
  }
  if (!routes()) {
    if (dx.defined()) {
      out.grad_input = dx.view(with_last(grad_output.sizes(), fc1_->options.in_features));
    }
    return out;
  }
  if (!needs(0).op) return out;
  const Tensor& map = ctxs[0]->saved_tensor(0);
  if (needs(0).extra_input(DispatchImpl::kProbabilities)) {
    Tensor dprobabilities = grad_extra_outputs[0][DispatchImpl::kRowProbabilities];
    if (from_dispatch.bias2_scales) add_to(dprobabilities, out.grad_extra_inputs[fc2_at()][1]);
    if (from_dispatch.scales) add_to(dprobabilities, out.grad_extra_inputs[activation_at()][0]);
    if (from_dispatch.bias1_scales) add_to(dprobabilities, out.grad_extra_inputs[fc1_at()][1]);
    if (dprobabilities.defined()) {
      out.grad_extra_inputs[0][DispatchImpl::kProbabilities] =
          kernels::combine_slots(dprobabilities, map);
    }
  }
  if (!needs(0).input) return out;
  const auto input_shape = ctxs[0]->state.as<DispatchState>().input_shape;
  out.grad_input = kernels::combine_rows(dx, map).view(*input_shape);
  return out;
}

// At most z and one tensor of FC2's input are held at a time: one pass reads z and the gradient of
// that input, and writes its own gradient over z and the input over the gradient.
Tensor GroupedMLP::fc2_and_activation_backward(CtxList ctxs, const Tensor& dy, const Rows& rows,
                                               FuserBackwardResult& out) {
  OperationContext& ctx = *ctxs[fc2_at()];
  OperationContext& activation = *ctxs[activation_at()];
  GroupedBwdArgs bwd = fc2_->backward_args(ctx, dy, rows.index2, rows.groups2);
  fc2_->put_bias_grads(bwd, ctx, out.grad_params[fc2_at()], out.grad_extra_inputs[fc2_at()]);
  const bool need_da = activation.requires_grad.op;
  if (!need_da && !bwd.weight_requires_grad) return {};

  const kernels::ActivationSpec act = saved_spec(activation, spec());
  const Tensor given_scales = activation.saved_tensor(kSavedScales);
  const bool need_dscales = given_scales.defined() && activation.requires_grad.extra_input(0);
  const Tensor scales =
      given_scales.defined() ? contiguous(given_scales).view({rows.count}) : Tensor();
  const ReleasedValue z = activation.release_saved(kSavedZ);
  const auto put_weight_grads = [&](Tensor a) {
    bwd.x = prepare(a, bwd.dtype);
    a = Tensor();
    fc2_->put_weight_grads(bwd, ctx, out.grad_params[fc2_at()]);
  };
  if (!need_da) {
    put_weight_grads(kernels::activation_forward(z.value.tensor(), act, scales));
    return {};
  }
  const Tensor da = GroupedLinearImpl::input_grad(bwd);
  Tensor dz, dscales;
  if (!bwd.weight_requires_grad) {
    auto grads = kernels::activation_backward(da, z.value.tensor(), act, scales, need_dscales,
                                              false, z.may_overwrite);
    dz = std::move(grads.dx);
    dscales = std::move(grads.dscales);
  } else {
    const bool over_da = !bwd.dx.defined();  // else it is a buffer of the caller's
    kernels::ActivationRecompute both =
        scales.defined()
            ? kernels::activation_recompute_scaled(da, z.value.tensor(), act, scales, need_dscales,
                                                   over_da, z.may_overwrite)
            : kernels::activation_recompute(da, z.value.tensor(), act, false, over_da,
                                            z.may_overwrite);
    put_weight_grads(std::move(both.y));
    dz = std::move(both.dx);
    dscales = std::move(both.dscales);
  }
  if (need_dscales) {
    out.grad_extra_inputs[activation_at()][0] = dscales.view(given_scales.sizes());
  }
  return dz;
}

Tensor GroupedMLP::fc1_backward(CtxList ctxs, Tensor dz, const Rows& rows,
                                FuserBackwardResult& out) {
  OperationContext& ctx = *ctxs[fc1_at()];
  const auto dtype = ctx.state.as<GroupedLinearState>().dtype.value_or(dz.scalar_type());
  GroupedBwdArgs bwd = fc1_->backward_args(ctx, prepare(dz, dtype), {}, rows.groups1);
  dz = Tensor();
  fc1_->put_bias_grads(bwd, ctx, out.grad_params[fc1_at()], out.grad_extra_inputs[fc1_at()]);
  if (bwd.weight_requires_grad) {
    bwd.x = fc1_->release_input(ctx);
    bwd.x_index = rows.index1;
    fc1_->put_weight_grads(bwd, ctx, out.grad_params[fc1_at()]);
    bwd.x = bwd.x_index = Tensor();
  }
  const bool need_dx =
      bwd.input_requires_grad && (!routes() || ctxs[0]->requires_grad.input || bwd.dx.defined());
  return need_dx ? GroupedLinearImpl::input_grad(bwd) : Tensor();
}

namespace {

std::string why_not_mlp(const GroupedLinearImpl& fc1, const BasicOperation& activation,
                        const GroupedLinearImpl& fc2) {
  const auto* plain = dynamic_cast<const ActivationOperation*>(&activation);
  const auto* scaled = dynamic_cast<const ScaledActivationOperation*>(&activation);
  if (plain != nullptr ? plain->caches_quantized_input() : scaled->caches_quantized_input()) {
    return "its activation caches a quantized input";
  }
  const auto differ = [](const char* what, int64_t a, int64_t b) {
    return std::string(what) + std::to_string(a) + " and " + std::to_string(b);
  };
  if (fc1.options.num_groups != fc2.options.num_groups) {
    return differ("its linears have different numbers of groups, ", fc1.options.num_groups,
                  fc2.options.num_groups);
  }
  const kernels::ActivationSpec spec = plain != nullptr ? plain->spec() : scaled->spec();
  const int64_t wanted = fc2.options.in_features * (kernels::is_gated(spec.kind) ? 2 : 1);
  if (fc1.options.out_features != wanted) {
    return differ("its sizes do not fit: out_features and what the activation wants are ",
                  fc1.options.out_features, wanted);
  }
  if (const auto &a = fc1.extra_input_channel(0), &b = fc2.extra_input_channel(0); a != b) {
    const auto name = [](const std::string& channel) {
      return channel.empty() ? std::string("the caller's") : "channel '" + channel + "'";
    };
    return "its linears have different split sizes, " + name(a) + " and " + name(b);
  }
  return "";
}

const GroupedLinearImpl& grouped_linear(const OpPtr& op) {
  return static_cast<const GroupedLinearImpl&>(*op);
}
const BasicOperation& basic_op_of(const OpPtr& op) {
  return static_cast<const BasicOperation&>(*op);
}

std::string why_not_grouped_mlp(const Match& match, const PlanOptions&) {
  return why_not_mlp(grouped_linear(match.ops[0]), basic_op_of(match.ops[1]),
                     grouped_linear(match.ops[2]));
}

std::string why_not_routed(const Match& match, const PlanOptions&) {
  const auto& dispatch = static_cast<const DispatchImpl&>(*match.ops[0]);
  const GroupedLinearImpl& fc1 = grouped_linear(match.ops[1]);
  const auto& combine = static_cast<const CombineImpl&>(*match.ops[4]);
  if (combine.options.weighted) return "its Combine is weighted";
  const auto joined = [&](const BasicOperation& op, DispatchImpl::Output output) {
    return output_on_channel(dispatch, op.extra_input_channel(0)) == output;
  };
  if (!joined(fc1, DispatchImpl::kSplits)) {
    return "its GroupedLinear does not take its split sizes from its Dispatch's channel";
  }
  if (!joined(combine, DispatchImpl::kMap)) {
    return "its Combine does not take its map from its Dispatch's channel";
  }
  return why_not_mlp(fc1, basic_op_of(match.ops[2]), grouped_linear(match.ops[3]));
}

PatternElement any_activation() {
  return {"an activation",
          [](at::ArrayRef<OpPtr> ops) -> size_t {
            const FusibleOperation* op = ops.front().get();
            return dynamic_cast<const ActivationOperation*>(op) != nullptr ||
                           dynamic_cast<const ScaledActivationOperation*>(op) != nullptr
                       ? 1
                       : 0;
          },
          false};
}

OpPtr make_grouped_mlp(const Match& match) { return std::make_shared<GroupedMLP>(match.ops); }

}  // namespace

FusionRule grouped_mlp_with_routing_rule() {
  return {"GroupedMLP with routing",
          {of<DispatchImpl>("Dispatch"), of<GroupedLinearImpl>("GroupedLinear"), any_activation(),
           of<GroupedLinearImpl>("GroupedLinear"), of<CombineImpl>("Combine")},
          why_not_routed,
          make_grouped_mlp};
}

FusionRule grouped_mlp_rule() {
  return {"GroupedMLP",
          {of<GroupedLinearImpl>("GroupedLinear"), any_activation(),
           of<GroupedLinearImpl>("GroupedLinear")},
          why_not_grouped_mlp,
          make_grouped_mlp};
}

}  // namespace ligature
