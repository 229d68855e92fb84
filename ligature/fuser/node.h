// The autograd node of a fuser: holds what forward saved and runs the backward steps.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <string>
#include <vector>

#include "ligature/fuser/backward_run.h"
#include "ligature/fuser/plan.h"
#include "ligature/recipes/autocast.h"

namespace ligature {

class FuserNode : public torch::autograd::Node, private SavedValues {
 public:
  FuserNode(std::shared_ptr<const Plan> plan, std::shared_ptr<Contexts> contexts,
            std::vector<size_t> param_offsets, AutocastState autocast,
            std::shared_ptr<void> keep_alive, RunObserverPtr observer)
      : plan_(std::move(plan)),
        contexts_(std::move(contexts)),
        param_offsets_(std::move(param_offsets)),
        autocast_(std::move(autocast)),
        keep_alive_(std::move(keep_alive)),
        observer_(std::move(observer)) {}

  /// An output of the node: the main one (caller == none) or one of the extra outputs.
  void add_output(size_t caller_index) { outputs_.push_back(caller_index); }
  static constexpr size_t kMainOutput = Wiring::kNone;

  void remember_shapes(ForwardShapes shapes) { shapes_ = std::move(shapes); }

  /// Takes over what the contexts hold. `outputs`: the tensors that the node returned. `versions`:
  /// of every saved tensor, when it was saved, in order.
  void save(const std::vector<Tensor>& outputs, at::ArrayRef<uint32_t> versions);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;
  std::string name() const override { return "LigatureFuserBackward"; }

 private:
  /// A saved value: tensors in `saved_`, and for a quantized one what puts them together.
  struct Slot {
    QuantizedPtr shell;
    size_t first = Wiring::kNone;  // none: an undefined value
    size_t count = 0;
  };
  /// What hooks were given, and must give back.
  struct Packed {
    ValueMeta meta;
    at::DimVector strides;
    bool dense;  // each element at a place of its own, without gaps
  };
  struct Saved {
    torch::autograd::SavedVariable variable;
    size_t last_user;              // the operation after whose backward it is not needed
    const at::TensorImpl* tensor;  // itself, only while saving; null for a quantized value's part
    bool internal = false;         // only operations of the call have seen it
    Tensor unpacked{};             // only while backward runs
    std::unique_ptr<Packed> packed{};  // for hooks: what they were given

    Saved(const Tensor& t, bool is_output, size_t op, const at::TensorImpl* identity);
  };

  torch::autograd::variable_list backward(torch::autograd::variable_list& grads);
  void unpack(size_t op) override;
  void check_unpacked(size_t op, size_t slot, size_t part, Saved& saved) const;
  void used(size_t first, size_t end) override;
  size_t save_tensor(const Tensor& tensor, const std::vector<Tensor>& outputs, size_t op);
  void note_internal();
  bool try_release(const OperationContext& ctx, size_t i, bool& internal) override;
  /// What one operation saved.
  at::ArrayRef<Slot> slots(size_t op) const {
    const size_t begin = op == 0 ? 0 : slot_ends_[op - 1];
    return at::ArrayRef<Slot>(slots_).slice(begin, slot_ends_[op] - begin);
  }

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Contexts> contexts_;
  std::vector<size_t> param_offsets_;
  AutocastState autocast_;  // of forward
  std::shared_ptr<void> keep_alive_;
  RunObserverPtr observer_;
  c10::SmallVector<size_t, 2> outputs_;
  ForwardShapes shapes_;
  std::vector<Saved> saved_;
  bool keep_graph_ = true;                   // only while backward runs
  std::vector<Slot> slots_;                  // every saved value, by operation
  c10::SmallVector<uint32_t, 6> slot_ends_;  // of each operation
};

}  // namespace ligature
