// What one basic operation keeps from its forward to its backward: tensors, which the autograd node
// saves (hooks, version checks, early release), and plain state.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "ligature/base/bound.h"
#include "ligature/context_state.h"
#include "ligature/flags.h"
#include "ligature/op_quantization.h"
#include "ligature/value.h"

namespace ligature {

/// Which gradients an operation has to give, decided in forward and narrowed in backward to what
/// the caller asked for. Flag i of `params` and `extra_inputs` stands for the i-th of them.
struct GradFlags {
  bool op = false;     ///< the operation runs in backward at all
  bool input = false;  ///< its input needs a gradient
  Flags params;
  Flags extra_inputs;

  bool param(size_t i) const { return params[i]; }
  bool extra_input(size_t i) const { return extra_inputs[i]; }
};

struct Contexts;
class OperationContext;

/// Who holds what forward saved, while backward runs.
class SavedValues {
 public:
  /// Puts what an operation saved into its context.
  virtual void unpack(size_t op) = 0;
  /// The operations from `first` to `end` (not included) have run.
  virtual void used(size_t first, size_t end) = 0;
  /// Drops the i-th saved tensor of `ctx` where nothing needs it after this backward step, and says
  /// so. `internal`: whether only operations of this call have ever seen its memory.
  virtual bool try_release(const OperationContext& /*ctx*/, size_t /*i*/, bool& /*internal*/) {
    return false;
  }

 protected:
  ~SavedValues() = default;
};

/// A saved tensor for the last time.
struct ReleasedValue {
  Value value;
  bool may_overwrite = false;  ///< nothing else holds its memory, and nobody will look at it
};

class OperationContext {
 public:
  void save_for_backward(std::vector<Value> values) { saved_ = std::move(values); }
  const std::vector<Value>& saved() const { return saved_; }
  size_t num_saved() const { return saved_.size(); }

  /// The i-th saved tensor; undefined when an undefined one was saved.
  const Tensor& saved_tensor(size_t i) const {
    LIGATURE_CHECK_STATE(i < saved_.size(), "backward wants saved tensor ", i,
                         ", but forward saved ", saved_.size());
    return saved_[i].tensor();
  }
  const Value& saved_value(size_t i) const {
    LIGATURE_CHECK_STATE(i < saved_.size(), "backward wants saved tensor ", i,
                         ", but forward saved ", saved_.size());
    return saved_[i];
  }

  /// As saved_value(i), for an operation that does not look at it again: its memory is free as soon
  /// as what is returned goes, if the graph is not kept.
  ReleasedValue release_saved(size_t i);

  GradFlags requires_grad;
  ContextState state;
  /// Parameters that backward needs by identity (their `main_grad`), not by value.
  std::vector<Tensor> parameter_references;
  /// The quantizers that forward computed with; null in high precision.
  OpQuantizationPtr quantization;
  /// In which format the operation before takes the gradient of its output, our gradient's.
  QuantizerPtr grad_input_quantizer;
  Usage grad_input_usage;
  Target grad_input_target() const { return {grad_input_quantizer.get(), grad_input_usage}; }
  /// A language binding's own attributes of it.
  BoundPtr bound;
  /// The contexts of one call live and die together; null for a context by itself.
  Contexts* block = nullptr;

 private:
  std::vector<Value> saved_;
};

/// The contexts of one call, one per basic operation.
struct Contexts : std::enable_shared_from_this<Contexts> {
  explicit Contexts(size_t count) : all(count) {
    for (auto& ctx : all) ctx.block = this;
  }
  OperationContext& operator[](size_t i) { return all[i]; }
  const OperationContext& operator[](size_t i) const { return all[i]; }
  size_t size() const { return all.size(); }
  auto begin() const { return all.begin(); }
  auto end() const { return all.end(); }

  std::vector<OperationContext> all;
  /// The call's kernels may not wait for a device, in backward too.
  bool no_sync = false;
  /// Set while a backward step runs that may release saved tensors.
  SavedValues* holder = nullptr;
};

inline ReleasedValue OperationContext::release_saved(size_t i) {
  ReleasedValue taken{saved_value(i), false};
  bool internal = false;
  if (block == nullptr || block->holder == nullptr ||
      !block->holder->try_release(*this, i, internal)) {
    return taken;
  }
  saved_[i] = {};
  if (!internal || taken.value.is_quantized() || !taken.value.defined()) return taken;
  const Tensor& tensor = taken.value.tensor();
  taken.may_overwrite = tensor.use_count() == 1 && tensor.storage().use_count() == 1;
  return taken;
}

/// A pointer that keeps a context alive wherever it lives.
inline std::shared_ptr<OperationContext> share(OperationContext& ctx) {
  LIGATURE_CHECK_STATE(ctx.block != nullptr, "this context belongs to no call");
  return {ctx.block->shared_from_this(), &ctx};
}

}  // namespace ligature
