#include "ligature/fuser/forward_run.h"

#include <algorithm>

#include "ligature/fuser/builtin_scope.h"
#include "ligature/fuser/step_view.h"
#include "ligature/readable.h"

namespace ligature {
namespace {

/// An operation returned a view that was made below autograd, where nothing counts versions
/// together: it counts them with what it is a view of from here on, as torch's own views do.
void share_version(const Tensor& view, const Tensor& base) {
  if (view.is_inference() || base.is_inference()) return;
  view.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
}

void share_versions(const FuserForwardResult& result, const Value& x, ArgsList args, CtxList ctxs) {
  c10::SmallVector<const Tensor*, 8> arguments;
  const auto with_arguments = [&](const Tensor& t) {
    if (!t.defined() || !t.has_storage() || t.storage().use_count() == 1) return;
    if (arguments.empty()) {
      if (!x.is_quantized()) arguments.push_back(&x.tensor());
      for (const OpArgs& op : args) {
        for (const Tensor& extra : op.extra_inputs) arguments.push_back(&extra);
        for (const Tensor& param : op.params) arguments.push_back(&param);
        if (op.kwargs == nullptr) continue;
        for (const auto& [name, tensor] : op.kwargs->tensors) arguments.push_back(&tensor);
      }
    }
    const auto is_argument = [&](const Tensor* argument) { return argument->is_same(t); };
    if (std::any_of(arguments.begin(), arguments.end(), is_argument)) return;
    const auto found = std::find_if(arguments.begin(), arguments.end(),
                                    [&](const Tensor* other) { return share_memory(t, *other); });
    if (found != arguments.end()) share_version(t, **found);
  };
  if (!result.output.is_quantized()) with_arguments(result.output.tensor());
  for (const auto& extras : result.extra_outputs) {
    for (const Tensor& extra : extras) with_arguments(extra);
  }
  // What a fusion saves of its inside may lie in a buffer of the caller's.
  const bool has_buffers = std::any_of(args.begin(), args.end(), [](const OpArgs& op) {
    return op.kwargs != nullptr && !op.kwargs->tensors.empty();
  });
  if (!has_buffers) return;
  for (const OperationContext* ctx : ctxs) {
    for (const Value& value : ctx->saved()) {
      if (!value.is_quantized()) with_arguments(value.tensor());
    }
  }
}

}  // namespace

ForwardRun::ForwardRun(const Plan& plan, const Call& call, const GradPlan& grads,
                       Contexts& contexts)
    : plan_(plan), call_(call), contexts_(contexts), watched_(has_modes()) {
  if (call.observer != nullptr) call.observer->begin_forward(plan, call);
  const size_t n = plan.basic_ops.size();
  args_.resize(n);
  if (plan.has_extras) {
    extra_inputs_.resize(n);
    extra_outputs_.resize(n);
  }
  if (records_shapes()) outputs_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    OpArgs& args = args_[i];
    args.params =
        at::ArrayRef<Tensor>(call.params)
            .slice(call.param_offsets[i], call.param_offsets[i + 1] - call.param_offsets[i]);
    args.requires_grad = grads.flags[i];
    args.training = call.is_training(i);
    if (!call.kwargs.empty()) args.kwargs = &call.kwargs[i];
    give_quantizers(plan, grads.flags, i, args, contexts[i]);
    args.calibrating = plan.options.calibrating;
    args.keep_weights = call.keep_weights;
    args.autocast_dtype = call.autocast_dtype;
    contexts[i].requires_grad = grads.flags[i];
  }
}

Value ForwardRun::run(SmallBytes* bytes) {
  contexts_.no_sync = call_.no_sync;
  const kernels::NoSyncScope no_sync(call_.no_sync);
  if (!plan_.groups.empty()) agree_on(plan_, call_, args_);
  check_kwargs();
  Value x = read_input(0, call_.input);
  read_arguments();
  check_from(0, x);
  if (!call_.dry) {
    for (const auto& op : plan_.basic_ops) op->pre_fuser_forward(args_.back().requires_grad.op);
  }
  kernels::Run run(x.is_quantized() ? Tensor() : x.tensor(), bytes);
  for (size_t k = 0; k < plan_.forward.size(); ++k) {
    if (k > 0 && !plan_.forward[k - 1].kind.ours) x = read_input(k, std::move(x));
    if (plan_.forward[k].first >= checked_) check_from(plan_.forward[k].first, x);
    x = run_step(k, x);
  }
  run.finish();
  return x;
}

/// What operations of a host language are given, they look at for themselves.
Value ForwardRun::read_input(size_t step, Value x) const {
  const bool reads = !plan_.forward[step].kind.python;
  if (!reads || (!x.is_quantized() && is_readable(x.tensor()))) return x;
  return readable(
      x, [&] { return "[" + plan_.basic_ops[plan_.forward[step].first]->label() + "] input"; });
}

void ForwardRun::read_arguments() {
  for (const PlanStep& step : plan_.forward) {
    if (step.kind.python) continue;
    for (size_t i = step.first; i < step.first + step.count; ++i) {
      read_parameters(i);
      for (size_t j = 0; plan_.has_extras && j < plan_.wiring->inputs[i].size(); ++j) {
        const size_t caller = plan_.wiring->inputs[i][j].caller;
        if (caller != Wiring::kNone) read_extra_input(i, j, call_.extra_inputs[caller]);
      }
    }
  }
}

void ForwardRun::read_parameters(size_t op) {
  for (size_t j = 0; j < args_[op].params.size(); ++j) {
    const Tensor& param = args_[op].params[j];
    if (!param.defined() || is_readable(param)) continue;
    const BasicOperation& basic = *plan_.basic_ops[op];
    const auto name = [&] {
      const auto names = basic.parameter_names();
      return "[" + basic.label() + "] " +
             (j < names.size() ? names[j] : "parameter " + std::to_string(j));
    };
    if (quantized_of(param) != nullptr && basic.takes_quantized_parameter(j)) {
      readable(Value(param), name);
      continue;
    }
    Tensor plain = readable(param, name);
    if (plain.is_same(param)) continue;
    if (params_.empty()) {
      params_ = call_.params;
      for (size_t i = 0; i < args_.size(); ++i) {
        args_[i].params =
            at::ArrayRef<Tensor>(params_).slice(call_.param_offsets[i], args_[i].params.size());
      }
    }
    params_[call_.param_offsets[op] + j] = std::move(plain);
  }
}

/// One that is overwritten stays the tensor that it is.
Tensor ForwardRun::read_extra_input(size_t op, size_t slot, const Tensor& extra) const {
  if (is_readable(extra)) return extra;
  const BasicOperation& basic = *plan_.basic_ops[op];
  const auto name = [&] { return "[" + basic.label() + "] extra input " + std::to_string(slot); };
  if (!basic.writes_extra_input(slot)) return readable(extra, name);
  check_writable(extra, name);
  return extra;
}

void ForwardRun::check_kwargs() const {
  for (size_t i = 0; i < call_.kwargs.size(); ++i) {
    for (const auto& name : call_.kwargs[i].names) {
      LIGATURE_CHECK_TYPE(
          plan_.basic_ops[i]->is_python_op() || plan_.basic_ops[i]->accepts_kwarg(name), "[",
          plan_.basic_ops[i]->label(), "] takes no keyword argument '", name, "'");
    }
  }
}

/// Checks the operations from `first` on, as far as shapes can be told without computing.
void ForwardRun::check_from(size_t first, const Value& input) {
  InferArgs args{ValueMeta::of(input), {}, {}, true, call_.autocast_dtype};
  std::vector<at::SmallVector<ValueMeta, 1>> produced;
  std::vector<std::optional<ValueMeta>> extras;
  std::vector<Tensor> values;
  if (plan_.has_extras) produced.resize(plan_.basic_ops.size());
  for (size_t i = first; i < plan_.basic_ops.size(); ++i) {
    if (plan_.has_extras) {
      extras.clear();
      values.clear();
      for (const Wiring::Input& slot : plan_.wiring->inputs[i]) {
        extras.push_back(known_meta(slot, produced));
        values.push_back(slot.caller != Wiring::kNone ? call_.extra_inputs[slot.caller] : Tensor());
      }
      args.extra_inputs = extras;
      args.extra_values = values;
    }
    args.params = args_[i].params;
    args.training = args_[i].training;
    args.kwargs = args_[i].kwargs;
    auto inferred = plan_.basic_ops[i]->infer(args);
    checked_ = i + 1;
    if (!inferred) return;
    args.input = std::move(inferred->output);
    if (records_shapes()) outputs_[i] = args.input;
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
    for (size_t j = 0; j < plan_.wiring->inputs[i].size(); ++j) {
      const Wiring::Input& slot = plan_.wiring->inputs[i][j];
      const bool of_caller = slot.caller != Wiring::kNone;
      if (!of_caller && slot.producer >= step.first) {
        extra_inputs_[i].emplace_back();  // a channel inside the step
        continue;
      }
      const Tensor& extra =
          of_caller ? call_.extra_inputs[slot.caller] : extra_outputs_[slot.producer][slot.output];
      extra_inputs_[i].push_back(step.kind.python ? extra : read_extra_input(i, j, extra));
    }
    args_[i].extra_inputs = extra_inputs_[i];
  }
}

void ForwardRun::take_extra_outputs(const PlanStep& step, FuserForwardResult& result) {
  for (size_t k = 0; k < step.count; ++k) {
    const size_t i = step.first + k;
    const size_t wanted = plan_.wiring->outputs[i].size();
    const size_t got = k < result.extra_outputs.size() ? result.extra_outputs[k].size() : 0;
    LIGATURE_CHECK_STATE(got == wanted || got == 0, "[", plan_.basic_ops[i]->label(),
                         "] must give ", wanted, " extra outputs, got ", got);
    if (wanted == 0) continue;
    if (got > 0) extra_outputs_[i] = std::move(result.extra_outputs[k]);
    extra_outputs_[i].resize(wanted);
    for (size_t j = 0; j < wanted; ++j) {
      if (!extra_outputs_[i][j].defined()) check_may_omit(step, i, j);
    }
  }
  if (records_shapes()) outputs_[step.first + step.count - 1] = ValueMeta::of(result.output);
}

/// An extra output may be left out where nobody but the step itself has a use for it.
void ForwardRun::check_may_omit(const PlanStep& step, size_t op, size_t output) const {
  const auto refuse = [&](const std::string& why) {
    LIGATURE_CHECK_STATE(false, "[", step.op->label(), "] returned None as extra output ", output,
                         " of ", place(plan_.basic_ops, op), ", which is ", why);
  };
  if (plan_.wiring->outputs[op][output].caller != Wiring::kNone) {
    refuse("public: it is returned to the caller");
  }
  for (size_t i = step.first + step.count; i < plan_.basic_ops.size(); ++i) {
    for (const Wiring::Input& input : plan_.wiring->inputs[i]) {
      if (input.producer == op && input.output == output) {
        refuse("consumed outside its fusion, by " + place(plan_.basic_ops, i));
      }
    }
  }
}

void complete_contexts(const Plan& plan, const PlanStep& step, Contexts& contexts, ArgsList args) {
  if (plan.filled_by_user.empty()) return;
  for (size_t i = step.first; i < step.first + step.count; ++i) {
    if (!plan.filled_by_user[i] || !args[i].requires_grad.op) continue;
    const std::string missing = plan.basic_ops[i]->complete_context(contexts[i], args[i]);
    if (missing.empty()) continue;
    contexts[i].state.set(kUnusableContext, "[" + plan.basic_ops[i]->label() +
                                                "] its backward cannot use the context that " +
                                                step.op->label() + " filled: " + missing);
  }
}

ForwardShapes ForwardRun::shapes() const {
  ForwardShapes shapes;
  for (const auto& outputs : extra_outputs_) {
    auto& metas = shapes.extra_outputs.emplace_back();
    for (const Tensor& output : outputs) {
      metas.push_back(output.defined() ? std::optional(ValueMeta::of(output)) : std::nullopt);
    }
  }
  shapes.outputs = outputs_;
  return shapes;
}

Value ForwardRun::run_step(size_t index, const Value& x) {
  const PlanStep& step = plan_.forward[index];
  c10::SmallVector<OperationContext*, 8> ctxs;
  if (plan_.has_extras) take_extra_inputs(step);
  for (size_t i = step.first; i < step.first + step.count; ++i) ctxs.push_back(&contexts_[i]);
  hold(x);
  const ArgsList args = at::ArrayRef<OpArgs>(args_).slice(step.first, step.count);
  const kernels::KernelLog* log =
      call_.observer != nullptr ? call_.observer->before_forward(index, x, args) : nullptr;
  ObservedStep observed(call_.observer.get());
  StepView view(step, watched_, log, plan_.options.device.type());
  FuserForwardResult result = [&] {
    StepScope scope(step.kind);
    return step.op->fuser_forward(ctxs, x, args);
  }();
  view.finish();
  observed.ran();
  if (call_.observer != nullptr) call_.observer->after_forward(index, x, result, contexts_);
  LIGATURE_CHECK_STATE(result.output.defined(), "[", step.op->label(),
                       "] its forward returned no output");
  share_versions(result, x, args, ctxs);
  take_extra_outputs(step, result);
  complete_contexts(plan_, step, contexts_, args_);
  for (size_t i = step.first; i < step.first + step.count; ++i) {
    for (const Value& value : contexts_[i].saved()) {
      if (value.defined() && !value.is_quantized()) {
        versions_.push_back(value.tensor().is_inference() ? 0 : value.tensor()._version());
      }
    }
  }
  return std::move(result.output);
}

}  // namespace ligature
