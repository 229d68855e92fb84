#include "ligature/fuser/tracer.h"

namespace ligature {
namespace {

// Whoever holds a view holds all of the memory that it is a part of.
int64_t held_bytes(const Tensor& tensor) {
  return static_cast<int64_t>(tensor.has_storage() ? tensor.storage().nbytes() : tensor.nbytes());
}

}  // namespace

bool share_memory(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return false;
  if (a.is_same(b)) return true;
  if (quantized_of(a) != nullptr || quantized_of(b) != nullptr) return false;  // without memory
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
}

ForwardTracer::ForwardTracer(const Plan& plan, const Call& call)
    : plan_(plan), trace_(*call.trace) {
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

void ForwardTracer::begin() { log_ = std::make_unique<kernels::KernelLog>(trace_.device); }

void ForwardTracer::end(size_t index, const Value& input, const FuserForwardResult& result,
                        const Contexts& contexts) {
  const PlanStep& step = plan_.forward[index];
  TracedStep traced;
  traced.ran = true;
  traced.kernels = log_->take();
  log_.reset();
  if (step.op->is_guest()) traced.kernels = {{step.op->name(), "python", {}}};
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
  std::lock_guard<std::mutex> lock(trace_.mutex);
  trace_.forward[index] = std::move(traced);
}

void ForwardTracer::know(const Tensor& tensor, std::string what, bool ours) {
  for (const Known& known : known_) {
    if (share_memory(known.tensor, tensor)) return;
  }
  if (tensor.defined()) known_.push_back({tensor, std::move(what), ours});
}

TracedSave ForwardTracer::saved(size_t op, const Value& value) {
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

}  // namespace ligature
