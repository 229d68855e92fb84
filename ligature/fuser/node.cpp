#include "ligature/fuser/node.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>

#include "ligature/fuser/builtin_scope.h"
#include "ligature/fuser/node_ptr.h"

namespace ligature {

using torch::autograd::variable_list;

size_t FuserNode::save_tensor(const Tensor& tensor, const std::vector<Tensor>& outputs, size_t op) {
  const at::TensorImpl* identity = tensor.unsafeGetTensorImpl();
  for (size_t k = 0; k < saved_.size(); ++k) {
    if (saved_identity_[k] == identity) {
      last_user_[k] = std::min(last_user_[k], op);
      return k;
    }
  }
  const bool is_output = std::any_of(outputs.begin(), outputs.end(),
                                     [&](const Tensor& y) { return y.is_same(tensor); });
  saved_.emplace_back(tensor, is_output);
  saved_identity_.push_back(identity);
  last_user_.push_back(op);
  return saved_.size() - 1;
}

void FuserNode::save(const std::vector<Tensor>& outputs, const std::vector<uint32_t>& versions) {
  slots_.resize(contexts_->size());
  size_t version = 0;
  for (size_t op = 0; op < contexts_->size(); ++op) {
    OperationContext& ctx = (*contexts_)[op];
    for (const Value& value : ctx.saved()) {
      Slot slot;
      if (value.is_quantized()) {
        slot.shell = value.quantized()->shell();
        const std::vector<Tensor> tensors = value.quantized()->tensors();
        slot.first = saved_.size();
        slot.count = tensors.size();
        for (const Tensor& tensor : tensors) {
          saved_.emplace_back(tensor, false);
          saved_identity_.push_back(nullptr);
          last_user_.push_back(op);
        }
      } else if (value.defined()) {
        const Tensor& tensor = value.tensor();
        const uint32_t saved_version = versions[version++];
        LIGATURE_CHECK_STATE(
            tensor.is_inference() || tensor._version() == saved_version,
            "one of the variables needed for gradient computation has been modified by an inplace "
            "operation: ",
            sizes_string(tensor.sizes()), ", saved for the backward of ",
            plan_->basic_ops[op]->name(), ", is at version ", tensor._version(),
            "; expected version ", saved_version, " instead");
        slot.first = save_tensor(tensor, outputs, op);
        slot.count = 1;
      }
      slots_[op].push_back(std::move(slot));
    }
    ctx.save_for_backward({});
  }
  note_internal();
  saved_identity_.clear();
}

// Whatever the caller can see, or what travels on a channel, is held by somebody else as long as
// the call is under way; memory from outside of torch cannot be resized. A tensor that hooks packed
// is the hooks' business.
void FuserNode::note_internal() {
  internal_.resize(saved_.size());
  for (size_t k = 0; k < saved_.size(); ++k) {
    const at::TensorImpl* tensor = saved_identity_[k];
    if (tensor == nullptr || saved_[k].has_hooks() || !tensor->has_storage()) continue;
    const at::Storage& storage = tensor->unsafe_storage();
    internal_[k] = c10::raw::intrusive_ptr::use_count(const_cast<at::TensorImpl*>(tensor)) == 1 &&
                   storage.use_count() == 1 && storage.resizable();
  }
}

void FuserNode::remember_extra_outputs(const std::vector<std::vector<Tensor>>& extra_outputs) {
  for (const auto& outputs : extra_outputs) {
    auto& metas = extra_outputs_.emplace_back();
    for (const Tensor& output : outputs) metas.push_back(ValueMeta::of(output));
  }
}

void FuserNode::fill_in_zeros(const PlanStep& step, std::vector<std::vector<Tensor>>& grads) const {
  for (size_t op = step.first; op < step.first + step.count; ++op) {
    for (size_t j = 0; j < grads[op].size(); ++j) {
      if (grads[op][j].defined()) continue;
      const ValueMeta& meta = extra_outputs_[op][j];
      grads[op][j] = at::zeros(meta.sizes, at::TensorOptions(meta.dtype).device(meta.device));
    }
  }
}

void FuserNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& variable : saved_) variable.reset_data();
}

FuserNode::Need FuserNode::what_is_needed() const {
  const size_t n = contexts_->size();
  Need need{n, std::vector<GradFlags>(n)};
  const size_t extra_edges = 1 + param_offsets_.back();
  for (size_t op = n; op-- > 0;) {
    const GradFlags& wanted = (*contexts_)[op].requires_grad;
    GradFlags& flags = need.flags[op];
    if (!wanted.op) continue;
    for (size_t j = 0; j < param_offsets_[op + 1] - param_offsets_[op]; ++j) {
      if (wanted.param(j) && task_should_compute_output(1 + param_offsets_[op] + j)) {
        flags.params |= uint64_t{1} << j;
      }
    }
    const auto& inputs = plan_->wiring->inputs[op];
    for (size_t j = 0; j < inputs.size(); ++j) {
      const bool from_channel = inputs[j].caller == Wiring::kNone;
      if (wanted.extra_input(j) &&
          (from_channel || task_should_compute_output(extra_edges + inputs[j].caller))) {
        flags.extra_inputs |= uint64_t{1} << j;
        if (!from_channel) need.lowest_op = op;
      }
    }
    if (flags.params != 0) need.lowest_op = op;
  }
  if (n > 0 && (*contexts_)[0].requires_grad.input && task_should_compute_output(0)) {
    need.lowest_op = 0;
    need.flags[0].input = true;
  }
  for (size_t op = need.lowest_op; op < n; ++op) {
    need.flags[op].op = true;
    if (op > need.lowest_op) need.flags[op].input = true;
  }
  return need;
}

bool FuserNode::let_go(const OperationContext& ctx, size_t i, bool& internal) {
  const size_t op = &ctx - contexts_->all.data();
  const Slot& slot = slots_[op][i];
  if (keep_graph_ || slot.first == Wiring::kNone) return false;
  internal = slot.shell == nullptr && internal_[slot.first];
  for (size_t k = slot.first; k < slot.first + slot.count; ++k) {
    if (last_user_[k] < op) return false;
  }
  for (size_t k = slot.first; k < slot.first + slot.count; ++k) {
    unpacked_[k].reset();
    saved_[k].reset_data();
  }
  return true;
}

void FuserNode::unpack(size_t op) {
  std::vector<Value> values;
  values.reserve(slots_[op].size());
  // A checkpoint runs its forward again when the first tensor is asked for.
  std::optional<RecomputeScope> recompute;
  if (autocast_.session != nullptr && !slots_[op].empty()) recompute.emplace(autocast_);
  for (const Slot& slot : slots_[op]) {
    for (size_t k = slot.first; k < slot.first + slot.count; ++k) {
      if (!unpacked_[k].defined()) unpacked_[k] = saved_[k].unpack(getptr());
    }
    if (slot.first == Wiring::kNone) {
      values.emplace_back();
    } else if (slot.shell != nullptr) {
      values.emplace_back(slot.shell->with_tensors(
          {unpacked_.begin() + slot.first, unpacked_.begin() + slot.first + slot.count}));
    } else {
      values.emplace_back(unpacked_[slot.first]);
    }
  }
  (*contexts_)[op].save_for_backward(std::move(values));
}

variable_list FuserNode::backward(variable_list& grads) {
  const Plan& plan = *plan_;
  const size_t n = contexts_->size();
  const Need need = what_is_needed();
  const size_t extra_edges = 1 + param_offsets_.back();
  variable_list result(extra_edges + plan.wiring->caller_inputs.size());

  Value dy;
  std::vector<std::vector<Tensor>> grad_extra_outputs(n);
  for (size_t op = 0; op < n; ++op) {
    grad_extra_outputs[op].resize(plan.wiring->outputs[op].size());
  }
  std::vector<Tensor> caller_grads(plan.wiring->caller_outputs.size());
  for (size_t k = 0; k < outputs_.size(); ++k) {
    if (outputs_[k] != kMainOutput) {
      caller_grads[outputs_[k]] = std::move(grads[k]);
    } else {
      dy = grads[k].defined() ? std::move(grads[k]) : input_metadata(k).zeros_like();
    }
  }
  for (size_t op = 0; op < n; ++op) {
    for (size_t j = 0; j < plan.wiring->outputs[op].size(); ++j) {
      const size_t caller = plan.wiring->outputs[op][j].caller;
      if (caller != Wiring::kNone) grad_extra_outputs[op][j] = std::move(caller_grads[caller]);
    }
  }

  std::shared_ptr<DelayedSession> session;
  if (plan.options.recipe != nullptr) session = backward_session(autocast_.reduce_amax);
  std::optional<DelayedSourceScope> delayed;
  if (session != nullptr) delayed.emplace(session.get());
  keep_graph_ = torch::autograd::get_current_graph_task_id() < 0 ||
                torch::autograd::get_current_graph_task_keep_graph();
  unpacked_.resize(saved_.size());
  const std::vector<GradFlags> flags_of_forward = [&] {
    std::vector<GradFlags> flags;
    for (const auto& ctx : *contexts_) flags.push_back(ctx.requires_grad);
    return flags;
  }();
  // The contexts serve every backward of this graph: what this one narrows is put back.
  struct Restore {
    Contexts& contexts;
    const std::vector<GradFlags>& flags;
    std::vector<Tensor>& unpacked;
    ~Restore() {
      for (size_t op = 0; op < contexts.size(); ++op) {
        contexts[op].requires_grad = flags[op];
        contexts[op].save_for_backward({});
      }
      contexts.owner = nullptr;
      unpacked.clear();
    }
  } restore{*contexts_, flags_of_forward, unpacked_};

  c10::SmallVector<OperationContext*, 8> ctxs;
  for (size_t s = plan.backward.size(); s-- > 0;) {
    const PlanStep& step = plan.backward[s];
    const size_t end = step.first + step.count;
    if (end <= need.lowest_op) break;
    ctxs.clear();
    for (size_t op = step.first; op < end; ++op) {
      (*contexts_)[op].requires_grad = need.flags[op];
      unpack(op);
      ctxs.push_back(&(*contexts_)[op]);
    }
    if (step.op->is_guest()) fill_in_zeros(step, grad_extra_outputs);
    contexts_->owner = step.op->takes_saved() && !step.op->is_guest() ? this : nullptr;
    std::optional<kernels::KernelLog> log;
    if (trace_ != nullptr) log.emplace(trace_->device);
    FuserBackwardResult step_result = [&] {
      StepScope scope(*step.op);
      return step.op->fuser_backward(
          ctxs, dy,
          at::ArrayRef<std::vector<Tensor>>(grad_extra_outputs).slice(step.first, step.count));
    }();
    if (log) {
      TracedStep traced{
          true, log->take(), TracedValue::of(dy), TracedValue::of(step_result.grad_input), {}};
      log.reset();
      if (step.op->is_guest()) traced.kernels = {{step.op->name(), "python", {}}};
      std::lock_guard<std::mutex> lock(trace_->mutex);
      trace_->backward[s] = std::move(traced);
    }
    LIGATURE_CHECK_STATE(step_result.grad_params.size() == step.count &&
                             step_result.grad_extra_inputs.size() == step.count,
                         "[", step.op->label(), "] its backward must return gradients for each of ",
                         step.count, " basic operations, got ", step_result.grad_params.size(),
                         " lists for parameters and ", step_result.grad_extra_inputs.size(),
                         " for extra inputs");
    for (size_t k = 0; k < step.count; ++k) {
      const size_t op = step.first + k;
      const size_t num_params = param_offsets_[op + 1] - param_offsets_[op];
      auto& grad_params = step_result.grad_params[k];
      const bool may_omit = !step.op->is_guest();
      LIGATURE_CHECK_STATE(grad_params.size() == num_params || (may_omit && grad_params.empty()),
                           "[", plan.basic_ops[op]->label(), "] its backward must return ",
                           num_params, " parameter gradients, got ", grad_params.size());
      for (size_t j = 0; j < grad_params.size(); ++j) {
        if (need.flags[op].param(j)) result[1 + param_offsets_[op] + j] = std::move(grad_params[j]);
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
      (*contexts_)[op].save_for_backward({});
    }
    dy = std::move(step_result.grad_input);
    for (size_t k = 0; k < saved_.size(); ++k) {
      if (last_user_[k] < step.first || last_user_[k] >= end) continue;
      unpacked_[k].reset();
      if (!keep_graph_) saved_[k].reset_data();
    }
  }
  if (need.lowest_op == 0 && n > 0 && need.flags[0].input) {
    result[0] = dy.is_quantized() ? wrap_quantized(dy.quantized()) : dy.tensor();
  }
  return result;
}

namespace {

bool has_memory(const Tensor& t) {
  return t.defined() && quantized_of(t) == nullptr && t.has_storage();
}

/// A tensor and its memory, to be known again: their memory is given back as if this were not, but
/// their addresses are not used again.
struct Identity {
  c10::weak_intrusive_ptr<at::TensorImpl> tensor;
  c10::weak_intrusive_ptr<at::StorageImpl> storage;

  explicit Identity(const Tensor& t)
      : tensor(t.getIntrusivePtr()), storage(t.storage().getWeakStorageImpl()) {}
};

/// Gradients in the same memory as another tensor become copies: what autograd takes over as the
/// gradient of a leaf, it adds to in place. One and the same tensor is seen by its reference count.
void unshare(variable_list& result, const std::vector<Identity>& grads) {
  for (Tensor& grad : result) {
    if (!has_memory(grad) || grad.storage().use_count() == 1) continue;
    const auto* storage = grad.storage().unsafeGetStorageImpl();
    const bool with_given = std::any_of(grads.begin(), grads.end(), [&](const Identity& other) {
      return other.storage._unsafe_get_target() == storage &&
             other.tensor._unsafe_get_target() != grad.unsafeGetTensorImpl();
    });
    const bool with_result = std::any_of(result.begin(), result.end(), [&](const Tensor& other) {
      return has_memory(other) && !other.is_same(grad) && other.is_alias_of(grad);
    });
    if (with_given || with_result) grad = grad.clone();
  }
}

}  // namespace

variable_list FuserNode::apply(variable_list&& grads) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool create_graph = at::GradMode::is_enabled();
  std::vector<Identity> identities;
  identities.reserve(grads.size());
  for (const Tensor& grad : grads) {
    if (has_memory(grad)) identities.emplace_back(grad);
  }
  torch::autograd::edge_list edges;
  if (create_graph) {
    edges = next_edges();
    for (const Tensor& grad : grads) {
      if (grad.defined() && grad.requires_grad()) {
        edges.push_back(torch::autograd::impl::gradient_edge(grad));
      }
    }
  }
  variable_list result;
  {
    at::NoGradGuard no_grad;
    result = backward(grads);
    unshare(result, identities);
  }
  if (!create_graph) return result;

  // A graph of this backward is asked for, and there is none: whatever would flow through it, back
  // to the gradients given or to the inputs of forward, runs into an error.
  auto refuse = make_node<torch::autograd::Error>(
      "trying to differentiate twice a function that was marked with @once_differentiable",
      std::move(edges));
  for (Tensor& grad : result) {
    if (!grad.defined()) continue;
    grad = grad.detach();
    torch::autograd::set_history(grad, refuse);
  }
  return result;
}

}  // namespace ligature
