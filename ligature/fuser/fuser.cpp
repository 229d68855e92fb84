#include "ligature/fuser/fuser.h"

#include <ATen/ops/_fw_primal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

#include "ligature/fuser/builtin_scope.h"
#include "ligature/fuser/precision.h"
#include "ligature/fuser/strict.h"

namespace ligature {

OperationFuser::OperationFuser(const OpList& ops, FuserOptions options)
    : ops_(ops), options_(std::move(options)) {
  LIGATURE_CHECK(!ops.empty(), "a fuser needs at least one operation");
  for (const auto& op : ops) {
    for (auto& basic : op->basic_ops()) basic_ops_.push_back(std::move(basic));
  }
  wiring_ = std::make_shared<const Wiring>(options_.use_channels
                                               ? wire(basic_ops_, options_.open_channels)
                                               : wire_without_channels(basic_ops_));
}

void OperationFuser::check_call(const Call& call) const {
  LIGATURE_CHECK_TYPE(call.input.defined(), "[", basic_ops_.front()->label(),
                      "] input must be a tensor, got none");
  LIGATURE_CHECK(call.extra_inputs.size() == num_extra_inputs(), "the operations ",
                 describe(basic_ops_), " take ", num_extra_inputs(), " extra inputs, got ",
                 call.extra_inputs.size());
  LIGATURE_CHECK(call.kwargs.empty() || call.kwargs.size() == basic_ops_.size(),
                 "keyword arguments must be given for each of ", basic_ops_.size(),
                 " basic operations, got ", call.kwargs.size());
  for (size_t k = 0; k < call.extra_inputs.size(); ++k) {
    LIGATURE_CHECK_TYPE(call.extra_inputs[k].defined(), "extra input ", k, " of ",
                        describe(basic_ops_), " must be a tensor, got none");
    LIGATURE_CHECK(call.extra_inputs[k].device() == call.input.device(), "extra input ", k, " of ",
                   describe(basic_ops_), " must be on the input's device ",
                   call.input.device().str(), ", got ", call.extra_inputs[k].device().str());
  }
  LIGATURE_CHECK_STATE(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode),
      "transforms of torch.func (grad, vmap, jvp) cannot look into a fuser; use torch.autograd");
  bool forward_mode =
      !call.input.is_quantized() && torch::autograd::isFwGradDefined(call.input.tensor());
  for (const Tensor& t : call.params)
    forward_mode = forward_mode || torch::autograd::isFwGradDefined(t);
  for (const Tensor& t : call.extra_inputs) {
    forward_mode = forward_mode || torch::autograd::isFwGradDefined(t);
  }
  LIGATURE_CHECK_STATE(!forward_mode, "forward-mode differentiation of a fuser is not supported");
}

// Recipes with the same fields are the same to a plan.
bool OperationFuser::PlanKey::operator==(const PlanKey& other) const {
  const bool same_recipe =
      recipe == other.recipe ||
      (recipe != nullptr && other.recipe != nullptr && recipe->key() == other.recipe->key());
  return same_recipe && registry == other.registry &&
         first_backward_op == other.first_backward_op && dtype == other.dtype &&
         device == other.device && calibrating == other.calibrating;
}

std::shared_ptr<const Plan> OperationFuser::plan_for(const PlanKey& key, bool to_run) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto is_wanted = [&](const KeptPlan& kept) { return kept.key == key; };
  auto found = std::find_if(plans_.begin(), plans_.end(), is_wanted);
  if (found == plans_.end()) {
    PlanOptions options;
    options.recipe = key.recipe;
    options.calibrating = key.calibrating;
    options.dtype = key.dtype;
    options.device = key.device;
    options.recompute = options_.recompute;
    options.requires_grad = key.first_backward_op < basic_ops_.size();
    auto plan = make_plan(basic_ops_, wiring_, options, key.first_backward_op, options_.fuse);
    std::erase_if(plans_, [&](const KeptPlan& kept) { return kept.key.registry != key.registry; });
    plans_.push_back({key, std::move(plan), false});
    found = plans_.end() - 1;
  }
  if (to_run) {
    if (!found->checked) {
      check_strict(*found->plan, options_.strict);
      found->checked = true;
    }
    if (last_plan_ != found->plan) {
      last_plan_ = found->plan;
      // Its operations know again which recipe they used last, and where.
      for (const auto& op : basic_ops_) {
        if (const auto state = op->quantization(key.recipe, key.device)) {
          state->move_to(key.device);
        }
      }
    }
  }
  return found->plan;
}

std::shared_ptr<const Plan> OperationFuser::plan() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return last_plan_;
}

void OperationFuser::set_recompute(Recompute recompute) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (recompute == options_.recompute) return;
  options_.recompute = recompute;
  plans_.clear();
}

void OperationFuser::prepare() {
  if (prepared_.exchange(true)) return;
  for (const auto& op : basic_ops_) op->pre_first_fuser_forward();
}

OperationFuser::PlanKey OperationFuser::key_for(at::ScalarType dtype, at::Device device,
                                                const AutocastState& autocast,
                                                const GradPlan& grads) const {
  PlanKey key;
  key.registry = registry_version();
  key.first_backward_op = grads.first_backward_op;
  key.dtype = dtype;
  key.device = device;
  if (const RecipePtr& recipe = autocast.active()) {
    key.recipe = recipe;
    key.calibrating = !autocast.enabled;
  }
  return key;
}

std::shared_ptr<const Plan> OperationFuser::plan_traced(const ValueMeta& input,
                                                        const AutocastState& autocast,
                                                        const GradPlan& grads) {
  return plan_for(key_for(input.dtype, input.device, autocast, grads), true);
}

std::string OperationFuser::enter_context(Call& call, at::Device device) const {
  const AutocastState& state = autocast_state();
  if (state.recipe == nullptr && state.session == nullptr) return {};
  call.autocast = state;
  std::string why = why_high_precision(call, basic_ops_, device);
  if (!why.empty()) call.autocast.enabled = call.autocast.calibrating = false;
  return why;
}

void OperationFuser::remember(const Call& call, const std::shared_ptr<const Plan>& plan,
                              const GradPlan& grads, const std::string& why_high_precision) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!last_situation_) last_situation_.emplace();
  Situation& situation = *last_situation_;
  const auto note = [](Situation::Input& input, const Tensor& tensor) {
    input.meta.sizes = tensor.sizes();
    input.meta.dtype = tensor.scalar_type();
    input.meta.device = tensor.device();
    input.strides = tensor.strides();
    input.requires_grad = tensor.requires_grad();
  };
  situation.input.meta = ValueMeta::of(call.input);
  if (!call.input.is_quantized()) note(situation.input, call.input.tensor());
  situation.extra_inputs.resize(call.extra_inputs.size());
  for (size_t k = 0; k < call.extra_inputs.size(); ++k) {
    note(situation.extra_inputs[k], call.extra_inputs[k]);
  }
  situation.autocast_dtype = call.autocast_dtype;
  situation.why_high_precision = why_high_precision;
  situation.gradients = at::GradMode::is_enabled();
  if (situation.plan != plan) situation.plan = plan;
  situation.grads.first_backward_op = grads.first_backward_op;
  situation.grads.flags.assign(grads.flags.begin(), grads.flags.end());
  if (last_trace_ != nullptr || call.trace != nullptr) last_trace_ = call.trace;
}

std::vector<Tensor> OperationFuser::run(Call&& call) {
  check_call(call);
  const std::string why_high_precision = enter_context(call, call.input.device());
  const GradPlan grads = plan_gradients(call, *wiring_, basic_ops_.size());
  const std::shared_ptr<const Plan> plan = plan_for(key_for(call, grads), true);
  if (StrictScope::active()) StrictScope::check(*plan);
  call.autocast_dtype = autocast_dtype(call.input.device());
  if (plan->has_guests) {
    call.trace = std::make_shared<Trace>(plan->forward.size(), plan->backward.size());
    call.trace->device = call.input.device().type();
  }
  remember(call, plan, grads, why_high_precision);
  return execute(plan, std::move(call), grads);
}

Call OperationFuser::collect() const {
  Call call;
  call.param_offsets.push_back(0);
  for (const auto& op : basic_ops_) {
    op->collect_parameters(call.params);
    call.param_offsets.push_back(call.params.size());
    call.training.push_back(op->parameter_owner().is_training());
  }
  return call;
}

std::vector<Tensor> OperationFuser::operator()(const Tensor& input,
                                               std::vector<Tensor> extra_inputs,
                                               std::vector<OpKwargs> kwargs) {
  prepare();
  Call call = collect();
  call.input = input;
  call.extra_inputs = std::move(extra_inputs);
  call.kwargs = std::move(kwargs);
  return run(std::move(call));
}

}  // namespace ligature
