// What one basic operation keeps from its forward to its backward: tensors, which the autograd node
// saves (hooks, version checks, early release), and plain state.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "ligature/plain_state.h"
#include "ligature/quantization/op_quantization.h"
#include "ligature/value.h"

namespace ligature {

/// Which gradients an operation has to give, decided in forward and narrowed in backward to what
/// the caller asked for. Bit i of `params` and `extra_inputs` stands for the i-th of them.
struct GradFlags {
  bool op = false;     ///< the operation runs in backward at all
  bool input = false;  ///< its input needs a gradient
  uint64_t params = 0;
  uint64_t extra_inputs = 0;

  bool param(size_t i) const { return (params >> i) & 1U; }
  bool extra_input(size_t i) const { return (extra_inputs >> i) & 1U; }
};

struct Contexts;

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

  GradFlags requires_grad;
  PlainState state;
  /// Parameters that backward needs by identity (their `main_grad`), not by value.
  std::vector<Tensor> parameter_references;
  /// The quantizers that forward computed with; null in high precision.
  OpQuantizationPtr quantization;
  /// In which format the operation before takes the gradient of its output, our gradient's.
  QuantizerPtr grad_input_quantizer;
  Usage grad_input_usage;
  Target grad_input_target() const { return {grad_input_quantizer.get(), grad_input_usage}; }
  /// What a language binding keeps with the context.
  std::shared_ptr<void> host;
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
};

/// A pointer that keeps a context alive wherever it lives.
inline std::shared_ptr<OperationContext> share(OperationContext& ctx) {
  LIGATURE_CHECK_STATE(ctx.block != nullptr, "this context belongs to no call");
  return {ctx.block->shared_from_this(), &ctx};
}

}  // namespace ligature
