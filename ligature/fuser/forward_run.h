// One forward run of a plan, whoever asked for it: an eager call or a compiled graph.
#pragma once

#include <optional>
#include <vector>

#include "ligature/fuser/backward_run.h"
#include "ligature/fuser/execute.h"

namespace ligature {

/// Completes the contexts that a step of a user's filled for the backward of others. `args`: of all
/// basic operations.
void complete_contexts(const Plan& plan, const PlanStep& step, Contexts& contexts, ArgsList args);

class ForwardRun {
 public:
  ForwardRun(const Plan& plan, const Call& call, const GradPlan& grads, Contexts& contexts);

  /// `bytes`: what the plan remembers of its small buffers; null in a compiled graph, whose results
  /// may not share memory.
  Value run(SmallBytes* bytes);

  /// By operation; nothing at all for a plan without extra inputs and outputs.
  const std::vector<std::vector<Tensor>>& extra_outputs() const { return extra_outputs_; }
  /// For a backward in which a user's operation may leave gradients out.
  ForwardShapes shapes() const;
  /// Of every plain tensor in the contexts, when it was saved, in order.
  at::ArrayRef<uint32_t> versions() const { return versions_; }

 private:
  /// Lets operation `i` quantize its output for the next one.
  void check_kwargs() const;
  /// Everything that comes from outside, as kernels can read it.
  void read_arguments();
  void read_parameters(size_t op);
  Value read_input(size_t step, Value x) const;
  Tensor read_extra_input(size_t op, size_t slot, const Tensor& extra) const;
  void check_from(size_t first, const Value& input);
  std::optional<ValueMeta> known_meta(
      const Wiring::Input& slot, const std::vector<at::SmallVector<ValueMeta, 1>>& produced) const;
  void take_extra_inputs(const PlanStep& step);
  Value run_step(size_t index, const Value& x);
  void take_extra_outputs(const PlanStep& step, FuserForwardResult& result);
  void check_may_omit(const PlanStep& step, size_t op, size_t output) const;
  bool records_shapes() const { return plan_.has_extras && !plan_.ours; }

  const Plan& plan_;
  const Call& call_;
  Contexts& contexts_;
  c10::SmallVector<OpArgs, 4> args_;
  std::vector<Tensor> params_;  // in place of the call's, where some had to be written out
  std::vector<std::vector<Tensor>> extra_inputs_;
  std::vector<std::vector<Tensor>> extra_outputs_;
  std::vector<std::optional<ValueMeta>> outputs_;  // by operation, where they are known
  c10::SmallVector<uint32_t, 8> versions_;
  size_t checked_ = 0;
  bool watched_ = false;  // by modes of torch
};

}  // namespace ligature
