#include "ligature/fuser/backward_run.h"

#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>

#include "ligature/fuser/builtin_scope.h"
#include "ligature/fuser/step_view.h"
#include "ligature/readable.h"

namespace ligature {

BackwardNeed BackwardNeed::of(const Plan& plan, const Contexts& contexts,
                              const std::vector<size_t>& param_offsets,
                              c10::function_ref<bool(size_t)> wanted_result) {
  const size_t n = contexts.size();
  BackwardNeed need{n, GradFlagList(n)};
  const size_t extra_edges = 1 + param_offsets.back();
  for (size_t op = n; op-- > 0;) {
    const GradFlags& wanted = contexts[op].requires_grad;
    GradFlags& flags = need.flags[op];
    if (!wanted.op) continue;
    for (size_t j = 0; j < param_offsets[op + 1] - param_offsets[op]; ++j) {
      if (wanted.param(j) && wanted_result(1 + param_offsets[op] + j)) flags.params.set(j);
    }
    const auto& inputs = plan.wiring->inputs[op];
    for (size_t j = 0; j < inputs.size(); ++j) {
      const bool from_channel = inputs[j].caller == Wiring::kNone;
      if (wanted.extra_input(j) &&
          (from_channel || wanted_result(extra_edges + inputs[j].caller))) {
        flags.extra_inputs.set(j);
        if (!from_channel) need.lowest_op = op;
      }
    }
    if (flags.params.any()) need.lowest_op = op;
  }
  if (n > 0 && contexts[0].requires_grad.input && wanted_result(0)) {
    need.lowest_op = 0;
    need.flags[0].input = true;
  }
  for (size_t op = need.lowest_op; op < n; ++op) {
    need.flags[op].op = true;
    if (op > need.lowest_op) need.flags[op].input = true;
  }
  return need;
}

namespace {

using GradsOfExtraOutputs = c10::SmallVectorImpl<std::vector<Tensor>>;

Tensor zeros(const ValueMeta& meta) {
  return at::zeros(meta.sizes, at::TensorOptions(meta.dtype).device(meta.device));
}

/// An operation of a host language is given zeros where there is no gradient.
void fill_in_zeros(const PlanStep& step, const ForwardShapes& shapes, GradsOfExtraOutputs& grads) {
  for (size_t op = step.first; op < step.first + step.count; ++op) {
    for (size_t j = 0; j < grads[op].size(); ++j) {
      const auto& meta = shapes.extra_outputs[op][j];
      if (!grads[op][j].defined() && meta) grads[op][j] = zeros(*meta);
    }
  }
}

/// A step behind one whose backward gave no gradient has nothing to do, unless one of its extra
/// outputs has a gradient: then the other is zeros.
bool has_gradient(const PlanStep& step, const ForwardShapes& shapes,
                  const GradsOfExtraOutputs& grads, Value& dy) {
  if (dy.defined()) return true;
  const size_t end = step.first + step.count;
  const auto defined = [](const Tensor& grad) { return grad.defined(); };
  bool some = false;
  for (size_t op = step.first; op < end; ++op) {
    some = some || std::any_of(grads[op].begin(), grads[op].end(), defined);
  }
  if (!some) return false;
  const bool known = end - 1 < shapes.outputs.size() && shapes.outputs[end - 1].has_value();
  LIGATURE_CHECK_STATE(known, "[", step.op->label(), "] the operation behind it returned None as ",
                       "the gradient of its input, so it has a gradient of an extra output only; "
                       "return zeros instead of None");
  dy = zeros(*shapes.outputs[end - 1]);
  return true;
}

Value read_gradient(const Value& dy, const BasicOperation& op) {
  if (!dy.defined() || (!dy.is_quantized() && is_readable(dy.tensor()))) return dy;
  return readable(dy, [&] { return "[" + op.label() + "] the gradient of its output"; });
}

}  // namespace

void check_usable(const OperationContext& ctx) {
  const PlainValue* why = ctx.state.find(kUnusableContext);
  LIGATURE_CHECK_STATE(why == nullptr, std::get<std::string>(*why));
}

void read_saved(OperationContext& ctx, const BasicOperation& op) {
  for (size_t i = 0; i < ctx.num_saved(); ++i) {
    const Value& value = ctx.saved()[i];
    if (!value.defined() || (!value.is_quantized() && is_readable(value.tensor()))) continue;
    Value read =
        readable(value, [&] { return "[" + op.label() + "] saved tensor " + std::to_string(i); });
    if (value.is_quantized()) continue;
    std::vector<Value> values = ctx.saved();
    values[i] = std::move(read);
    ctx.save_for_backward(std::move(values));
  }
}

void read_extra_gradients(std::vector<Tensor>& grads, const BasicOperation& op) {
  for (size_t j = 0; j < grads.size(); ++j) {
    if (!grads[j].defined() || is_readable(grads[j])) continue;
    grads[j] = readable(grads[j], [&] {
      return "[" + op.label() + "] the gradient of its extra output " + std::to_string(j);
    });
  }
}

std::vector<Tensor> run_backward(const BackwardCall& call, const BackwardNeed& need, Value dy,
                                 std::vector<Tensor> caller_grads) {
  const Plan& plan = call.plan;
  Contexts& contexts = call.contexts;
  const std::vector<size_t>& param_offsets = call.param_offsets;
  const size_t n = contexts.size();
  const size_t extra_edges = 1 + param_offsets.back();
  std::vector<Tensor> result(extra_edges + plan.wiring->caller_inputs.size());
  c10::SmallVector<std::vector<Tensor>, 6> grad_extra_outputs(n);
  for (size_t op = 0; plan.has_extras && op < n; ++op) {
    grad_extra_outputs[op].resize(plan.wiring->outputs[op].size());
    for (size_t j = 0; j < plan.wiring->outputs[op].size(); ++j) {
      const size_t caller = plan.wiring->outputs[op][j].caller;
      if (caller != Wiring::kNone) grad_extra_outputs[op][j] = std::move(caller_grads[caller]);
    }
  }
  GradFlagList flags_of_forward;
  for (const auto& ctx : contexts) flags_of_forward.push_back(ctx.requires_grad);
  // The contexts serve every backward of this graph: what this one narrows is put back.
  struct Restore {
    Contexts& contexts;
    const GradFlagList& flags;
    ~Restore() {
      for (size_t op = 0; op < contexts.size(); ++op) {
        contexts[op].requires_grad = flags[op];
        contexts[op].save_for_backward({});
      }
      contexts.owner = nullptr;
    }
  } restore{contexts, flags_of_forward};

  cuda::LaunchScope launches(dy.is_quantized() ? Tensor() : dy.tensor());
  c10::SmallVector<OperationContext*, 8> ctxs;
  const bool watched = has_modes();
  bool from_outside = true;  // the gradient comes from no kernel of ours
  for (size_t s = plan.backward.size(); s-- > 0;) {
    const PlanStep& step = plan.backward[s];
    const size_t end = step.first + step.count;
    if (end <= need.lowest_op) break;
    if (!has_gradient(step, call.shapes, grad_extra_outputs, dy)) {
      call.saved.used(step.first, end);
      continue;
    }
    ctxs.clear();
    for (size_t op = step.first; op < end; ++op) {
      contexts[op].requires_grad = need.flags[op];
      if (!plan.filled_by_user.empty()) check_usable(contexts[op]);
      call.saved.unpack(op);
      ctxs.push_back(&contexts[op]);
      if (step.kind.guest) continue;
      read_saved(contexts[op], *plan.basic_ops[op]);
      read_extra_gradients(grad_extra_outputs[op], *plan.basic_ops[op]);
    }
    if (step.kind.guest) {
      fill_in_zeros(step, call.shapes, grad_extra_outputs);
    } else if (from_outside) {
      dy = read_gradient(dy, *plan.basic_ops[end - 1]);
    }
    from_outside = !step.kind.ours;
    hold(dy);
    for (size_t op = step.first; op < end; ++op) {
      for (const Tensor& grad : grad_extra_outputs[op]) cuda::hold_memory(grad);
    }
    contexts.owner = step.op->takes_saved() && !step.kind.guest ? call.owner : nullptr;
    std::optional<kernels::KernelLog> log;
    if (call.trace != nullptr) log.emplace(call.trace->device);
    StepView view(step, watched, log ? &*log : nullptr, plan.options.device.type());
    FuserBackwardResult step_result = [&] {
      StepScope scope(step.kind);
      return step.op->fuser_backward(
          ctxs, dy,
          at::ArrayRef<std::vector<Tensor>>(grad_extra_outputs).slice(step.first, step.count));
    }();
    view.finish();
    if (log) {
      TracedStep traced{
          true, log->take(), TracedValue::of(dy), TracedValue::of(step_result.grad_input), {}};
      log.reset();
      if (step.op->is_guest()) traced.kernels = {{step.op->name(), "python", {}}};
      std::lock_guard<std::mutex> lock(call.trace->mutex);
      call.trace->backward[s] = std::move(traced);
    }
    LIGATURE_CHECK_STATE(step_result.grad_params.size() == step.count &&
                             step_result.grad_extra_inputs.size() == step.count,
                         "[", step.op->label(), "] its backward must return gradients for each of ",
                         step.count, " basic operations, got ", step_result.grad_params.size(),
                         " lists for parameters and ", step_result.grad_extra_inputs.size(),
                         " for extra inputs");
    for (size_t k = 0; k < step.count; ++k) {
      const size_t op = step.first + k;
      const size_t num_params = param_offsets[op + 1] - param_offsets[op];
      auto& grad_params = step_result.grad_params[k];
      const bool may_omit = !step.kind.guest;
      LIGATURE_CHECK_STATE(grad_params.size() == num_params || (may_omit && grad_params.empty()),
                           "[", plan.basic_ops[op]->label(), "] its backward must return ",
                           num_params, " parameter gradients, got ", grad_params.size());
      for (size_t j = 0; j < grad_params.size(); ++j) {
        if (need.flags[op].param(j)) result[1 + param_offsets[op] + j] = std::move(grad_params[j]);
      }
      const auto& inputs = plan.wiring->inputs[op];
      auto& grad_extra = step_result.grad_extra_inputs[k];
      // The gradient of a channel inside the step is the step's own business.
      const auto inside = [&](const Wiring::Input& input) {
        return input.producer != Wiring::kNone && input.producer >= step.first;
      };
      LIGATURE_CHECK_STATE(grad_extra.size() == inputs.size() ||
                               (grad_extra.empty() &&
                                (may_omit || std::all_of(inputs.begin(), inputs.end(), inside))),
                           "[", plan.basic_ops[op]->label(), "] its backward must return ",
                           inputs.size(), " extra input gradients, got ", grad_extra.size());
      for (size_t j = 0; j < grad_extra.size(); ++j) {
        if (!need.flags[op].extra_input(j) || !grad_extra[j].defined()) continue;
        if (inputs[j].caller != Wiring::kNone) {
          result[extra_edges + inputs[j].caller] = std::move(grad_extra[j]);
        } else if (!inside(inputs[j])) {
          Tensor& sum = grad_extra_outputs[inputs[j].producer][inputs[j].output];
          sum = sum.defined() ? at::add(sum, grad_extra[j]) : std::move(grad_extra[j]);
        }
      }
      grad_extra_outputs[op].clear();
      contexts[op].save_for_backward({});
    }
    dy = std::move(step_result.grad_input);
    call.saved.used(step.first, end);
  }
  launches.finish();
  if (need.lowest_op == 0 && n > 0 && need.flags[0].input) {
    result[0] = dy.is_quantized() ? wrap_quantized(dy.quantized()) : dy.tensor();
  }
  return result;
}

}  // namespace ligature
