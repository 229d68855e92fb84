#include "ligature/fuser/node.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "ligature/fuser/node_ptr.h"
#include "ligature/kernels/run.h"
#include "ligature/readable.h"

namespace ligature {

using torch::autograd::variable_list;

FuserNode::Saved::Saved(const Tensor& t, bool is_output, size_t op, const at::TensorImpl* identity)
    : variable(t, is_output), last_user(op), tensor(identity) {
  // A layout of its own is a Python operation's, which knows what to do with it.
  if (!variable.has_hooks() || t.layout() != at::kStrided || t.is_nested()) return;
  packed = std::make_unique<Packed>(
      Packed{ValueMeta::of(t), at::DimVector(t.strides()), t.is_non_overlapping_and_dense()});
}

size_t FuserNode::save_tensor(const Tensor& tensor, const std::vector<Tensor>& outputs, size_t op) {
  const at::TensorImpl* identity = tensor.unsafeGetTensorImpl();
  for (size_t k = 0; k < saved_.size(); ++k) {
    if (saved_[k].tensor == identity) {
      saved_[k].last_user = std::min(saved_[k].last_user, op);
      return k;
    }
  }
  const bool is_output = std::any_of(outputs.begin(), outputs.end(),
                                     [&](const Tensor& y) { return y.is_same(tensor); });
  saved_.emplace_back(tensor, is_output, op, identity);
  return saved_.size() - 1;
}

void FuserNode::save(const std::vector<Tensor>& outputs, at::ArrayRef<uint32_t> versions) {
  size_t count = 0;
  for (const OperationContext& ctx : *contexts_) count += ctx.num_saved();
  saved_.reserve(count);
  slots_.reserve(count);
  slot_ends_.reserve(contexts_->size());
  size_t version = 0;
  for (size_t op = 0; op < contexts_->size(); ++op) {
    OperationContext& ctx = (*contexts_)[op];
    for (const Value& value : ctx.saved()) {
      Slot& slot = slots_.emplace_back();
      if (value.is_quantized()) {
        slot.shell = value.quantized()->shell();
        const std::vector<Tensor> tensors = value.quantized()->tensors();
        slot.first = saved_.size();
        slot.count = tensors.size();
        for (const Tensor& tensor : tensors) saved_.emplace_back(tensor, false, op, nullptr);
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
    }
    slot_ends_.push_back(static_cast<uint32_t>(slots_.size()));
    ctx.save_for_backward({});
  }
  note_internal();
}

// Whatever the caller can see, or what travels on a channel, is held by somebody else as long as
// the call is under way; memory from outside of torch cannot be resized. A tensor that hooks packed
// is the hooks' business.
void FuserNode::note_internal() {
  for (Saved& saved : saved_) {
    const at::TensorImpl* tensor = std::exchange(saved.tensor, nullptr);
    if (tensor == nullptr || saved.variable.has_hooks() || !tensor->has_storage()) continue;
    const at::Storage& storage = tensor->unsafe_storage();
    saved.internal = c10::raw::intrusive_ptr::use_count(const_cast<at::TensorImpl*>(tensor)) == 1 &&
                     storage.use_count() == 1 && storage.resizable();
  }
}

void FuserNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Saved& saved : saved_) saved.variable.reset_data();
}

bool FuserNode::try_release(const OperationContext& ctx, size_t i, bool& internal) {
  const size_t op = &ctx - contexts_->all.data();
  const at::ArrayRef<Slot> own = slots(op);
  const Slot& slot = own[i];
  if (keep_graph_ || slot.first == Wiring::kNone) return false;
  internal = slot.shell == nullptr && saved_[slot.first].internal;
  for (size_t k = slot.first; k < slot.first + slot.count; ++k) {
    if (saved_[k].last_user < op) return false;
  }
  for (size_t k = slot.first; k < slot.first + slot.count; ++k) {
    kernels::Run::hold(saved_[k].unpacked);
    saved_[k].unpacked.reset();
    saved_[k].variable.reset_data();
  }
  return true;
}

/// Kernels rely on what forward saved: hooks may give back another tensor with its values, but none
/// of another kind. Strides are made those that were packed.
void FuserNode::check_unpacked(size_t op, size_t slot, size_t part, Saved& saved) const {
  const Packed& packed = *saved.packed;
  Tensor& t = saved.unpacked;
  const auto describe = [](const ValueMeta& meta) {
    return to_string(meta) + " on " + meta.device.str();
  };
  const auto name = [&] {
    const bool is_part = slots(op)[slot].shell != nullptr;
    return "[" + plan_->basic_ops[op]->label() + "] saved tensor " + std::to_string(slot) +
           (is_part ? ", part " + std::to_string(part) : std::string()) +
           ": what saved-tensor hooks give back";
  };
  if (!is_readable(t) && !plan_->basic_ops[op]->is_python_op()) t = readable(t, name);
  const bool strided = t.layout() == at::kStrided && !t.is_nested();
  const bool same = strided && t.scalar_type() == packed.meta.dtype &&
                    t.device() == packed.meta.device && t.sizes() == packed.meta.sizes;
  LIGATURE_CHECK_STATE(same, name(), " must be ", describe(packed.meta), " as they were given it, ",
                       "got ", strided ? describe(ValueMeta::of(t)) : "one of another layout");
  if (!packed.dense || t.strides() == packed.strides) return;
  Tensor in_order = at::empty_strided(t.sizes(), packed.strides, t.options());
  t = in_order.copy_(t);
}

void FuserNode::unpack(size_t op) {
  const at::ArrayRef<Slot> wanted = slots(op);
  if (wanted.empty()) return;
  std::vector<Value> values;
  values.reserve(wanted.size());
  // A checkpoint runs its forward again when the first tensor is asked for.
  std::optional<RecomputeScope> recompute;
  if (autocast_.session != nullptr) recompute.emplace(autocast_);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Slot& slot = wanted[i];
    for (size_t k = slot.first; k < slot.first + slot.count; ++k) {
      Saved& saved = saved_[k];
      if (saved.unpacked.defined()) continue;
      std::optional<kernels::Run::Outside> outside;
      if (saved.variable.has_hooks()) outside.emplace();
      saved.unpacked = saved.variable.unpack(getptr());
      if (saved.packed != nullptr) check_unpacked(op, i, k - slot.first, saved);
    }
    if (slot.first == Wiring::kNone) {
      values.emplace_back();
    } else if (slot.shell != nullptr) {
      std::vector<Tensor> parts;
      parts.reserve(slot.count);
      for (size_t k = 0; k < slot.count; ++k) parts.push_back(saved_[slot.first + k].unpacked);
      values.emplace_back(slot.shell->with_tensors(std::move(parts)));
    } else {
      values.emplace_back(saved_[slot.first].unpacked);
    }
  }
  (*contexts_)[op].save_for_backward(std::move(values));
}

void FuserNode::used(size_t first, size_t end) {
  for (Saved& saved : saved_) {
    if (saved.last_user < first || saved.last_user >= end) continue;
    kernels::Run::hold(saved.unpacked);
    saved.unpacked.reset();
    if (!keep_graph_) saved.variable.reset_data();
  }
}

variable_list FuserNode::backward(variable_list& grads) {
  const Plan& plan = *plan_;
  check_no_fake_mode([&] { return "[" + plan.basic_ops.back()->label() + "] its backward"; });
  const BackwardNeed need = BackwardNeed::of(plan, *contexts_, param_offsets_, [this](size_t edge) {
    return task_should_compute_output(edge);
  });
  Value dy;
  std::vector<Tensor> caller_grads(plan.wiring->caller_outputs.size());
  for (size_t k = 0; k < outputs_.size(); ++k) {
    if (outputs_[k] != kMainOutput) {
      caller_grads[outputs_[k]] = std::move(grads[k]);
    } else {
      dy = grads[k].defined() ? std::move(grads[k]) : input_metadata(k).zeros_like();
    }
  }
  std::shared_ptr<DelayedSession> session;
  if (plan.options.recipe != nullptr) session = backward_session(autocast_.reduce_amax);
  std::optional<DelayedSourceScope> delayed;
  if (session != nullptr) delayed.emplace(session.get());
  keep_graph_ = torch::autograd::get_current_graph_task_id() < 0 ||
                torch::autograd::get_current_graph_task_keep_graph();
  struct Clear {
    std::vector<Saved>& all;
    ~Clear() {
      for (Saved& saved : all) saved.unpacked.reset();
    }
  } clear{saved_};
  BackwardRun run(
      {plan, *contexts_, param_offsets_, shapes_, *this, observer_.get(), &plan.backward_bytes},
      need);
  return run.run(std::move(dy), std::move(caller_grads));
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
void unshare(variable_list& result, at::ArrayRef<Identity> grads) {
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
  c10::SmallVector<Identity, 2> identities;
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
