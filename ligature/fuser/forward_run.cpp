#include "ligature/fuser/forward_run.h"

#include "ligature/fuser/builtin_scope.h"

namespace ligature {

ForwardRun::ForwardRun(const Plan& plan, const Call& call, const GradPlan& grads,
                       Contexts& contexts)
    : plan_(plan), call_(call), contexts_(contexts) {
  if (call.trace != nullptr) tracer_.emplace(plan, call);
  const size_t n = plan.basic_ops.size();
  args_.resize(n);
  if (plan.has_extras) {
    extra_inputs_.resize(n);
    extra_outputs_.resize(n);
  }
  for (size_t i = 0; i < n; ++i) {
    OpArgs& args = args_[i];
    args.params =
        at::ArrayRef<Tensor>(call.params)
            .slice(call.param_offsets[i], call.param_offsets[i + 1] - call.param_offsets[i]);
    args.requires_grad = grads.flags[i];
    args.training = call.is_training(i);
    if (!call.kwargs.empty()) args.kwargs = &call.kwargs[i];
    if (i > 0 && plan.grad_output_quantizers[i - 1] != nullptr) {
      args.prev_op_grad_output_quantizer = plan.grad_output_quantizers[i - 1].get();
      contexts[i].grad_input_quantizer = plan.grad_output_quantizers[i - 1];
      contexts[i].grad_input_usage = plan.basic_ops[i - 1]->grad_output_usage(grads.flags[i - 1]);
    }
    if (i + 1 < n && plan.input_quantizers[i + 1] != nullptr) {
      args.next_op_input_quantizer = plan.input_quantizers[i + 1].get();
      args.next_op_input_usage = plan.basic_ops[i + 1]->input_usage(grads.flags[i + 1]);
    }
    if (plan.quantizations[i] != nullptr) {
      args.quantization = plan.quantizations[i].get();
      contexts[i].quantization = plan.quantizations[i];
    }
    args.calibrating = plan.options.calibrating;
    args.keep_weights = call.keep_weights;
    args.autocast_dtype = call.autocast_dtype;
    contexts[i].requires_grad = grads.flags[i];
  }
}

Value ForwardRun::run() {
  check_kwargs();
  Value x = call_.input;
  check_from(0, x);
  if (!call_.dry) {
    for (const auto& op : plan_.basic_ops) op->pre_fuser_forward(args_.back().requires_grad.op);
  }
  cuda::LaunchScope launches(x.is_quantized() ? Tensor() : x.tensor());
  for (size_t k = 0; k < plan_.forward.size(); ++k) {
    if (plan_.forward[k].first >= checked_) check_from(plan_.forward[k].first, x);
    x = run_step(k, x);
  }
  launches.finish();
  return x;
}

void ForwardRun::check_kwargs() const {
  for (size_t i = 0; i < call_.kwargs.size(); ++i) {
    for (const auto& name : call_.kwargs[i].names) {
      LIGATURE_CHECK_TYPE(plan_.basic_ops[i]->is_guest() || plan_.basic_ops[i]->accepts_kwarg(name),
                          "[", plan_.basic_ops[i]->label(), "] takes no keyword argument '", name,
                          "'");
    }
  }
}

/// Checks the operations from `first` on, as far as shapes can be told without computing.
void ForwardRun::check_from(size_t first, const Value& input) {
  InferArgs args{ValueMeta::of(input), {}, {}, true, call_.autocast_dtype};
  std::vector<at::SmallVector<ValueMeta, 1>> produced;
  std::vector<std::optional<ValueMeta>> extras;
  if (plan_.has_extras) produced.resize(plan_.basic_ops.size());
  for (size_t i = first; i < plan_.basic_ops.size(); ++i) {
    if (plan_.has_extras) {
      extras.clear();
      for (const Wiring::Input& slot : plan_.wiring->inputs[i]) {
        extras.push_back(known_meta(slot, produced));
      }
      args.extra_inputs = extras;
    }
    args.params = args_[i].params;
    args.training = args_[i].training;
    auto inferred = plan_.basic_ops[i]->infer(args);
    checked_ = i + 1;
    if (!inferred) return;
    args.input = std::move(inferred->output);
    if (plan_.has_extras) produced[i] = std::move(inferred->extra_outputs);
  }
}

std::optional<ValueMeta> ForwardRun::known_meta(
    const Wiring::Input& slot, const std::vector<at::SmallVector<ValueMeta, 1>>& produced) const {
  if (slot.caller != Wiring::kNone) return ValueMeta::of(call_.extra_inputs[slot.caller]);
  if (slot.output < produced[slot.producer].size()) return produced[slot.producer][slot.output];
  if (slot.output < extra_outputs_[slot.producer].size()) {
    return ValueMeta::of(extra_outputs_[slot.producer][slot.output]);
  }
  return std::nullopt;
}

void ForwardRun::take_extra_inputs(const PlanStep& step) {
  for (size_t i = step.first; i < step.first + step.count; ++i) {
    for (const Wiring::Input& slot : plan_.wiring->inputs[i]) {
      if (slot.caller != Wiring::kNone) {
        extra_inputs_[i].push_back(call_.extra_inputs[slot.caller]);
      } else if (slot.producer < step.first) {
        extra_inputs_[i].push_back(extra_outputs_[slot.producer][slot.output]);
      } else {
        extra_inputs_[i].emplace_back();  // a channel inside the step
      }
    }
    args_[i].extra_inputs = extra_inputs_[i];
  }
}

Value ForwardRun::run_step(size_t index, const Value& x) {
  const PlanStep& step = plan_.forward[index];
  c10::SmallVector<OperationContext*, 8> ctxs;
  if (plan_.has_extras) take_extra_inputs(step);
  for (size_t i = step.first; i < step.first + step.count; ++i) ctxs.push_back(&contexts_[i]);
  hold(x);
  if (tracer_) tracer_->begin();
  FuserForwardResult result = [&] {
    StepScope scope(step.kind);
    return step.op->fuser_forward(ctxs, x,
                                  at::ArrayRef<OpArgs>(args_).slice(step.first, step.count));
  }();
  if (tracer_) tracer_->end(index, x, result, contexts_);
  LIGATURE_CHECK_STATE(result.output.defined(), "[", step.op->label(),
                       "] its forward returned no output");
  for (size_t k = 0; k < step.count; ++k) {
    const size_t i = step.first + k;
    const size_t wanted = plan_.wiring->outputs[i].size();
    const size_t got = k < result.extra_outputs.size() ? result.extra_outputs[k].size() : 0;
    LIGATURE_CHECK_STATE(got == wanted, "[", plan_.basic_ops[i]->label(), "] must give ", wanted,
                         " extra outputs, got ", got);
    if (wanted > 0) extra_outputs_[i] = std::move(result.extra_outputs[k]);
    for (const Value& value : contexts_[i].saved()) {
      if (value.defined() && !value.is_quantized()) {
        versions_.push_back(value.tensor().is_inference() ? 0 : value.tensor()._version());
      }
    }
  }
  return std::move(result.output);
}

}  // namespace ligature
