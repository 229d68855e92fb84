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

Tensor zeros(const ValueMeta& meta) {
  return at::zeros(meta.sizes, at::TensorOptions(meta.dtype).device(meta.device));
}

Value read_gradient(const Value& dy, const BasicOperation& op) {
  if (!dy.defined() || (!dy.is_quantized() && is_readable(dy.tensor()))) return dy;
  return readable(dy, [&] { return "[" + op.label() + "] the gradient of its output"; });
}

}  // namespace

void check_usable(const OperationContext& ctx) {
  const auto why = ctx.state.find(kUnusableContext);
  LIGATURE_CHECK_STATE(!why, std::get<std::string>(*why));
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

BackwardRun::BackwardRun(const BackwardCall& call, const BackwardNeed& need)
    : call_(call),
      plan_(call.plan),
      need_(need),
      contexts_(call.contexts),
      first_extra_(1 + call.param_offsets.back()),
      results_(first_extra_ + plan_.wiring->caller_inputs.size()),
      grad_extra_outputs_(contexts_.size()),
      watched_(has_modes()) {
  for (const auto& ctx : contexts_) flags_of_forward_.push_back(ctx.requires_grad);
}

BackwardRun::~BackwardRun() {
  for (size_t op = 0; op < contexts_.size(); ++op) {
    contexts_[op].requires_grad = flags_of_forward_[op];
    contexts_[op].save_for_backward({});
  }
  contexts_.holder = nullptr;
}

std::vector<Tensor> BackwardRun::run(Value dy, std::vector<Tensor> caller_grads) {
  const kernels::NoSyncScope no_sync(contexts_.no_sync);
  for (size_t op = 0; plan_.has_extras && op < contexts_.size(); ++op) {
    const auto& outputs = plan_.wiring->outputs[op];
    grad_extra_outputs_[op].resize(outputs.size());
    for (size_t j = 0; j < outputs.size(); ++j) {
      if (outputs[j].caller == Wiring::kNone) continue;
      grad_extra_outputs_[op][j] = std::move(caller_grads[outputs[j].caller]);
    }
  }
  kernels::Run run(dy.is_quantized() ? Tensor() : dy.tensor(), call_.bytes);
  for (size_t s = plan_.backward.size(); s-- > 0;) {
    const PlanStep& step = plan_.backward[s];
    if (step.first + step.count <= need_.lowest_op) break;
    if (has_gradient(step, dy)) dy = run_step(s, std::move(dy));
    call_.saved.used(step.first, step.first + step.count);
  }
  run.finish();
  if (need_.lowest_op == 0 && contexts_.size() > 0 && need_.flags[0].input) {
    results_[0] = dy.is_quantized() ? wrap_quantized(dy.quantized()) : dy.tensor();
  }
  if (!plan_.partial_gradients.empty()) {
    reduce_partial_gradients(plan_, call_.param_offsets, results_);
  }
  return std::move(results_);
}

/// A step behind one whose backward gave no gradient has nothing to do, unless one of its extra
/// outputs has a gradient: then the other is zeros.
bool BackwardRun::has_gradient(const PlanStep& step, Value& dy) const {
  if (dy.defined()) return true;
  const size_t end = step.first + step.count;
  const auto defined = [](const Tensor& grad) { return grad.defined(); };
  bool some = false;
  for (size_t op = step.first; op < end; ++op) {
    const auto& grads = grad_extra_outputs_[op];
    some = some || std::any_of(grads.begin(), grads.end(), defined);
  }
  if (!some) return false;
  const auto& outputs = call_.shapes.outputs;
  const bool known = end - 1 < outputs.size() && outputs[end - 1].has_value();
  LIGATURE_CHECK_STATE(known, "[", step.op->label(), "] the operation behind it returned None as ",
                       "the gradient of its input, so it has a gradient of an extra output only; "
                       "return zeros instead of None");
  dy = zeros(*outputs[end - 1]);
  return true;
}

/// A Python operation is given zeros where there is no gradient.
void BackwardRun::fill_in_zeros(const PlanStep& step) {
  for (size_t op = step.first; op < step.first + step.count; ++op) {
    for (size_t j = 0; j < grad_extra_outputs_[op].size(); ++j) {
      const auto& meta = call_.shapes.extra_outputs[op][j];
      Tensor& grad = grad_extra_outputs_[op][j];
      if (!grad.defined() && meta) grad = zeros(*meta);
    }
  }
}

void BackwardRun::prepare(const PlanStep& step) {
  ctxs_.clear();
  for (size_t op = step.first; op < step.first + step.count; ++op) {
    contexts_[op].requires_grad = need_.flags[op];
    if (!plan_.filled_by_user.empty()) check_usable(contexts_[op]);
    call_.saved.unpack(op);
    ctxs_.push_back(&contexts_[op]);
    if (step.kind.python) continue;
    read_saved(contexts_[op], *plan_.basic_ops[op]);
    read_extra_gradients(grad_extra_outputs_[op], *plan_.basic_ops[op]);
  }
  if (step.kind.python) fill_in_zeros(step);
}

Value BackwardRun::run_step(size_t index, Value dy) {
  const PlanStep& step = plan_.backward[index];
  prepare(step);
  if (!step.kind.python && from_outside_) {
    dy = read_gradient(dy, *plan_.basic_ops[step.first + step.count - 1]);
  }
  from_outside_ = !step.kind.ours;
  hold(dy);
  const auto extras =
      at::ArrayRef<std::vector<Tensor>>(grad_extra_outputs_).slice(step.first, step.count);
  for (const auto& grads : extras) {
    for (const Tensor& grad : grads) kernels::Run::hold(grad);
  }
  contexts_.holder = step.op->releases_saved() && !step.kind.python ? &call_.saved : nullptr;
  const kernels::KernelLog* log =
      call_.observer != nullptr ? call_.observer->before_backward(index, dy, extras) : nullptr;
  ObservedStep observed(call_.observer);
  StepView view(step, watched_, log, plan_.options.device.type());
  FuserBackwardResult result = [&] {
    StepScope scope(step.kind);
    return step.op->fuser_backward(ctxs_, dy, extras);
  }();
  view.finish();
  observed.ran();
  if (call_.observer != nullptr) call_.observer->after_backward(step, index, result);
  take_gradients(step, result);
  return std::move(result.grad_input);
}

void BackwardRun::take_gradients(const PlanStep& step, FuserBackwardResult& result) {
  LIGATURE_CHECK_STATE(
      result.grad_params.size() == step.count && result.grad_extra_inputs.size() == step.count, "[",
      step.op->label(), "] its backward must return gradients for each of ", step.count,
      " basic operations, got ", result.grad_params.size(), " lists for parameters and ",
      result.grad_extra_inputs.size(), " for extra inputs");
  const bool may_omit = !step.kind.python;
  for (size_t k = 0; k < step.count; ++k) {
    const size_t op = step.first + k;
    const size_t first_param = call_.param_offsets[op];
    const size_t num_params = call_.param_offsets[op + 1] - first_param;
    auto& grad_params = result.grad_params[k];
    LIGATURE_CHECK_STATE(grad_params.size() == num_params || (may_omit && grad_params.empty()), "[",
                         plan_.basic_ops[op]->label(), "] its backward must return ", num_params,
                         " parameter gradients, got ", grad_params.size());
    for (size_t j = 0; j < grad_params.size(); ++j) {
      if (need_.flags[op].param(j)) results_[1 + first_param + j] = std::move(grad_params[j]);
    }
    const auto& inputs = plan_.wiring->inputs[op];
    auto& grad_extra = result.grad_extra_inputs[k];
    // The gradient of a channel inside the step is the step's own business.
    const auto inside = [&](const Wiring::Input& input) {
      return input.producer != Wiring::kNone && input.producer >= step.first;
    };
    LIGATURE_CHECK_STATE(
        grad_extra.size() == inputs.size() ||
            (grad_extra.empty() && (may_omit || std::all_of(inputs.begin(), inputs.end(), inside))),
        "[", plan_.basic_ops[op]->label(), "] its backward must return ", inputs.size(),
        " extra input gradients, got ", grad_extra.size());
    for (size_t j = 0; j < grad_extra.size(); ++j) {
      if (!need_.flags[op].extra_input(j) || !grad_extra[j].defined()) continue;
      if (inputs[j].caller != Wiring::kNone) {
        results_[first_extra_ + inputs[j].caller] = std::move(grad_extra[j]);
      } else if (!inside(inputs[j])) {
        Tensor& sum = grad_extra_outputs_[inputs[j].producer][inputs[j].output];
        sum = sum.defined() ? at::add(sum, grad_extra[j]) : std::move(grad_extra[j]);
      }
    }
    grad_extra_outputs_[op].clear();
    contexts_[op].save_for_backward({});
  }
}

}  // namespace ligature
