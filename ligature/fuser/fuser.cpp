#include "ligature/fuser/fuser.h"

#include <ATen/ops/_fw_primal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

#include "ligature/base/modes.h"
#include "ligature/fuser/builtin_scope.h"
#include "ligature/fuser/live_fusers.h"
#include "ligature/fuser/only_where_faster.h"
#include "ligature/fuser/strict.h"
#include "ligature/readable.h"

namespace ligature {
namespace {

RecordedRun recorded_run = nullptr;
MakeObserver observer_of_calls = nullptr;

}  // namespace

bool set_observer_of_calls(MakeObserver make) {
  observer_of_calls = make;
  return true;
}

void set_recorded_run(RecordedRun run) { recorded_run = run; }

OperationFuser::OperationFuser(const OpList& ops, FuserOptions options)
    : ops_(ops), options_(std::move(options)) {
  LIGATURE_CHECK(!ops.empty(), "a fuser needs at least one operation");
  for (size_t i = 0; i < ops.size(); ++i) {
    LIGATURE_CHECK_TYPE(ops[i] != nullptr, "operation ", i, " of a fuser is null");
    for (auto& basic : ops[i]->basic_ops()) basic_ops_.push_back(std::move(basic));
  }
  wiring_ = std::make_shared<const Wiring>(options_.use_channels
                                               ? wire(basic_ops_, options_.open_channels)
                                               : wire_without_channels(basic_ops_));
  LiveFusers::get().add(this);
}

OperationFuser::~OperationFuser() { LiveFusers::get().remove(this); }

namespace {

bool is_dense(const Tensor& t) {
  return !t.defined() || is_readable(t) ||
         (t.layout() == at::kStrided && !t.unsafeGetTensorImpl()->is_nested());
}

}  // namespace

/// Planning asks for sizes, which not all layouts have: what no kernel could read is refused
/// before. Operations of a host language may take it.
void OperationFuser::check_layouts(const Call& call) const {
  for (size_t op = 0; op < basic_ops_.size(); ++op) {
    const BasicOperation& basic = *basic_ops_[op];
    if (basic.is_python_op()) continue;
    const auto check = [&](const Tensor& t, c10::function_ref<std::string()> what) {
      if (!is_dense(t)) readable(t, [&] { return "[" + basic.label() + "] " + what(); });
    };
    if (op == 0) check(call.input.identity(), [] { return std::string("input"); });
    for (size_t j = 0; j < wiring_->inputs[op].size(); ++j) {
      const size_t caller = wiring_->inputs[op][j].caller;
      if (caller >= call.extra_inputs.size()) continue;
      check(call.extra_inputs[caller], [&] { return "extra input " + std::to_string(j); });
    }
    for (size_t k = call.param_offsets[op]; k < call.param_offsets[op + 1]; ++k) {
      check(call.params[k], [&] {
        const auto names = basic.parameter_names();
        const size_t j = k - call.param_offsets[op];
        return j < names.size() ? names[j] : "parameter " + std::to_string(j);
      });
    }
  }
}

/// May the caller's extra input `k` be on another device than the input?
bool OperationFuser::may_be_elsewhere(size_t k) const {
  for (size_t op = 0; op < basic_ops_.size(); ++op) {
    for (size_t j = 0; j < wiring_->inputs[op].size(); ++j) {
      if (wiring_->inputs[op][j].caller == k)
        return basic_ops_[op]->extra_input_may_be_elsewhere(j);
    }
  }
  return false;
}

void OperationFuser::check_call(const Call& call) const {
  LIGATURE_CHECK_TYPE(call.input.defined(), "[", basic_ops_.front()->label(),
                      "] input must be a tensor, got none");
  check_layouts(call);
  LIGATURE_CHECK(call.extra_inputs.size() == num_extra_inputs(), "the operations ",
                 describe(basic_ops_), " take ", num_extra_inputs(), " extra inputs, got ",
                 call.extra_inputs.size());
  LIGATURE_CHECK(call.kwargs.empty() || call.kwargs.size() == basic_ops_.size(),
                 "keyword arguments must be given for each of ", basic_ops_.size(),
                 " basic operations, got ", call.kwargs.size());
  for (size_t k = 0; k < call.extra_inputs.size(); ++k) {
    LIGATURE_CHECK_TYPE(call.extra_inputs[k].defined(), "extra input ", k, " of ",
                        describe(basic_ops_), " must be a tensor, got none");
    LIGATURE_CHECK(call.extra_inputs[k].device() == call.input.device() || may_be_elsewhere(k),
                   "extra input ", k, " of ", describe(basic_ops_),
                   " must be on the input's device ", call.input.device().str(), ", got ",
                   call.extra_inputs[k].device().str());
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
  return plan_for(key_for(input.dtype, input.device, autocast, grads), true, nullptr);
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
    if (!is_dense(tensor)) return;  // the run refuses it
    input.meta.sizes = tensor.sizes();
    input.meta.dtype = tensor.scalar_type();
    input.meta.device = tensor.device();
    input.strides = tensor.strides();
    input.requires_grad = tensor.requires_grad();
  };
  if (call.input.is_quantized()) {
    situation.input.meta = ValueMeta::of(call.input);
  } else {
    note(situation.input, call.input.tensor());
  }
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
  if (last_seen_ != nullptr || call.observer != nullptr) last_seen_ = call.observer;
}

std::string OperationFuser::prepare_flat(Call& call) {
  check_call(call);
  const ModesHidden modes;  // planning is no part of the call
  std::string why_high_precision = enter_context(call, call.input.device());
  const GradPlan grads = plan_gradients(call, *wiring_, basic_ops_.size());
  call.autocast_dtype = autocast_dtype(call.input.device());
  const auto plan = plan_for(key_for(call, grads), true, call.planner);
  const auto is_symbolic = [](const Tensor& t) {
    return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  const bool symbolic =
      (!call.input.is_quantized() && is_symbolic(call.input.tensor())) ||
      std::any_of(call.extra_inputs.begin(), call.extra_inputs.end(), is_symbolic);
  if (!symbolic) remember(call, plan, grads, why_high_precision);
  return why_high_precision;
}

std::vector<Tensor> OperationFuser::run(Call&& call) {
  if (has_tracer()) {
    prepare_flat(call);
    return recorded_run(*this, std::move(call));
  }
  check_call(call);
  check_no_fake_mode([this] { return "[" + basic_ops_.front()->label() + "]"; });
  const std::string why_high_precision = enter_context(call, call.input.device());
  const GradPlan grads = plan_gradients(call, *wiring_, basic_ops_.size());
  const std::shared_ptr<const Plan> plan = plan_for(key_for(call, grads), true, call.planner);
  if (StrictScope::active()) {
    StrictScope::check(*plan);
    call.no_sync = StrictScope::forbids_sync();
  }
  call.no_sync = call.no_sync || forbids_sync(options_.strict);
  call.autocast_dtype = autocast_dtype(call.input.device());
  if (plan->has_python_ops) {
    call.observer = observer_of_calls(*plan, call.input.device().type());
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
