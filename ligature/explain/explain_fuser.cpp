// How a fuser explains itself: it runs its plan, forward and backward, on tensors without memory
// and notes what happens. Operations of a host language cannot be asked that way; a plan with some
// of them is traced whenever it really runs.
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <unordered_map>

#include "ligature/explain/explain.h"
#include "ligature/explain/tracer.h"
#include "ligature/fuser/builtin_scope.h"
#include "ligature/fuser/fuser.h"
#include "ligature/kernels/backend.h"

namespace ligature {
namespace {

Tensor without_memory(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                      bool requires_grad) {
  const at::AutoGradMode leaves(true);
  Tensor out = at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(at::kMeta));
  if (requires_grad) out.requires_grad_(true);
  return out;
}

Tensor without_memory(const Situation::Input& input) {
  return without_memory(input.meta.sizes, input.strides, input.meta.dtype, input.requires_grad);
}

/// Values for operations of a host language: the example's, or zeros.
Tensor with_memory(const Situation::Input& input) {
  const at::AutoGradMode leaves(true);
  Tensor out = input.example.defined()
                   ? input.example.detach().clone()
                   : at::zeros(input.meta.sizes,
                               at::TensorOptions(input.meta.dtype).device(input.meta.device));
  if (input.requires_grad) out.requires_grad_(true);
  return out;
}

ExplainedInput explained(const Situation::Input& input) {
  return {TracedValue::of(input.meta), input.meta.device.str(), input.requires_grad};
}

/// A trace is nobody's business: it runs outside inference mode and past hooks on saved tensors.
struct TraceScope {
  c10::InferenceMode no_inference_mode{false};
  bool tracing = at::SavedTensorDefaultHooks::set_tracing(true);
  ~TraceScope() { at::SavedTensorDefaultHooks::set_tracing(tracing); }
};

/// A copy that is no leaf, since an operation may write into an extra input.
Tensor no_leaf(const Tensor& tensor) { return tensor.requires_grad() ? tensor.clone() : tensor; }

}  // namespace

Situation::Input Situation::Input::of(const Tensor& tensor, at::Device device) {
  Input input;
  input.meta = ValueMeta::of(tensor);
  input.strides = tensor.strides();
  input.requires_grad = tensor.requires_grad();
  if (tensor.is_meta()) {
    input.meta.device = device;
  } else {
    input.example = tensor;
  }
  return input;
}

Situation Situation::of(const Tensor& input, const std::vector<Tensor>& extra_inputs,
                        at::Device device) {
  LIGATURE_CHECK_TYPE(input.defined(), "explain: the example input must be a tensor, got none");
  Situation situation;
  situation.input = Input::of(input, device);
  for (const Tensor& extra : extra_inputs) {
    LIGATURE_CHECK_TYPE(extra.defined(), "explain: an extra input must be a tensor, got none");
    situation.extra_inputs.push_back(Input::of(extra, situation.input.meta.device));
  }
  situation.autocast_dtype = ligature::autocast_dtype(situation.input.meta.device);
  situation.gradients = at::GradMode::is_enabled();
  return situation;
}

at::Device OperationFuser::device_of(const Call& call) const {
  for (const Tensor& parameter : call.params) {
    if (parameter.defined() && !parameter.is_meta()) return parameter.device();
  }
  return at::kCPU;
}

std::vector<Tensor> OperationFuser::trace_call(Call call, const std::shared_ptr<const Plan>& plan,
                                               const GradPlan& grads) const {
  std::vector<Tensor> leaves;
  const auto add = [&](const Tensor& tensor) {
    const bool known = std::any_of(leaves.begin(), leaves.end(),
                                   [&](const Tensor& leaf) { return leaf.is_same(tensor); });
    if (tensor.defined() && tensor.requires_grad() && !known) leaves.push_back(tensor);
  };
  add(call.input.tensor());
  for (const Tensor& parameter : call.params) add(parameter);
  for (Tensor& extra : call.extra_inputs) {
    add(extra);
    extra = no_leaf(extra);
  }
  // Operations of a host language run for real; delayed scaling does not hear of it.
  std::optional<RecomputeScope> unnoticed;
  if (call.autocast.session != nullptr) unnoticed.emplace(call.autocast);
  const std::vector<Tensor> outputs = execute(plan, std::move(call), grads);
  std::vector<Tensor> differentiable;
  std::vector<Tensor> gradients;
  for (const Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    differentiable.push_back(output);
    gradients.push_back(at::empty_like(output.detach()));
    if (!output.is_meta()) gradients.back().zero_();
  }
  if (!differentiable.empty() && !leaves.empty()) {
    torch::autograd::grad(differentiable, leaves, gradients, false, false, true);
  }
  std::vector<Tensor> shapes;
  for (const Tensor& output : outputs) {
    shapes.push_back(without_memory(output.sizes(), output.strides(), output.scalar_type(),
                                    output.requires_grad()));
  }
  return shapes;
}

ExplainedCall OperationFuser::explain_call(Call&& given, const std::optional<Situation>& example) {
  Call call = std::move(given);
  Situation situation;
  RunObserverPtr seen;
  if (example) {
    situation = *example;
  } else {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    LIGATURE_CHECK_STATE(last_situation_.has_value(), "the operations ", describe(basic_ops_),
                         " have not been called yet; call them first, or give explain() an "
                         "example input");
    situation = *last_situation_;
    seen = last_seen_;
  }
  LIGATURE_CHECK(situation.extra_inputs.size() == num_extra_inputs(), "the operations ",
                 describe(basic_ops_), " take ", num_extra_inputs(), " extra inputs, got ",
                 situation.extra_inputs.size(), " examples");
  const std::vector<Tensor> parameters = call.params;
  const TraceScope scope;

  // Parameters that are one tensor stay one. They need gradients as they did in the call.
  std::unordered_map<const void*, Tensor> made;
  for (size_t i = 0; i < basic_ops_.size(); ++i) {
    for (size_t k = call.param_offsets[i]; k < call.param_offsets[i + 1]; ++k) {
      Tensor& parameter = call.params[k];
      if (!parameter.defined()) continue;
      const bool requires_grad =
          situation.plan == nullptr ? parameter.requires_grad()
                                    : i < situation.grads.flags.size() &&
                                          situation.grads.flags[i].param(k - call.param_offsets[i]);
      Tensor& twin = made[parameter.unsafeGetTensorImpl()];
      if (!twin.defined()) {
        twin = without_memory(parameter.sizes(), parameter.strides(), parameter.scalar_type(),
                              requires_grad);
      }
      parameter = twin;
    }
  }
  call.input = without_memory(situation.input);
  for (const auto& extra : situation.extra_inputs) {
    // One that the host can read, beside an input on a device, stays one.
    const bool of_host = extra.meta.device.is_cpu() && !situation.input.meta.device.is_cpu();
    call.extra_inputs.push_back(of_host ? with_memory(extra) : without_memory(extra));
  }
  call.autocast_dtype = situation.autocast_dtype;

  const at::AutoGradMode gradients(situation.gradients);
  GradPlan grads = situation.grads;
  std::shared_ptr<const Plan> plan = situation.plan;
  if (plan == nullptr) {
    grads = plan_gradients(call, *wiring_, basic_ops_.size());
    situation.why_high_precision = enter_context(call, situation.input.meta.device);
    PlanKey key = key_for(call, grads);
    key.device = situation.input.meta.device;
    plan = plan_for(key, false, call.planner);
  }

  ExplainedCall out;
  if (seen == nullptr) {
    seen = std::make_shared<Tracer>(*plan, situation.input.meta.device.type());
    call.observer = seen;
    call.dry = !plan->has_python_ops;
    if (plan->has_python_ops) {
      call.params = parameters;
      call.input = with_memory(situation.input);
      call.extra_inputs.clear();
      for (const auto& extra : situation.extra_inputs) {
        call.extra_inputs.push_back(with_memory(extra));
      }
    }
    out.outputs = trace_call(call, plan, grads);
  }
  out.part = explain_plan(*plan, static_cast<const Tracer&>(*seen).trace());
  out.seen = std::move(seen);
  const auto* backend = kernels::own_backend(situation.input.meta.device.type());
  if (out.part.host_syncs && backend != nullptr && backend->grouped_note != nullptr) {
    out.part.note += (out.part.note.empty() ? "" : "; ") + std::string(backend->grouped_note);
  }
  if (!situation.why_high_precision.empty()) {
    if (!out.part.note.empty()) out.part.note += "; ";
    out.part.note += situation.why_high_precision;
  }
  out.part.input = explained(situation.input);
  for (const auto& extra : situation.extra_inputs) {
    out.part.extra_inputs.push_back(explained(extra));
  }
  for (ExplainedOperation& op : out.part.ops) {
    for (ExplainedBranch& branch : op.extra_inputs) {
      if (branch.what.empty()) continue;
      branch.device =
          (branch.caller ? out.part.extra_inputs[*branch.caller] : out.part.input).device;
    }
  }
  if (situation.autocast_dtype) out.part.autocast = dtype_name(*situation.autocast_dtype);
  for (size_t i = 0; i < basic_ops_.size(); ++i) {
    const auto names = basic_ops_[i]->parameter_names();
    for (size_t k = call.param_offsets[i]; k < call.param_offsets[i + 1]; ++k) {
      const size_t j = k - call.param_offsets[i];
      if (!parameters[k].defined()) continue;
      out.part.ops[i].parameters.push_back(
          {j < names.size() ? names[j] : "parameter " + std::to_string(j),
           TracedValue::of(ValueMeta::of(parameters[k])), parameters[k].requires_grad()});
    }
    out.part.training = out.part.training && call.is_training(i);
  }
  return out;
}

// Those with Python operations are seen when they run.
bool OperationFuser::trace_last_call() {
  if (last_seen_ != nullptr) return true;
  if (!last_situation_) return false;
  try {
    last_seen_ = explain_call(collect(), std::nullopt).seen;
  } catch (const std::exception&) {
    return false;  // it stays as it is, until the next call
  }
  return true;
}

Explanation OperationFuser::explain() { return {{explain_call(collect(), std::nullopt).part}}; }

Explanation OperationFuser::explain(const Tensor& input, const std::vector<Tensor>& extra_inputs) {
  prepare();
  Call call = collect();
  const Situation situation = Situation::of(input, extra_inputs, device_of(call));
  return {{explain_call(std::move(call), situation).part}};
}

}  // namespace ligature
