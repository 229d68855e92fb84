// One forward run of a plan, whoever asked for it: an eager call or a compiled graph.
#pragma once

#include <optional>
#include <vector>

#include "ligature/fuser/execute.h"
#include "ligature/fuser/tracer.h"

namespace ligature {

class ForwardRun {
 public:
  ForwardRun(const Plan& plan, const Call& call, const GradPlan& grads, Contexts& contexts);

  Value run();

  /// By operation; nothing at all for a plan without extra inputs and outputs.
  const std::vector<std::vector<Tensor>>& extra_outputs() const { return extra_outputs_; }
  /// Of every plain tensor in the contexts, when it was saved, in order.
  at::ArrayRef<uint32_t> versions() const { return versions_; }

 private:
  void check_kwargs() const;
  void check_from(size_t first, const Value& input);
  std::optional<ValueMeta> known_meta(
      const Wiring::Input& slot, const std::vector<at::SmallVector<ValueMeta, 1>>& produced) const;
  void take_extra_inputs(const PlanStep& step);
  Value run_step(size_t index, const Value& x);

  const Plan& plan_;
  const Call& call_;
  Contexts& contexts_;
  c10::SmallVector<OpArgs, 4> args_;
  std::vector<std::vector<Tensor>> extra_inputs_;
  std::vector<std::vector<Tensor>> extra_outputs_;
  c10::SmallVector<uint32_t, 8> versions_;
  std::optional<ForwardTracer> tracer_;
  size_t checked_ = 0;
};

}  // namespace ligature
