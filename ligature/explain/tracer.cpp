#include "ligature/explain/tracer.h"

#include "ligature/readable.h"

namespace ligature {
namespace {

// Whoever holds a view holds all of the memory that it is a part of.
int64_t held_bytes(const Tensor& tensor) {
  return static_cast<int64_t>(tensor.has_storage() ? tensor.storage().nbytes() : tensor.nbytes());
}

}  // namespace

Tracer::Tracer(const Plan& plan, at::DeviceType device)
    : device_(device), trace_(plan.forward.size(), plan.backward.size()) {}

Trace Tracer::trace() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return trace_;
}

void Tracer::begin_forward(const Plan& plan, const Call& call) {
  plan_ = &plan;
  known_.clear();
  if (!call.input.is_quantized()) know(call.input.tensor(), "input", false);
  for (size_t i = 0; i < plan.basic_ops.size(); ++i) {
    const auto names = plan.basic_ops[i]->parameter_names();
    for (size_t k = call.param_offsets[i]; k < call.param_offsets[i + 1]; ++k) {
      const size_t j = k - call.param_offsets[i];
      know(call.params[k], j < names.size() ? names[j] : "parameter " + std::to_string(j), false);
    }
  }
  for (size_t k = 0; k < call.extra_inputs.size(); ++k) {
    know(call.extra_inputs[k], "extra input " + std::to_string(k), false);
  }
}

const kernels::KernelLog* Tracer::before_forward(size_t, const Value&, ArgsList) {
  log_ = std::make_unique<kernels::KernelLog>(device_);
  return log_.get();
}

TracedStep Tracer::take_log(const FusibleOperation& op) {
  TracedStep traced;
  traced.ran = true;
  traced.kernels = log_->take();
  log_.reset();
  if (op.is_python_op()) traced.kernels = {{op.name(), "python", {}}};
  return traced;
}

void Tracer::after_forward(size_t index, const Value& input, const FuserForwardResult& result,
                           const Contexts& contexts) {
  const PlanStep& step = plan_->forward[index];
  TracedStep traced = take_log(*step.op);
  traced.input = TracedValue::of(input);
  traced.output = TracedValue::of(result.output);
  if (!result.output.is_quantized()) {
    know(result.output.tensor(), "output of " + step.op->name(), true);
  }
  for (const auto& extras : result.extra_outputs) {
    for (const Tensor& extra : extras) {
      know(extra, "extra output of " + step.op->name(), true);
    }
  }
  for (size_t i = step.first; i < step.first + step.count; ++i) {
    for (const Value& value : contexts[i].saved()) {
      if (value.defined()) traced.saved.push_back(saved(i, value));
    }
  }
  if (index + 1 == plan_->forward.size()) known_.clear();  // nothing is held for it
  std::lock_guard<std::mutex> lock(mutex_);
  trace_.forward[index] = std::move(traced);
}

const kernels::KernelLog* Tracer::before_backward(size_t step, const Value& grad_output, GradList) {
  grad_output_ = TracedValue::of(grad_output);
  return before_forward(step, grad_output, {});
}

void Tracer::after_backward(const PlanStep& step, size_t index, const FuserBackwardResult& result) {
  TracedStep traced = take_log(*step.op);
  traced.input = std::move(grad_output_);
  traced.output = TracedValue::of(result.grad_input);
  std::lock_guard<std::mutex> lock(mutex_);
  trace_.backward[index] = std::move(traced);
}

void Tracer::know(const Tensor& tensor, std::string what, bool ours) {
  for (const Known& known : known_) {
    if (share_memory(known.tensor, tensor)) return;
  }
  if (tensor.defined()) known_.push_back({tensor, std::move(what), ours});
}

TracedSave Tracer::saved(size_t op, const Value& value) {
  TracedSave out{op, "made by forward", TracedValue::of(value), true};
  if (value.is_quantized()) return out;
  for (Known& known : known_) {
    if (!share_memory(known.tensor, value.tensor())) continue;
    out.what = known.what;
    out.counted = known.ours && !known.counted;
    if (out.counted) out.value.bytes = held_bytes(value.tensor());
    known.counted = true;
    return out;
  }
  out.value.bytes = held_bytes(value.tensor());
  known_.push_back({value.tensor(), "made by forward", true, true});
  return out;
}

namespace {

[[maybe_unused]] const bool registered =
    set_observer_of_calls([](const Plan& plan, at::DeviceType device) -> RunObserverPtr {
      return std::make_shared<Tracer>(plan, device);
    });

}  // namespace
}  // namespace ligature
