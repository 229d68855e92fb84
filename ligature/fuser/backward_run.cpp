#include "ligature/fuser/backward_run.h"

#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>

#include <optional>

#include "ligature/fuser/builtin_scope.h"

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
      if (wanted.param(j) && wanted_result(1 + param_offsets[op] + j)) {
        flags.params |= uint64_t{1} << j;
      }
    }
    const auto& inputs = plan.wiring->inputs[op];
    for (size_t j = 0; j < inputs.size(); ++j) {
      const bool from_channel = inputs[j].caller == Wiring::kNone;
      if (wanted.extra_input(j) &&
          (from_channel || wanted_result(extra_edges + inputs[j].caller))) {
        flags.extra_inputs |= uint64_t{1} << j;
        if (!from_channel) need.lowest_op = op;
      }
    }
    if (flags.params != 0) need.lowest_op = op;
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

/// An operation of a host language is given zeros where there is no gradient.
void fill_in_zeros(const PlanStep& step, const std::vector<std::vector<ValueMeta>>& extra_outputs,
                   c10::SmallVectorImpl<std::vector<Tensor>>& grads) {
  for (size_t op = step.first; op < step.first + step.count; ++op) {
    for (size_t j = 0; j < grads[op].size(); ++j) {
      if (grads[op][j].defined()) continue;
      const ValueMeta& meta = extra_outputs[op][j];
      grads[op][j] = at::zeros(meta.sizes, at::TensorOptions(meta.dtype).device(meta.device));
    }
  }
}

}  // namespace

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
  for (size_t s = plan.backward.size(); s-- > 0;) {
    const PlanStep& step = plan.backward[s];
    const size_t end = step.first + step.count;
    if (end <= need.lowest_op) break;
    ctxs.clear();
    for (size_t op = step.first; op < end; ++op) {
      contexts[op].requires_grad = need.flags[op];
      call.saved.unpack(op);
      ctxs.push_back(&contexts[op]);
    }
    if (step.kind.guest) fill_in_zeros(step, call.extra_outputs, grad_extra_outputs);
    hold(dy);
    for (size_t op = step.first; op < end; ++op) {
      for (const Tensor& grad : grad_extra_outputs[op]) cuda::hold_memory(grad);
    }
    contexts.owner = step.op->takes_saved() && !step.kind.guest ? call.owner : nullptr;
    std::optional<kernels::KernelLog> log;
    if (call.trace != nullptr) log.emplace(call.trace->device);
    FuserBackwardResult step_result = [&] {
      StepScope scope(step.kind);
      return step.op->fuser_backward(
          ctxs, dy,
          at::ArrayRef<std::vector<Tensor>>(grad_extra_outputs).slice(step.first, step.count));
    }();
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
      LIGATURE_CHECK_STATE(
          grad_extra.size() == inputs.size() ||
              ((may_omit || step.op->handles_internal_channels()) && grad_extra.empty()),
          "[", plan.basic_ops[op]->label(), "] its backward must return ", inputs.size(),
          " extra input gradients, got ", grad_extra.size());
      for (size_t j = 0; j < grad_extra.size(); ++j) {
        if (!need.flags[op].extra_input(j) || !grad_extra[j].defined()) continue;
        if (inputs[j].caller != Wiring::kNone) {
          result[extra_edges + inputs[j].caller] = std::move(grad_extra[j]);
        } else {
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
